"""From a function to its rewritten twin: the source is found by file and line, rewritten, compiled under the user's
file name and line numbers.

The twin shares the original's globals and closure cells (the same objects, not copies), defaults and annotations.
Functions of libraries (torch, transformers, the standard library: everything that is installed) are called as they are;
where one of them decides by a tensor (of torch's own, its distributions and its averages of weights alone), it and
those that lead there are rewritten, and the code is captured once more.  So are methods of the user's classes that
Python itself calls (properties, operators).  A library's wrapper around a user's function (`@torch.no_grad()`) is
called with the function's twin inside.
"""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import sys
import types
from typing import Any

from mycel.capture.fence import OPENED, REWRITTEN, WHY_NOT, function_of, is_library
from mycel.capture.syntax.rewrite import RUNTIME, rewrite, unfit

_FUTURE = functools.reduce(
    lambda a, b: a | b, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
_TWINS: dict[int, tuple[types.CodeType, types.CodeType | None]] = {}  # by id of the code, which is kept alive here


def twin(fn: Any, runtime: dict[str, Any]) -> Any:
    """The function, method, partial or callable object with its control flow rewritten; itself if there is nothing to
    rewrite."""
    if isinstance(fn, types.FunctionType):
        return _wrapper(fn, runtime) if _is_closed(fn) else _function(fn, runtime)
    if isinstance(fn, types.MethodType):
        rewritten = twin(fn.__func__, runtime)
        return fn if rewritten is fn.__func__ else types.MethodType(rewritten, fn.__self__)
    if isinstance(fn, functools.partial):
        rewritten = twin(fn.func, runtime)
        return fn if rewritten is fn.func else functools.partial(rewritten, *fn.args, **fn.keywords)
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    if isinstance(fn, type):
        return _constructor(fn, runtime)
    method = getattr(type(fn), "__call__", None)  # noqa: B004
    if isinstance(method, types.FunctionType) and not _is_closed(method):
        return types.MethodType(_function(method, runtime), fn)
    return fn


def method_twin(method: Any, runtime: dict[str, Any]) -> Any:
    """A method or property of a class with its function rewritten."""
    rewritten = twin(function_of(method), runtime)
    if isinstance(method, property):
        return property(rewritten, method.fset, method.fdel, method.__doc__)
    if isinstance(method, functools.cached_property):
        new = functools.cached_property(rewritten)
        new.__set_name__(object, method.attrname or "")
        return new
    return rewritten


def _is_closed(fn: types.FunctionType) -> bool:
    """A function of a library, which is called as it is, unless it decides on tensors."""
    return is_library(fn.__code__.co_filename) and fn.__code__ not in OPENED


def _constructor(cls: type, runtime: dict[str, Any]) -> Any:
    """A user's class whose __init__ is an ordinary one: made by its twin."""
    init = cls.__init__  # type: ignore[misc]
    is_plain = type(cls) is type and cls.__new__ is object.__new__  # type: ignore[comparison-overlap]
    if not is_plain or not isinstance(init, types.FunctionType):
        return cls
    rewritten: Any = twin(init, runtime)
    return cls if rewritten is init else functools.partial(_construct, cls, rewritten)


def _construct(cls: type, init: types.FunctionType, *args: Any, **kwargs: Any) -> Any:
    instance: Any = object.__new__(cls)
    init(instance, *args, **kwargs)
    return instance


def _function(fn: types.FunctionType, runtime: dict[str, Any]) -> types.FunctionType:
    code = fn.__code__
    if id(code) in REWRITTEN:
        return fn
    if id(code) not in _TWINS:
        _TWINS[id(code)] = (code, _compile(fn))
    new = _TWINS[id(code)][1]
    if new is None:
        return fn
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    cells.update({name: types.CellType(value) for name, value in runtime.items()})
    rewritten = types.FunctionType(
        new, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells[n] for n in new.co_freevars)
    )
    rewritten.__kwdefaults__ = fn.__kwdefaults__
    functools.update_wrapper(rewritten, fn)
    return rewritten


def _wrapper(fn: types.FunctionType, runtime: dict[str, Any]) -> types.FunctionType:
    """A library's wrapper with the twin of the user's function it wraps."""
    inner = getattr(fn, "__wrapped__", None)
    if not isinstance(inner, types.FunctionType) or fn.__closure__ is None:
        return fn
    rewritten = twin(inner, runtime)
    if rewritten is inner:
        return fn
    cells = tuple(types.CellType(rewritten) if _holds(c, inner) else c for c in fn.__closure__)
    new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    new.__kwdefaults__ = fn.__kwdefaults__
    return new


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False


