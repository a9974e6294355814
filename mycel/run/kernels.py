"""Operators' kernels as source text: a kernel of one expression is written in line, a longer one is copied beside the generated code.

linear(x, w)  ->  torch.nn.functional.linear(x, w)
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mycel.ir import Op, Type


@dataclass(frozen=True)
class Kernel:
    """How an operator's kernel is written: `expr` over its parameters, or a function `source` with what it needs."""

    signature: inspect.Signature | None
    expr: ast.expr | None
    path: str  # the callable's name in generated code, where there is no expr
    sources: Mapping[str, str]  # functions and constants to copy, by name


def sources_of(op: Op, donate: bool = False) -> Mapping[str, str]:
    """Functions and constants that must stand beside code that uses this operator."""
    return {**kernel_of(op).sources, **(_function_source(op.inplace) if donate and op.inplace is not None else {})}  # type: ignore[arg-type]


def write(op: Op, inputs: Sequence[str], params: Mapping[str, Any], types: Sequence[Any] = ()) -> str:
    """The expression that computes an equation; what a kernel asks of its operands' types is answered here."""
    if op.name == "opaque":
        return _write_opaque(inputs, **params)
    kernel = kernel_of(op)
    if "device" in op.defaults:
        params = {**params, "device": _Name("device")}
    if kernel.expr is None or kernel.signature is None:
        named = [f"{k}={ast.unparse(_literal(v))}" for k, v in params.items()]
        return f"{kernel.path}({', '.join([*inputs, *named])})"
    values: dict[str, ast.expr] = {}
    known: dict[str, Type] = {}
    rest = [ast.parse(text, mode="eval").body for text in inputs]
    for p in kernel.signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            values[p.name] = ast.Tuple(rest, ast.Load())
        elif p.kind is p.KEYWORD_ONLY:
            values[p.name] = _literal(params.get(p.name, p.default))
        else:
            at = len(values)
            values[p.name] = rest.pop(0) if rest else _literal(p.default)
            if at < len(types) and isinstance(types[at], Type):
                known[p.name] = types[at]
    return ast.unparse(_Substitute(values, known).visit(copy.deepcopy(kernel.expr)))


def write_into(op: Op, at: int, inputs: Sequence[str], params: Mapping[str, Any]) -> str:
    """The expression that computes an equation over the memory of operand `at`."""
    named = {k: ast.unparse(_literal(v)) for k, v in {**op.defaults, **params}.items()}
    return op.into[at].format(*inputs, **named)


def write_inplace(op: Op, inputs: Sequence[str], params: Mapping[str, Any]) -> str:
    """The statement that computes an equation over the memory of its first operands."""
    named = [f"{k}={ast.unparse(_literal(v))}" for k, v in params.items()]
    return f"{op.inplace.__name__}({', '.join([*inputs, *named])})"  # type: ignore[union-attr]


def _write_opaque(inputs: Sequence[str], target: str, args: Any, kwargs: Any = ()) -> str:
    """torch's own call: torch.ops.aten.foo.default(x, 3)"""

    def text(value: Any) -> str:
        if not isinstance(value, tuple):
            return ast.unparse(_literal(value))
        tag, *rest = value
        if tag == "x":
            return f"{inputs[rest[0]]}.contiguous()"
        return "device" if tag == "device" else f"[{', '.join(map(text, rest))}]"

    return f"torch.ops.{target}({', '.join([*map(text, args), *(f'{k}={text(v)}' for k, v in kwargs)])})"


@functools.cache
def kernel_of(op: Op) -> Kernel:
    """The written form of an operator's kernel."""
    fn = op.kernel
    if not isinstance(fn, types.FunctionType):
        return Kernel(None, None, _torch_path(fn), {})
    tree = _definition(fn)
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        sources = _dependencies(fn, body[0].value)
        return Kernel(inspect.signature(fn), body[0].value, "", sources)
    return Kernel(inspect.signature(fn), None, fn.__name__, _function_source(fn))


# -- reading sources -------------------------------------------------------------------------------------------------


@functools.cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _definition(fn: types.FunctionType) -> ast.FunctionDef:
    for node in _module_tree(fn.__module__).body:
        if isinstance(node, ast.FunctionDef) and node.name == fn.__name__:
            return node
    raise LookupError(f"no definition of kernel {fn.__qualname__} at the top of {fn.__module__}")


