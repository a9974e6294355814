"""Jumps become flags, so that what is left is structured: if, while, for and one value to return.

    while t(x):                          broke = False
        if c(x):                         while not broke and t(x):
            break                 =>         if c(x):
        x = f(x)                                 broke = True
                                             else:
                                                 x = f(x)

A branch that always leaves takes the rest of its list into the other branch.  Returns that then stand at the ends of
the branches at the end of the function stay returns; if there are others, all become `returned, result` flags.  Where a
jump may or may not have happened, the rest is guarded by `if not flag`; such an `if` is marked `guard`: what is
undefined on its other side can only be read where Python would fail too.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from typing import Any

from mycel.capture.syntax.scope import own

RETURNED, RESULT = "returned@", "result@"
UNDEFINED = "undefined@"


def lower(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body of a function without break, continue and returns in the middle."""
    ended = _end(body)
    if ended is not None:
        return _Jumps(returns=False).block(ended, None)[0]
    jumps = _Jumps(returns=True)
    out, _ = jumps.block([*body, *_return_none(body)], None)
    first, last = body[0], body[-1]
    start = [_assign(RETURNED, ast.Constant(False), first), _assign(RESULT, ast.Name(UNDEFINED, ast.Load()), first)]
    return [*start, *out, placed(ast.Return(ast.Name(RESULT, ast.Load())), last)]


# -- returns at the end ---------------------------------------------------------------------------------------------


def _end(body: list[ast.stmt]) -> list[ast.stmt] | None:
    """The body with every return at the end of a branch at its end, or None."""
    at = next((i for i, s in enumerate(body) if _jumps(s, ast.Return)), None)
    if at is None:
        return [*body, *_return_none(body)] if body else [ast.Return(ast.Constant(None))]
    node, rest = body[at], body[at + 1 :]
    if isinstance(node, ast.Return):
        return body[: at + 1]
    if not isinstance(node, ast.If) or not (_leaves(node.body) or _leaves(node.orelse)):
        return None
    then = _end(node.body if _leaves(node.body) else node.body + rest)
    orelse = _end(node.orelse if _leaves(node.orelse) else node.orelse + rest)
    if then is None or orelse is None:
        return None
    new = placed(ast.If(node.test, then, _located(orelse, node)), node)
    new.returns = True
    return [*body[:at], new]


def _located(stmts: list[ast.stmt], like: ast.stmt) -> list[ast.stmt]:
    return [s if hasattr(s, "lineno") else placed(s, like) for s in stmts]


def _return_none(body: list[ast.stmt]) -> list[ast.stmt]:
    return [] if _leaves(body) or not body else [placed(ast.Return(ast.Constant(None)), body[-1])]


def _leaves(stmts: list[ast.stmt]) -> bool:
    """Does control never reach the end of these statements?"""
    if not stmts:
        return False
    match stmts[-1]:
        case ast.Return() | ast.Break() | ast.Continue() | ast.Raise():
            return True
        case ast.If(body=body, orelse=orelse):
            return _leaves(body) and _leaves(orelse)
    return False


def _jumps(node: ast.stmt, *kinds: type[ast.stmt]) -> bool:
    return any(isinstance(n, kinds) for n in own([node]))


# -- flags ----------------------------------------------------------------------------------------------------------


