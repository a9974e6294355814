"""Which names a piece of a function binds, reads, and still needs afterwards.

    bound(s)        names s binds in its own function: assigned, deleted, imported, defined, caught, matched
    read(s)         names s may look up, functions written inside it included
    mark(body)      gives every if, while and for its `live`: the names that may be read after it (or at the loop's next
                    turn)

Liveness runs backwards over structured code whose jumps are gone (see `jumps.py`).  Names that functions written inside
may touch, and names declared nonlocal or global, are always live.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

Function = ast.FunctionDef | ast.AsyncFunctionDef


def bound(nodes: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Names bound in the function the nodes belong to."""
    visitor = _BoundNames()
    for node in [nodes] if isinstance(nodes, ast.AST) else nodes:
        visitor.visit(node)
    return visitor.names


class _BoundNames(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_FunctionDef(self, node: Function | ast.ClassDef) -> None:
        self.names.add(node.name)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """A lambda binds in itself alone."""

    def _visit_comprehension(self, node: ast.AST) -> None:
        self.names |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._name(node.name)
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.names.add(node.asname or node.name.partition(".")[0])

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self._name(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._name(node.rest)
        self.generic_visit(node)

    def _name(self, name: str | None) -> None:
        if name is not None:
            self.names.add(name)


def read(*nodes: ast.AST | None) -> set[str]:
    """Names that may be looked up."""
    names = set()
    for top in nodes:
        for node in ast.walk(top) if top is not None else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def declared(body: Iterable[ast.stmt], kind: type[ast.Global] | type[ast.Nonlocal]) -> set[str]:
    """Names a function declares global or nonlocal."""
    return {name for node in own(body) if isinstance(node, kind) for name in node.names}


def own(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """All nodes of a function but those of functions and classes written inside it."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from own(ast.iter_child_nodes(node))


def touched_inside(body: Iterable[ast.stmt]) -> tuple[set[str], set[str]]:
    """(names that functions written inside may read, names they may rebind)"""
    reads: set[str] = set()
    writes: set[str] = set()
    for node in own(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            reads |= read(node)
            writes |= {name for n in ast.walk(node) if isinstance(n, ast.Nonlocal) for name in n.names}
    return reads | writes, writes


def mark(body: list[ast.stmt]) -> None:
    """Give every if, while and for of a function its `live` names."""
    reads, _ = touched_inside(body)
    _Live(reads | declared(body, ast.Global) | declared(body, ast.Nonlocal)).block(body, set())


class _Live:
    """What is needed before a statement, given what is needed after it."""

    def __init__(self, always: set[str]) -> None:
        self.always = always

    def block(self, stmts: Iterable[ast.stmt], out: set[str]) -> set[str]:
        for stmt in reversed(list(stmts)):
            out = self.stmt(stmt, out)
        return out

    def stmt(self, node: ast.stmt, out: set[str]) -> set[str]:
        match node:
            case ast.If():
                node.live = out | self.always  # type: ignore[attr-defined]
                return read(node.test) | self.block(node.body, out) | self.block(node.orelse, out)
            case ast.While():
                return self.loop(node, out | read(node.test))
            case ast.For():
                return read(node.iter) | self.loop(node, out | read(node.more))  # type: ignore[attr-defined]
            case ast.With():
                inside = self.block(node.body, out)
                return (inside - bound(i.optional_vars for i in node.items if i.optional_vars)) | read(*node.items)
            case ast.Try():
                return self.attempt(node, out)
            case ast.Match():
                cases = [self.block(c.body, out) for c in node.cases]
                return out.union(
                    read(node.subject, *(c.pattern for c in node.cases), *(c.guard for c in node.cases)), *cases
                )
            case ast.Return():
                return read(node)
        return (out - bound(node)) | read(node)

    def loop(self, node: ast.While | ast.For, head: set[str]) -> set[str]:
        """The head needs what the end needs and what a turn needs but its own variable."""
        targets = bound(node.target) if isinstance(node, ast.For) else set()
        while True:
            more = head | (self.block(node.body, head) - targets)
            if more == head:
                break
            head = more
        node.live = head | self.always  # type: ignore[union-attr]
        return head

    def attempt(self, node: ast.Try, out: set[str]) -> set[str]:
        """Any statement of the body may jump to a handler."""
        out = self.block(node.finalbody, out) | read(*node.finalbody)
        caught = out.union(*(self.block(h.body, out) | read(h.type) for h in node.handlers))
        before, self.always = self.always, self.always | caught
        try:
            return caught | self.block(node.body, self.block(node.orelse, out))
        finally:
            self.always = before