def _function_source(fn: types.FunctionType) -> dict[str, str]:
    """A function's source without decorators, with the functions and constants of its module it refers to."""
    node = copy.deepcopy(_definition(fn))
    node.decorator_list = []
    node = _Unannotate().visit(node)
    sources = _dependencies(fn, node)
    return {**sources, fn.__name__: ast.unparse(node)}


class _Unannotate(ast.NodeTransformer):
    """Annotations name things the generated file does not import."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Assign([node.target], node.value or ast.Constant(None), lineno=node.lineno)


def _dependencies(fn: types.FunctionType, node: ast.AST) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}):
        value = fn.__globals__.get(name)
        if name in ("torch", "math", fn.__name__, *fn.__code__.co_varnames) or name not in fn.__globals__:
            continue
        if isinstance(value, types.FunctionType):
            found.update(_function_source(value))
        elif isinstance(value, functools._lru_cache_wrapper):
            found.update(_function_source(value.__wrapped__))  # type: ignore[arg-type]
        elif isinstance(value, (int, float, str, bool, tuple)):
            found[name] = f"{name} = {value!r}"
        elif isinstance(value, Op):
            found.update(_function_source(value.kernel))  # type: ignore[arg-type]
        else:
            raise LookupError(f"kernel {fn.__qualname__} refers to {name}, which cannot be written into generated code")
    return found


def _torch_path(fn: Callable[..., Any]) -> str:
    """torch.exp -> "torch.exp" """
    name = getattr(fn, "__name__", "")
    for path, module in (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.special", torch.special)):
        if getattr(module, name, None) is fn:
            return f"{path}.{name}"
    if isinstance(fn, torch._ops.OpOverload):
        return f"torch.ops.{fn}"
    raise LookupError(f"{fn} is not reachable from torch by name")


# -- values as syntax -----------------------------------------------------------------------------------------------


class _Name(str):
    """A param that is written as a name, not as a literal."""

    __slots__ = ()


def _literal(value: Any) -> ast.expr:
    if isinstance(value, _Name):
        return ast.Name(str(value), ast.Load())
    if isinstance(value, torch.dtype):
        return ast.parse(str(value), mode="eval").body
    if isinstance(value, tuple):
        return ast.Tuple([_literal(v) for v in value], ast.Load())
    if isinstance(value, str):
        return ast.Constant(str(value))
    return ast.parse(literal(value), mode="eval").body


def literal(value: Any) -> str:
    """A scalar as Python source."""
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "math.inf", "-inf": "-math.inf", "nan": "math.nan"}[repr(value)]
    return repr(value)


class _Substitute(ast.NodeTransformer):
    """Parameters replaced by arguments, shapes by what they are; conditional expressions whose test is constant are decided."""

    def __init__(self, values: dict[str, ast.expr], types: dict[str, Type]) -> None:
        self.values, self.types = values, types

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values[node.id]) if node.id in self.values else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.types and node.attr in ("ndim", "shape"):
            return _literal(getattr(self.types[node.value.id], node.attr))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        made = self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "len" and isinstance(node.args[0], ast.Tuple):
            return ast.Constant(len(node.args[0].elts))
        return made

    def visit_Compare(self, node: ast.expr) -> ast.AST:
        made = self.generic_visit(node)
        known = _constant(made)  # type: ignore[arg-type]
        return made if known is None else _literal(known[0])

    visit_Subscript = visit_Compare

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        known = _constant(test)
        if known is not None:
            return self.visit(node.body if known[0] else node.orelse)
        return ast.IfExp(test, self.visit(node.body), self.visit(node.orelse))


def _constant(node: ast.expr) -> tuple[Any] | None:
    """(value,) of an expression made of literals and comparisons alone."""
    simple = (
        ast.Constant,
        ast.Compare,
        ast.Tuple,
        ast.UnaryOp,
        ast.BoolOp,
        ast.operator,
        ast.unaryop,
        ast.cmpop,
        ast.boolop,
        ast.Load,
        ast.Subscript,
    )
    if not all(isinstance(n, simple) for n in ast.walk(node)):
        return None
    return (eval(compile(ast.Expression(ast.fix_missing_locations(node)), "<constant>", "eval"), {"__builtins__": {}}),)