class _Jumps:
    """Replaces jumps; each method returns statements and the flags they may set."""

    def __init__(self, returns: bool) -> None:
        self.returns = returns
        self.count = itertools.count(1)

    def block(self, stmts: list[ast.stmt], loop: int | None) -> tuple[list[ast.stmt], set[str]]:
        out: list[ast.stmt] = []
        for i, node in enumerate(stmts):
            rest = stmts[i + 1 :]
            if rest and isinstance(node, ast.If) and self._may_jump(node):
                node, rest = _taking(node, rest)
            new, flags = self.stmt(node, loop)
            out += new
            if not flags:
                if not rest and i + 1 < len(stmts):
                    return out, flags
                continue
            if rest and not _leaves([node]):
                more, further = self.block(rest, loop)
                guard = placed(ast.If(_none_of(flags, node), more, []), rest[0])
                guard.guard = True
                out.append(guard)
                flags = flags | further
            return out, flags
        return out, set()

    def _may_jump(self, node: ast.stmt) -> bool:
        loops = [n for n in own([node]) if isinstance(n, (ast.While, ast.For))]
        inside = {id(n) for loop in loops for n in own(loop.body)}
        kinds = (ast.Break, ast.Continue)
        return any(isinstance(n, kinds) and id(n) not in inside for n in own([node])) or (
            self.returns and _jumps(node, ast.Return)
        )

    def stmt(self, node: ast.stmt, loop: int | None) -> tuple[list[ast.stmt], set[str]]:
        match node:
            case ast.Return() if self.returns:
                value = node.value or ast.Constant(None)
                return [_assign(RESULT, value, node), _assign(RETURNED, ast.Constant(True), node)], {RETURNED}
            case ast.Break():
                return [_assign(f"broke@{loop}", ast.Constant(True), node)], {f"broke@{loop}"}
            case ast.Continue():
                return [_assign(f"skipped@{loop}", ast.Constant(True), node)], {f"skipped@{loop}"}
            case ast.While() | ast.For():
                return self.loop(node, loop)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():  # whose returns are its own
                return [node], set()
        flags: set[str] = set()
        new = _copy(node)
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                done, more = self.block(inner, loop)
                if name == "orelse" and isinstance(node, ast.Try) and flags and done:
                    done = [_guard(flags, done, node)]
                setattr(new, name, done or ([placed(ast.Pass(), node)] if name == "body" else []))
                flags |= more
        for name in ("handlers", "cases"):
            for part in getattr(new, name, ()):
                part.body, more = self.block(part.body, loop)
                part.body = part.body or [placed(ast.Pass(), node)]
                flags |= more
        return [new], flags

    def loop(self, node: ast.While | ast.For, outer: int | None) -> tuple[list[ast.stmt], set[str]]:
        if isinstance(node, ast.While) and any(isinstance(n, ast.NamedExpr) for n in ast.walk(node.test)):
            node = _test_inside(node)
        k = next(self.count)
        broke, skipped = f"broke@{k}", f"skipped@{k}"
        body, flags = self.block(node.body, k)
        stops = flags - {skipped}
        new = _copy(node)
        new.body = [*([_assign(skipped, ast.Constant(False), node)] if skipped in flags else []), *body]
        new.orelse = []
        more = _none_of(stops, node) if stops else None
        if isinstance(new, ast.For):
            new.more = more  # type: ignore[attr-defined]
        elif more is not None:
            always = isinstance(new.test, ast.Constant) and new.test.value is True
            new.test = more if always else placed(ast.BoolOp(ast.And(), [more, new.test]), node)
        out: list[ast.stmt] = [*([_assign(broke, ast.Constant(False), node)] if broke in flags else []), new]
        left = flags & {RETURNED}
        if node.orelse:
            done, further = self.block(node.orelse, outer)
            out += [_guard(stops, done, node)] if stops else done
            left |= further
        return out, left


def _taking(node: ast.If, rest: list[ast.stmt]) -> tuple[ast.If, list[ast.stmt]]:
    """An if of which one branch always leaves takes what follows into the other."""
    then, orelse = _leaves(node.body), _leaves(node.orelse)
    if not (then or orelse):
        return node, rest
    new = _copy(node)
    if then and not orelse:
        new.orelse = node.orelse + rest
    elif not then:
        new.body = node.body + rest
    return new, []


def _test_inside(node: ast.While) -> ast.While:
    """while t: … else: e  =>  while True: if not t: e; break  …"""
    new = _copy(node)
    leave = ast.If(ast.UnaryOp(ast.Not(), node.test), [*node.orelse, ast.Break()], [])
    new.test, new.body, new.orelse = placed(ast.Constant(True), node), [placed(leave, node), *node.body], []
    return new


def _guard(flags: set[str], body: list[ast.stmt], like: ast.AST) -> ast.If:
    branch = placed(ast.If(_none_of(flags, like), body, []), like)
    branch.guard = True
    return branch


def _none_of(flags: Iterable[str], like: ast.AST) -> ast.expr:
    names: list[ast.expr] = [ast.Name(f, ast.Load()) for f in sorted(flags)]
    return placed(ast.UnaryOp(ast.Not(), names[0] if len(names) == 1 else ast.BoolOp(ast.Or(), names)), like)


def _assign(name: str, value: ast.expr, like: ast.AST) -> ast.stmt:
    return placed(ast.Assign([ast.Name(name, ast.Store())], value), like)


def placed(node: Any, like: ast.AST) -> Any:
    """The node at the place of another; parts that have a place keep it."""
    part: Any
    for part in ast.walk(node):
        if "lineno" in part._attributes and not hasattr(part, "lineno"):
            ast.copy_location(part, like)
            part.end_lineno, part.end_col_offset = part.lineno, part.col_offset  # a call's line is its function's last
    return node


def _copy(node: Any) -> Any:
    """A shallow copy, lists of parts that are changed copied too."""
    new = type(node)(**{f: getattr(node, f) for f in node._fields if hasattr(node, f)})
    ast.copy_location(new, node)
    for name in ("returns", "guard"):
        if hasattr(node, name) and name not in node._fields:
            setattr(new, name, getattr(node, name))
    for name in ("handlers", "cases"):
        if hasattr(new, name):
            setattr(new, name, [_copy(part) for part in getattr(new, name)])
    return new
