"""Gradients as functions: grad, value_and_grad, vjp, jvp, hessian.

Each captures the function as `jit` does, differentiates the program, and runs the result; `.program(*args)` and
`.source(*args)` show it.  Called while another function is captured, the derivative becomes part of that program: so
they nest to any order.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel import transform
from mycel.api import CompiledCall, Jit, compile_captured, compile_program, unjit
from mycel.capture import (
    LEAF,
    TRACING,
    Captured,
    Tree,
    flatten,
    flatten_arguments,
    input_tensors,
    input_values,
    paused,
    results,
    splice,
    splice_program,
)
from mycel.capture import capture as capture_call
from mycel.errors import GradientError
from mycel.ir import Block, Builder, Program, Ref, Type, Var, check, is_float, scan
from mycel.ops import o

Derive = Callable[[Captured], Captured]


class Derived(Jit):
    """A function made from another by a change of its captured program."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mode: str,
        derive: Derive,
        check_finite: bool = False,
        strict: bool = False,
        by_arguments: bool = True,
    ) -> None:
        super().__init__(fn, mode, check_finite, strict)
        self.derive, self.by_arguments = derive, by_arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if TRACING:
            with paused():
                derived = self.derived(args, kwargs)
            return splice(TRACING[-1], derived, args, kwargs)
        return super().__call__(*args, **kwargs)

    def derived(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The program of the derivative, for these arguments."""
        captured = capture_call(
            self.fn,
            args,
            kwargs,
            apart=True,
            differentiated=True,
            strict=self.strict,
            by_arguments=self.by_arguments,
        )
        with located(self.fn):
            return self.derive(replace(captured, program=transform.simplify(captured.program)))

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        return compile_captured(self.derived(args, kwargs), self.mode, self.check_finite, without_autograd)


def grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    wrt: torch.nn.Module | None = None,
    has_aux: bool = False,
    mode: str = "graph",
    check_finite: bool = False,
    strict: bool = False,
) -> Derived:
    """The gradient of a scalar function: with respect to arguments (a structure like each), or to a module's parameters
    (a dict by name)."""
    return Derived(
        unjit(fn),
        mode,
        functools.partial(_gradient, argnums=argnums, wrt=wrt, has_aux=has_aux, value=False),
        check_finite,
        strict,
        by_arguments=wrt is None,
    )


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    wrt: torch.nn.Module | None = None,
    has_aux: bool = False,
    mode: str = "graph",
    check_finite: bool = False,
    strict: bool = False,
) -> Derived:
    """(value, gradient); with `has_aux`, `fn` returns (value, aux) and this ((value, aux), gradient)."""
    return Derived(
        unjit(fn),
        mode,
        functools.partial(_gradient, argnums=argnums, wrt=wrt, has_aux=has_aux, value=True),
        check_finite,
        strict,
        by_arguments=wrt is None,
    )


def hessian(fn: Callable[..., Any], argnums: int = 0, *, mode: str = "graph") -> Derived:
    """The matrix of second derivatives with respect to one tensor argument, of shape x.shape + x.shape: forward over
    reverse."""
    return Derived(unjit(fn), mode, functools.partial(_hessian, argnum=argnums))


def jvp(
    fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], *, mode: str = "graph"
) -> tuple[Any, Any]:
    """(fn(*primals), its derivative in the direction of the tangents): forward mode."""
    if len(primals) != len(tangents):
        raise GradientError(f"jvp was given {len(primals)} primals and {len(tangents)} tangents")
    return _pushforward(unjit(fn), mode)(tuple(primals), tuple(tangents))


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False, mode: str = "graph") -> tuple[Any, ...]:
    """(fn(*primals), pull) where pull(cotangent of the result) gives the cotangents of the primals: reverse mode."""
    return Pullback(unjit(fn), mode, has_aux).forward(primals)


def stop_gradient(x: Any) -> Any:
    """The same value (or structure of values), through which no gradient flows."""
    leaves: list[torch.Tensor] = []
    tree = flatten(x, leaves)
    return tree.unflatten(iter([leaf.detach() for leaf in leaves]))


@contextlib.contextmanager
def located(fn: Any) -> Iterator[None]:
    """Gradient errors in here tell which function it is about."""
    try:
        yield
    except GradientError as e:
        target = fn.forward if isinstance(fn, torch.nn.Module) else inspect.unwrap(fn)
        code = getattr(getattr(target, "__func__", target), "__code__", None)
        if code is None or "\n  at        " in str(e):
            raise
        line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
        raise GradientError(f"{e}\n  at        {code.co_filename}:{code.co_firstlineno}\n            {line}") from None


def without_autograd(run: Callable[..., Any]) -> Callable[..., Any]:
    """Derivatives are values: torch's autograd does not record how they were computed."""

    def call(*inputs: Any) -> Any:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return run(*inputs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


# -- gradient --------------------------------------------------------------------------------------------------------


def _gradient(
    c: Captured, *, argnums: int | Sequence[int], wrt: torch.nn.Module | None, has_aux: bool, value: bool
) -> Captured:
    """A captured function -> its gradient, with the calling convention of its result changed."""
    out, aux = _value_and_aux(c.out, has_aux)
    if out.kind != "leaf":
        raise GradientError(f"the gradient is taken of a scalar tensor; the function returns {_describe(c.out)}")
    inputs: list[int | Type]
    if wrt is not None:
        inputs, grads_tree = _parameter_inputs(c, wrt)
    else:
        inputs, grads_tree = _argument_inputs(c, argnums)
    leaves = sum(1 for _ in c.out.paths(""))
    program = transform.value_and_grad(c.program, inputs, 0, leaves)
    if value:
        tree = Tree("tuple", None, (c.out, grads_tree))
        return replace(c, program=program, out=tree)
    n_grads = len(inputs)
    outs = program.main.outputs  # value, aux…, gradients… -> gradients…, aux…
    moved = (*outs[leaves : leaves + n_grads], *outs[1:leaves], *outs[leaves + n_grads :])
    program = _with_outputs(program, moved)
    return replace(c, program=program, out=Tree("tuple", None, (grads_tree, aux)) if aux is not None else grads_tree)


def _value_and_aux(out: Tree, has_aux: bool) -> tuple[Tree, Tree | None]:
    if not has_aux:
        return out, None
    if out.kind != "tuple" or len(out.children) != 2:
        raise GradientError(f"with has_aux the function returns (value, aux); it returns {_describe(out)}")
    return out.children[0], out.children[1]


def _argument_inputs(c: Captured, argnums: int | Sequence[int]) -> tuple[list[Any], Tree]:
    """Which inputs are the arguments asked for, and the structure of their gradients."""
    args = c.arguments.children[0].children
    several = not isinstance(argnums, int)
    chosen = [argnums] if isinstance(argnums, int) else list(argnums)
    starts = [0]
    for a in args:
        starts.append(starts[-1] + sum(1 for _ in a.paths("")))
    inputs: list[int] = []
    trees = []
    for i in chosen:
        if not -len(args) <= i < len(args):
            raise GradientError(f"argnums={argnums}: the function was called with {len(args)} positional arguments")
        i %= len(args)
        leaves = c.program.positions(c.leaves[starts[i] : starts[i + 1]])
        if not leaves:
            raise GradientError(
                f"argument {i} is {_describe(args[i])}, not a tensor; pass torch.tensor(...) to differentiate it"
            )
        for k in leaves:
            var = c.program.inputs[k]
            if not is_float(var.dtype):
                raise GradientError(
                    f"argument {i} ({var}) is not floating point: it has no gradient; leave it out of argnums"
                )
        inputs += leaves
        trees.append(args[i])
    return inputs, Tree("tuple", None, tuple(trees)) if several else trees[0]


def _parameter_inputs(c: Captured, module: torch.nn.Module) -> tuple[list[int | Type], Tree]:
    """Inputs that are trainable parameters of a module, by name; one the function does not use gets zeros."""
    at = {id(places[0].read()): i for places, i in zip(c.state.values(), c.program.positions(c.state), strict=True)}
    named = {k: p for k, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise GradientError(f"{type(module).__name__} has no parameter that requires a gradient")
    return [at.get(id(p), Type(p.dtype, tuple(p.shape))) for p in named.values()], Tree(
        "dict", (dict, tuple(named)), (LEAF,) * len(named)
    )


# -- second derivatives


def _hessian(c: Captured, *, argnum: int) -> Captured:
    """Rows of the Hessian: the gradient pushed forward along each basis vector, in a scan."""
    inputs, tree = _argument_inputs(c, argnum)
    if tree.kind != "leaf":
        raise GradientError(f"hessian takes one tensor argument; argument {argnum} is {_describe(tree)}")
    gradient = _gradient(c, argnums=argnum, wrt=None, has_aux=False, value=False).program
    pushed = transform.jvp(transform.simplify(gradient), inputs)
    x = c.program.inputs[inputs[0]]
    rows = Block(pushed.inputs, pushed.main.eqns, (pushed.main.outputs[1],))
    b = Builder()
    b.inputs = list(pushed.inputs[:-1])
    b.reserve(v.name for v in b.inputs)
    n = x.type.numel
    with b:
        count = o.iota(shape=(n, n), dim=0, dtype=torch.int64), o.iota(shape=(n, n), dim=1, dtype=torch.int64)
        basis = o.reshape(o.cast(o.eq(*count), dtype=x.dtype), shape=(n, *x.shape))
        name = next(k for k in ("row", "hessian_row", "hessian_row_of_main") if k not in pushed.blocks)
        params = {"body": Ref(name), "length": n, "consts": len(b.inputs), "carry": 0}
        hessian_rows = b.append(scan, (*b.inputs, basis), params, [Type(x.dtype, (n, *x.shape))])
        out = o.reshape(hessian_rows, shape=(*x.shape, *x.shape))
    blocks = {**pushed.blocks, name: rows, pushed.entry: b.block([out])}
    return replace(c, program=check(replace(pushed, blocks=blocks, updates=())), out=LEAF, effects=())


# -- forward mode ----------------------------------------------------------------------------------------------------


class Pushforward(Derived):
    """f as a function of (primals, tangents)."""

    def derived(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        primals, tangents = args
        c = capture_call(self.fn, primals, {}, apart=True)
        with located(self.fn):
            return self.pushed(c, tangents)

    def pushed(self, c: Captured, tangents: Any) -> Captured:
        leaves: list[torch.Tensor] = []
        tree = flatten(tangents, leaves)
        n, primals = len(c.leaves), c.program.positions(c.leaves)
        if n != len(set(c.leaves)):
            raise GradientError("jvp was given the same tensor twice among the primals")
        if tree != c.arguments.children[0]:
            raise GradientError(
                f"the tangents {_describe(tree)} do not have the structure of the primals "
                f"{_describe(c.arguments.children[0])}"
            )
        for var, t in zip((c.program.inputs[i] for i in primals), leaves, strict=True):
            if not is_float(var.dtype):
                raise GradientError(f"primal {var} is not floating point: it has no tangent")
            if (t.dtype, tuple(t.shape)) != (var.dtype, var.shape):
                raise GradientError(f"the tangent of {var} is {Type(t.dtype, tuple(t.shape))}")
        pushed = transform.jvp(transform.simplify(c.program), primals)
        results = len(list(c.out.paths("")))
        floats = [is_float(x.dtype) if isinstance(x, Var) else False for x in c.program.results[:results]]
        main = pushed.main
        ordered = [c.program.inputs[i].name for i in sorted(primals)]  # as their tangents are, behind all inputs
        along = dict(zip(ordered, (v.name for v in main.inputs[len(c.program.inputs) :]), strict=True))
        rest = len(c.program.results) - results  # effects stand between results and tangents
        moved = (
            *main.outputs[:results],
            *main.outputs[results + rest : results + rest + sum(floats)],
            *main.outputs[results : results + rest],
        )
        tail = main.outputs[len(main.outputs) - len(pushed.updates) :] if pushed.updates else ()
        program = _with_outputs(pushed, (*moved, *tail))
        arguments = Tree("tuple", None, (Tree("tuple", None, (c.arguments.children[0], tree)), c.arguments.children[1]))
        return replace(
            c, program=program, arguments=arguments, leaves=(*c.leaves, *(along[x] for x in c.leaves)),
            devices={**c.devices, **{t: c.devices[x] for x, t in along.items()}},
            out=Tree("tuple", None, (c.out, _only(c.out, iter(floats)))),
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _pushforward(fn: Callable[..., Any], mode: str) -> Pushforward:
    return Pushforward(fn, mode, lambda c: c)


# -- reverse mode, in two halves


class Pullback:
    """f and its pullback: `forward(primals)` gives (result, pull)."""

    def __init__(self, fn: Callable[..., Any], mode: str, has_aux: bool) -> None:
        self.fn, self.mode, self.has_aux = fn, mode, has_aux

    def forward(self, primals: tuple[Any, ...]) -> tuple[Any, ...]:
        with paused(), located(self.fn):
            c = capture_call(self.fn, primals, {}, apart=True)
            c = replace(c, program=transform.simplify(c.program))
            value, aux = _value_and_aux(c.out, self.has_aux)
            wrt, grads_tree = _argument_inputs(c, tuple(range(len(primals))))
            n = len(list(value.paths("")))
            first, second, given = transform.forward_and_backward(c.program, wrt, n)
        kept = len(first.main.outputs) - len(c.program.main.outputs)
        trees = [value, Tree("tuple", None, (LEAF,) * kept), *([aux] if aux is not None else [])]
        ahead = replace(c, program=check(first), out=Tree("tuple", None, tuple(trees)))
        types = [x.type for x in second.inputs[kept:]]
        if TRACING:
            tracer = TRACING[-1]
            leaves: list[torch.Tensor] = []
            flatten_arguments((primals, {}), leaves)
            inputs = input_tensors(c, leaves)
            outs = splice_program(tracer, first, input_values(tracer, c, inputs))
            residuals = outs[n : n + kept]
            flat = replace(
                ahead, program=_with_outputs(first, (*first.main.outputs[:n], *first.main.outputs[n + kept :]))
            )
            out = results(
                tracer,
                replace(flat, out=Tree("tuple", None, tuple(t for t in trees if t is not trees[1]))),
                inputs,
                [*outs[:n], *outs[n + kept :]],
            )

            def pull_traced(cotangent: Any) -> Any:
                gs = _cotangents(cotangent, value, given, types)
                grads = splice_program(tracer, second, [*residuals, *(tracer.cell(g).read() for g in gs)])
                return grads_tree.unflatten(iter([tracer.wrap(v) for v in grads]))

            return (out[0], pull_traced, *out[1:])
        entry = compile_captured(ahead, self.mode, around=without_autograd)
        outputs = entry.call(primals, {})
        residuals = list(outputs[1])
        run = without_autograd(compile_program(second, c.device, self.mode))

        def pull(cotangent: Any) -> Any:
            gs = _cotangents(cotangent, value, given, types)
            return grads_tree.unflatten(iter(run(*residuals, *gs)))

        return (outputs[0], pull, *outputs[2:])


def _cotangents(cotangent: Any, value: Tree, given: list[int], types: list[Type]) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    tree = flatten(cotangent, leaves)
    if tree != value:
        raise GradientError(
            f"the cotangent {_describe(tree)} does not have the structure of the result {_describe(value)}"
        )
    chosen = [leaves[i] for i in given]
    for x, t in zip(chosen, types, strict=True):
        if (x.dtype, tuple(x.shape)) != (t.dtype, t.shape):
            raise GradientError(f"a cotangent is {Type(x.dtype, tuple(x.shape))} for a result of {t}")
    return chosen


# -- parts -----------------------------------------------------------------------------------------------------------


def _only(tree: Tree, keep: Any) -> Tree:
    """The tree with None for leaves that are not kept."""
    if tree.kind == "leaf":
        return tree if next(keep) else Tree("static", None)
    if tree.kind == "text":
        raise GradientError(
            "the function returns text of a tensor, which has no tangent\n  try       returning the tensor, or print"
        )
    return replace(tree, children=tuple(_only(c, keep) for c in tree.children))


def _with_outputs(program: Program, outputs: Sequence[Any]) -> Program:
    block = replace(program.main, outputs=tuple(outputs))
    return replace(program, blocks={**program.blocks, program.entry: block})


def _describe(tree: Tree) -> str:
    if tree.kind == "static":
        return f"{type(tree.key).__name__} {tree.key!r}"
    if tree.kind == "leaf":
        return "a tensor"
    return f"a {tree.kind} of {len(tree.children)}"
