"""The rewriting: statements and expressions that may decide on tensors become calls of `runtime`, at the same line.

    if c: a = f(x)                  def then@1():
    else: a = g(x)                      nonlocal a
                             =>         a = m.call(f)(x)
                                    def else@1(): …
                                    m.branch(c, then@1, else@1, ("a",))
    while t: …                      m.repeat(test@2, body@2, names)
    for i in s: …                   m.each(s, body@3, more@3, names)
    a and b, not a, a < b < c       m.both(a, lambda: b), m.negate(a), m.compare(a, "<", lambda: b, …)
    a if c else b                   m.choose(c, lambda: a, lambda: b)
    assert c, s                     m.check(c, lambda: s, "c")
    f(x)                            m.call(f)(x)
    x[i]                            m.subscripted(x)[i]
    f"{x}", a % b, a in b           m.as_text(f"{x}"), m.remainder(a, b), m.is_inside(a, b)
    [f(x) for x in s if c]          m.comprehend(s, lambda s: [f(x) for x in s if c], the same as a loop, True)

Bodies are closures over the function's own variables, so the runtime reads and writes those through the closures'
cells.  Names with an @ cannot clash with the user's.  Tests that can only be Python values (`x is None`, isinstance …)
keep their `if`.
"""

from __future__ import annotations

import ast
import copy
import itertools
from typing import Any

from mycel.capture.syntax.jumps import lower, placed
from mycel.capture.syntax.scope import Function, bound, declared, mark, own, touched_inside

RUNTIME = "m@"
LIST = "the comprehension"  # a name that no code has
_SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_STATIC_CALLS = {"isinstance", "issubclass", "hasattr", "callable"}
_LOOKS_AT_FRAME = {"locals", "vars", "dir", "exec", "eval"}


def unfit(node: Function | ast.Lambda) -> str | None:
    """Why a function is left as it is, or None."""
    if isinstance(node, ast.AsyncFunctionDef):
        return "it is a coroutine"
    for inner in own(node.body if isinstance(node.body, list) else [node.body]):
        if isinstance(inner, (ast.Yield, ast.YieldFrom)):
            return "it is a generator"
        if isinstance(inner, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return "it is a coroutine"
        if (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Name)
            and inner.func.id in _LOOKS_AT_FRAME
            and not inner.args
        ):
            return f"it calls {inner.func.id}()"
    return None


def rewrite(node: ast.FunctionDef | ast.Lambda) -> ast.FunctionDef:
    """A function whose control flow goes through the runtime; its decorators, defaults and annotations left out."""
    if isinstance(node, ast.Lambda):
        body: list[ast.stmt] = [ast.copy_location(ast.Return(node.body), node.body)]
        node = ast.copy_location(ast.FunctionDef("<lambda>", node.args, body, []), node)
    new = _Rewriter(node).function()
    new.args, new.decorator_list, new.returns = _bare(node.args), [], None
    return ast.fix_missing_locations(new)


def _bare(args: ast.arguments) -> ast.arguments:
    """Parameters with placeholders for their defaults."""

    def bare(arg: Any) -> Any:
        return None if arg is None else ast.copy_location(ast.arg(arg.arg), arg)

    nothing = ast.Constant(None)
    return ast.arguments(
        [bare(a) for a in args.posonlyargs],
        [bare(a) for a in args.args],
        bare(args.vararg),
        [bare(a) for a in args.kwonlyargs],
        [d and nothing for d in args.kw_defaults],
        bare(args.kwarg),
        [nothing for _ in args.defaults],
    )