# -- source ---------------------------------------------------------------------------------------------------------


def _compile(fn: types.FunctionType) -> types.CodeType | None:
    """The rewritten code of a function, or None with the reason in WHY_NOT."""
    code = fn.__code__
    definition = _definition(code, fn.__globals__)
    reason = "its source is not available" if definition is None else unfit(definition[0])
    if definition is None or reason is not None:
        WHY_NOT[code] = str(reason)
        return None
    node, owner = definition
    node = _Private(owner).visit(_clone(node)) if owner else _clone(node)
    new = rewrite(node)
    name, new.name = new.name, f"{new.name}@"  # else its own name would be the factory's variable
    names = [*code.co_freevars, RUNTIME, "undefined@"]
    given = ast.Assign([ast.Name(n, ast.Store()) for n in names], ast.Constant(None))
    factory = ast.FunctionDef("factory@", ast.arguments([], [], None, [], [], None, []), [given, new], [])
    tree = ast.Module([ast.fix_missing_locations(ast.copy_location(factory, new))], [])
    compiled = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    rewritten = _inner(_inner(compiled, "factory@"), new.name).replace(co_name=name, co_qualname=code.co_qualname)
    _register(rewritten)
    return rewritten


def _inner(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _register(code: types.CodeType) -> None:
    """Functions written inside a rewritten one are rewritten with it; methods of classes inside are not."""
    REWRITTEN[id(code)] = code
    for const in code.co_consts:
        if isinstance(const, types.CodeType) and not _is_class_body(const):
            _register(const)


def _is_class_body(code: types.CodeType) -> bool:
    return "__module__" in code.co_names and "__qualname__" in code.co_names and not code.co_flags & 0x2


def _clone(node: Any) -> Any:
    """A deep copy of a tree, places kept."""
    if isinstance(node, list):
        return [_clone(n) for n in node]
    if not isinstance(node, ast.AST):
        return node
    new = type(node)(**{f: _clone(getattr(node, f)) for f in node._fields if hasattr(node, f)})
    return ast.copy_location(new, node) if hasattr(node, "lineno") else new


def _definition(code: types.CodeType, env: dict[str, Any]) -> tuple[Any, str] | None:
    """The syntax of the function with this code, and the class it is written in."""
    lines = linecache.getlines(code.co_filename, env) or _command_lines(code.co_filename)
    if not lines:
        return None
    try:
        functions = _functions(tuple(lines))
    except SyntaxError:
        return None
    fits = [(n, owner) for n, owner in functions.get(code.co_firstlineno, ()) if _matches(n, code)]
    return min(fits, key=lambda pair: _span(pair[0]), default=None)


def _command_lines(file: str) -> list[str]:
    """The source of `python -c SOURCE`; other code without a file (notebooks, doctests) is in Python's line cache."""
    given = sys.orig_argv
    at = given.index("-c") + 1 if file == "<string>" and "-c" in given else len(given)
    return given[at].splitlines(keepends=True) if at < len(given) else []


@functools.lru_cache(maxsize=64)
def _functions(lines: tuple[str, ...]) -> dict[int, list[tuple[Any, str]]]:
    """The functions of a file by their first line."""
    functions: dict[int, list[tuple[Any, str]]] = {}

    def visit(node: ast.AST, owner: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            functions.setdefault(first, []).append((node, owner))
        inner = node.name if isinstance(node, ast.ClassDef) else owner
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse("".join(lines)), "")
    return functions


def _matches(node: Any, code: types.CodeType) -> bool:
    """Same name and parameters; for lambdas also the columns, since a line may hold several."""
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))]
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    if name != code.co_name or len(names) != count:
        return False
    if name != "<lambda>":
        return True
    inside = [
        (line, column)
        for line, _, column, end in code.co_positions()
        if line is not None and column is not None and end != column
    ]
    start, stop = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return names == list(code.co_varnames[:count]) and all(start <= at <= stop for at in inside)


def _span(node: Any) -> tuple[int, int]:
    """The extent of a lambda: of two that enclose the same code, the inner one is meant."""
    return (node.end_lineno - node.lineno, node.end_col_offset - node.col_offset)


class _Private(ast.NodeTransformer):
    """Names with two leading underscores, as the class around mangles them."""

    def __init__(self, owner: str) -> None:
        self.owner = owner.lstrip("_")

    def visit(self, node: ast.AST) -> Any:
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str) and value.startswith("__") and not value.endswith("__") and self.owner:
                setattr(node, field, f"_{self.owner}{value}")
        return self.generic_visit(node)
