"""Operators' kernels as source text: a kernel of one expression is written in line, a longer one is copied beside the
generated code.

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

from mycel.ir import OPS, Op, Type
from mycel.ops import o
from mycel.ops.capture_rules import resolve
from mycel.ops.opaque import output_mask


@dataclass(frozen=True)
class Kernel:
    """How an operator's kernel is written: `expr` over its parameters, or a function `source` with what it needs."""

    signature: inspect.Signature | None
    expr: ast.expr | None
    path: str  # the callable's name in generated code, where there is no expr
    sources: Mapping[str, str]  # functions and constants to copy, by name
    bound: Sequence[str] = ()  # arguments that come before the equation's


def sources_of(op: Op, donate: bool = False) -> Mapping[str, str]:
    """Functions and constants that must stand beside code that uses this operator."""
    return {**kernel_of(op).sources, **(_callable(op.inplace).sources if donate and op.inplace is not None else {})}


def write(op: Op, inputs: Sequence[str], params: Mapping[str, Any], types: Sequence[Any] = ()) -> str:
    """The expression that computes an equation; what a kernel asks of its operands' types is answered here."""
    if op is o.opaque:
        return _write_opaque(inputs, **params)
    kernel = kernel_of(op)
    if "device" in op.defaults:
        params = {**params, "device": _Name("device")}
    if kernel.expr is None or kernel.signature is None:
        named = [f"{k}={ast.unparse(_literal(v))}" for k, v in params.items()]
        return f"{kernel.path}({', '.join([*kernel.bound, *inputs, *named])})"
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
    kernel = _callable(op.inplace)
    return f"{kernel.path}({', '.join([*kernel.bound, *inputs, *named])})"


def _write_opaque(inputs: Sequence[str], target: str, args: Any, kwargs: Any = ()) -> str:
    """torch's own call: torch.ops.aten.foo.default(x, 3)"""

    def text(value: Any) -> str:
        if not isinstance(value, tuple):
            return ast.unparse(_literal(value))
        tag, *rest = value
        if tag == "x":
            return f"{inputs[rest[0]]}.contiguous()"
        return "device" if tag == "device" else f"[{', '.join(map(text, rest))}]"

    call = f"torch.ops.{target}({', '.join([*map(text, args), *(f'{k}={text(v)}' for k, v in kwargs)])})"
    mask = output_mask(resolve(target), args)
    if mask is None:
        return call
    there = [i for i, asked in enumerate(mask[1:]) if asked]
    return f"{call}[{there[0]}]" if len(there) == 1 else f"tuple(y for y in {call} if y is not None)"


@functools.cache
def kernel_of(op: Op) -> Kernel:
    """The written form of an operator's kernel."""
    fn = op.kernel
    if not isinstance(fn, types.FunctionType):
        return _callable(fn)
    tree = _definition(fn)
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        sources = _dependencies(fn, body[0].value)
        return Kernel(inspect.signature(fn), body[0].value, "", sources)
    return Kernel(inspect.signature(fn), None, fn.__name__, _function_source(fn))


def _callable(fn: Any) -> Kernel:
    """A callable as a name, with what must stand beside it: torch's own, a function, or one with its first arguments
    bound."""
    if isinstance(fn, functools.partial):
        inner = [_callable(x) for x in (fn.func, *fn.args) if callable(x)]
        bound = [_callable(x).path if callable(x) else ast.unparse(_literal(x)) for x in fn.args]
        return Kernel(
            None, None, inner[0].path, {k: text for kernel in inner for k, text in kernel.sources.items()}, bound
        )
    if isinstance(fn, types.FunctionType):
        return Kernel(None, None, fn.__name__, _function_source(fn))
    return Kernel(None, None, _torch_path(fn), {})


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
    return {**sources, fn.__name__: ast.unparse(_Kernels().visit(node))}


def class_source(cls: type) -> str:
    """The source of a class that needs torch alone."""
    node = next(n for n in _module_tree(cls.__module__).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return ast.unparse(_Unannotate().visit(copy.deepcopy(node)))


class _Kernels(ast.NodeTransformer):
    """Operators that a kernel calls become their kernels: o.exp(x) => torch.exp(x), o.cast(x, dtype=d) => o_cast(x,
    dtype=d)"""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == "o"):
            return self.generic_visit(node)
        return ast.parse(_operator(node.attr)[0], mode="eval").body


def _operator(name: str) -> tuple[str, Mapping[str, str]]:
    """An operator's kernel under a name that no function of Python has, and what must stand beside it."""
    kernel = _callable(OPS[name].kernel)
    if kernel.path not in kernel.sources:
        return kernel.path, kernel.sources
    path = f"o_{name}"
    own = kernel.sources[kernel.path].replace(f"def {kernel.path}(", f"def {path}(", 1)
    return path, {**{k: text for k, text in kernel.sources.items() if k != kernel.path}, path: own}


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
    sources: dict[str, str] = {}
    for name in sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}):
        value = fn.__globals__.get(name)
        if name in ("torch", "math", fn.__name__, *fn.__code__.co_varnames) or name not in fn.__globals__:
            continue
        if value is o:
            used = {
                n.attr
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "o"
            }
            sources.update((k, text) for operator in sorted(used) for k, text in _operator(operator)[1].items())
            continue
        if isinstance(value, types.FunctionType):
            sources.update(_function_source(value))
        elif isinstance(value, functools._lru_cache_wrapper):
            sources.update(_function_source(value.__wrapped__))  # type: ignore[arg-type]
        elif isinstance(value, (int, float, str, bool, tuple)):
            sources[name] = f"{name} = {value!r}"
        elif isinstance(value, Op):
            sources.update(_function_source(value.kernel))  # type: ignore[arg-type]
        else:
            raise LookupError(f"kernel {fn.__qualname__} refers to {name}, which cannot be written into generated code")
    return sources


def _torch_path(fn: Callable[..., Any]) -> str:
    """torch.exp -> "torch.exp" """
    name = getattr(fn, "__name__", "")
    for path, module in (
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.special", torch.special),
    ):
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
    """Parameters replaced by arguments, shapes by what they are; conditional expressions whose test is constant are
    decided."""

    def __init__(self, values: dict[str, ast.expr], types: dict[str, Type]) -> None:
        self.values, self.types = values, types

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values[node.id]) if node.id in self.values else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.types and node.attr in ("ndim", "shape"):
            return _literal(getattr(self.types[node.value.id], node.attr))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        visited = self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "len" and isinstance(node.args[0], ast.Tuple):
            return ast.Constant(len(node.args[0].elts))
        return visited

    def visit_Compare(self, node: ast.expr) -> ast.AST:
        visited = self.generic_visit(node)
        known = _constant(visited)  # type: ignore[arg-type]
        return visited if known is None else _literal(known[0])

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