class _Rewriter(ast.NodeTransformer):
    """Rewrites one function; functions written inside it get rewriters of their own."""

    def __init__(self, node: ast.FunctionDef) -> None:
        self.node = node
        self.body = lower(node.body)
        mark(self.body)
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        self.params = {a.arg for a in every}
        self.first = (args.posonlyargs + args.args)[0].arg if args.posonlyargs or args.args else None
        self.globals = declared(node.body, ast.Global)
        self.outer = declared(node.body, ast.Nonlocal)
        self.shared = touched_inside(node.body)[1] & bound(self.body)  # names that functions inside may rebind
        self.count = itertools.count(1)
        self.hoisted: list[list[ast.stmt]] = []
        self.inside = 0  # comprehensions and lambdas around

    def function(self) -> ast.FunctionDef:
        names = sorted(bound(self.body) - self.params - self.globals - self.outer)
        new = ast.FunctionDef(
            self.node.name, self.node.args, self.stmts(self.body), self.node.decorator_list, self.node.returns
        )
        ast.copy_location(new, self.node)
        if names:  # makes them this function's variables, also where only closures assign them
            never = ast.If(
                ast.Constant(False), [ast.Assign([ast.Name(n, ast.Store()) for n in names], ast.Constant(None))], []
            )
            new.body.insert(0, ast.fix_missing_locations(ast.copy_location(never, self.node)))
        return new

    # -- statements -------------------------------------------------------------------------------------------

    def stmts(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for node in body:
            self.hoisted.append([])
            new = self.visit(node)
            out += self.hoisted.pop()
            out += new if isinstance(new, list) else [new]
        return out

    def closure(self, name: str, body: list[ast.stmt], like: ast.AST, args: tuple[str, ...] = ()) -> ast.stmt:
        names = bound(body) | (self.shared)
        inner = self.stmts(body) or [ast.Pass()]
        for kind, group in ((ast.Global, names & self.globals), (ast.Nonlocal, names - self.globals)):
            if group:
                inner.insert(0, kind(sorted(group)))
        new = ast.FunctionDef(name, _arguments(*args), inner, [])
        return placed(new, like)

    def written(self, live: set[str], *bodies: list[ast.stmt]) -> ast.expr:
        """The live names that bodies bind, as a tuple of strings."""
        names = set().union(*map(bound, bodies)) | (self.shared)
        return ast.Tuple([ast.Constant(n) for n in sorted(names & live)], ast.Load())

    def visit_If(self, node: ast.If) -> Any:
        returns = hasattr(node, "returns")
        if _is_static(node.test):
            node.test = self.visit(node.test)
            node.body, node.orelse = self.stmts(node.body), self.stmts(node.orelse)
            return node
        k = next(self.count)
        test = self.visit(node.test)
        then, orelse = (
            self.closure(f"then@{k}", node.body, node),
            self.closure(f"else@{k}", node.orelse, node.orelse[0] if node.orelse else node),
        )
        names = self.written(node.live, node.body, node.orelse)  # type: ignore[attr-defined]
        guard = [ast.Constant(True)] if hasattr(node, "guard") else []
        call = _runtime("branch", test, _name(f"then@{k}"), _name(f"else@{k}"), names, *guard)
        return [then, orelse, placed(ast.Return(call) if returns else ast.Expr(call), node.test)]

    def visit_While(self, node: ast.While) -> Any:
        k = next(self.count)
        test = self.closure(f"test@{k}", [ast.copy_location(ast.Return(node.test), node.test)], node.test)
        body = self.closure(f"body@{k}", node.body, node)
        names = self.written(node.live, node.body)  # type: ignore[attr-defined]
        call = _runtime("repeat", _name(f"test@{k}"), _name(f"body@{k}"), names)
        return [test, body, placed(ast.Expr(call), node.test)]

    def visit_For(self, node: ast.For) -> Any:
        k = next(self.count)
        items = self.visit(node.iter)
        take = ast.copy_location(ast.Assign([node.target], _name("item@")), node.target)
        body = self.closure(f"body@{k}", [take, *node.body], node, ("item@",))
        names = self.written(node.live, [take], node.body)  # type: ignore[attr-defined]
        more = node.more  # type: ignore[attr-defined]
        out = [body]
        if more is not None:
            out.append(self.closure(f"more@{k}", [ast.copy_location(ast.Return(more), node)], node))
        call = _runtime("each", items, _name(f"body@{k}"), _name(f"more@{k}") if more else ast.Constant(None), names)
        return [*out, placed(ast.Expr(call), node.iter)]

    def visit_With(self, node: ast.With) -> Any:
        node.items = [self.visit(i) for i in node.items]
        node.body = self.stmts(node.body)
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        for name in ("body", "orelse", "finalbody"):
            setattr(node, name, self.stmts(getattr(node, name)))
        types = [handler.type or _name("BaseException") for handler in node.handlers]
        for handler in node.handlers:
            handler.body = self.stmts(handler.body)
        if types:  # what is caught is known while the body runs; refusals are not the user's to catch
            caught = self.lazy(placed(ast.Tuple(copy.deepcopy(types), ast.Load()), node))
            node.body = [placed(ast.With([ast.withitem(_runtime("attempt", caught))], node.body), node)]
            node.handlers.insert(0, placed(ast.ExceptHandler(_runtime("refusals"), None, [ast.Raise()]), node))
        return node

    def visit_Match(self, node: ast.Match) -> Any:
        node.subject = self.visit(node.subject)
        for case in node.cases:
            case.guard = case.guard and self.visit(case.guard)
            case.body = self.stmts(case.body)
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        text = ast.Constant(ast.unparse(node.test))
        message = self.lazy(node.msg) if node.msg else ast.Constant(None)
        return placed(ast.Expr(_runtime("check", self.visit(node.test), message, text)), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """Without what it says of types: a name of an outer function cannot be annotated."""
        if node.value is None:
            return placed(ast.Pass(), node)
        return placed(ast.Assign([self.visit(node.target)], self.visit(node.value)), node)

    def visit_Raise(self, node: ast.Raise) -> Any:
        if node.exc is not None:
            node.exc = placed(_runtime("raised", self.visit(node.exc)), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        self._defaults(node.args)
        if unfit(node):
            return node
        return _Rewriter(node).function()

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def _defaults(self, args: ast.arguments) -> None:
        args.defaults = [self.visit(d) for d in args.defaults]
        args.kw_defaults = [d and self.visit(d) for d in args.kw_defaults]

    # -- expressions --------------------------------------------------------------------------------------------

    def lazy(self, node: ast.expr) -> ast.expr:
        """The expression as a function of nothing."""
        if not self.inside and any(isinstance(n, ast.NamedExpr) for n in ast.walk(node)):
            name = f"lazy@{next(self.count)}"
            self.hoisted[-1].append(self.closure(name, [ast.copy_location(ast.Return(node), node)], node))
            return ast.copy_location(_name(name), node)
        return ast.copy_location(ast.Lambda(_arguments(), self.visit(node)), node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self._defaults(node.args)
        if unfit(node):
            return node
        return self._within(node)

    def _within(self, node: Any) -> Any:
        self.inside += 1
        try:
            return self.generic_visit(node)
        finally:
            self.inside -= 1

    visit_SetComp = visit_DictComp = _within

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        return self._comprehension("comprehend", node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> Any:
        return self._comprehension("generate", node)

    def _comprehension(self, name: str, node: ast.ListComp | ast.GeneratorExp) -> Any:
        """The comprehension, and the for loop that it is, for items or conditions that Python does not know."""
        nested = any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield)) for n in ast.walk(node))
        if self.inside or nested or any(g.is_async for g in node.generators):
            return self._within(node)
        k = next(self.count)
        self.hoisted[-1].append(self.visit(_as_loop(f"comprehension@{k}", node)))
        items, node.generators[0].iter = self.visit(node.generators[0].iter), _name("items@")
        plain = ast.copy_location(ast.Lambda(_arguments("items@"), self._within(node)), node)
        chooses = ast.Constant(any(g.ifs for g in node.generators))
        return placed(_runtime(name, items, plain, _name(f"comprehension@{k}"), chooses), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        if all(map(_is_static, node.values)) or self._binds_inside(node):
            return self.generic_visit(node)
        name = "both" if isinstance(node.op, ast.And) else "either"
        return placed(_runtime(name, self.visit(node.values[0]), *map(self.lazy, node.values[1:])), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if not isinstance(node.op, ast.Not) or _is_static(node.operand):
            return self.generic_visit(node)
        return placed(_runtime("negate", self.visit(node.operand)), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            is_inside = placed(_runtime("is_inside", self.visit(node.left), self.visit(node.comparators[0])), node)
            return is_inside if isinstance(node.ops[0], ast.In) else placed(ast.UnaryOp(ast.Not(), is_inside), node)
        if len(node.ops) == 1 or self._binds_inside(node):
            return self.generic_visit(node)
        rest = [
            part
            for op, x in zip(node.ops, node.comparators, strict=True)
            for part in (ast.Constant(_SIGNS[type(op)]), self.lazy(x))
        ]
        return placed(_runtime("compare", self.visit(node.left), *rest), node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        is_text = isinstance(node.op, ast.Mod) and not _is_number(node.left) and not _is_number(node.right)
        self.generic_visit(node)
        return placed(_runtime("remainder", node.left, node.right), node) if is_text else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return placed(_runtime("as_text", self._parts(node)), node)

    def _parts(self, node: ast.JoinedStr) -> ast.JoinedStr:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
                if isinstance(part.format_spec, ast.JoinedStr):
                    part.format_spec = self._parts(part.format_spec)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if _is_static(node.test) or self._binds_inside(node):
            return self.generic_visit(node)
        return placed(_runtime("choose", self.visit(node.test), self.lazy(node.body), self.lazy(node.orelse)), node)

    def _binds_inside(self, node: ast.expr) -> bool:
        """A name bound inside a comprehension or lambda cannot be reached by a closure."""
        return bool(self.inside) and any(isinstance(n, ast.NamedExpr) for n in ast.walk(node))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        value, node.slice = self.visit(node.value), self.visit(node.slice)
        node.value = placed(_runtime("subscripted", value), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self.first:
            node.args = [_name("__class__"), _name(self.first)]
            return placed(node, node)
        func = self.visit(node.func)
        node.args = [self.visit(a) for a in node.args]
        node.keywords = [self.visit(k) for k in node.keywords]
        node.func = placed(_runtime("call", func), node.func)
        return node


def _as_loop(name: str, node: ast.ListComp | ast.GeneratorExp) -> ast.FunctionDef:
    """[f(x) for x in items if c]  =>  def name(items@): out = []; for x in items@: if c: out.append(f(x)); …"""
    node = copy.deepcopy(node)
    add = ast.Call(ast.Attribute(_name(LIST), "append", ast.Load()), [node.elt], [])
    body: ast.stmt = ast.Expr(add)
    for i, part in reversed([*enumerate(node.generators)]):
        for test in reversed(part.ifs):
            body = ast.If(test, [body], [])
        body = ast.For(part.target, part.iter if i else _name("items@"), [body], [])
    start = ast.Assign([ast.Name(LIST, ast.Store())], ast.List([], ast.Load()))
    loop = ast.FunctionDef(name, _arguments("items@"), [start, body, ast.Return(_name(LIST))], [])
    return placed(loop, node)  # type: ignore[no-any-return]


def _is_static(test: ast.expr) -> bool:
    """Can this only be a Python value?"""
    match test:
        case ast.Constant():
            return True
        case ast.Compare():
            return all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
        case ast.Call(func=ast.Name(id=name)):
            return name in _STATIC_CALLS
        case ast.UnaryOp(op=ast.Not()):
            return _is_static(test.operand)
        case ast.BoolOp():
            return all(map(_is_static, test.values))
        case ast.Name(id=name):
            return name in ("__debug__", "TYPE_CHECKING")
    return False


def _is_number(node: ast.expr) -> bool:
    """A number as it is written, which text is no format of."""
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _runtime(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(_name(RUNTIME), name, ast.Load()), list(args), [])


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _arguments(*names: str) -> ast.arguments:
    return ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
