"""An operator is one paragraph: kernel, types, dims, gradient, cost, meaning in smaller operators, examples.

    @op("... k+, n k+ -> ... n", vjp=linear_vjp, flops=lambda d: 2 * d.rows * d.k * d.n, examples=["f[2,3,8], f[5,8]"])
    def linear(x, w):
        "x @ w.T"
        return torch.nn.functional.linear(x, w)

The decorated function is the kernel; its positional parameters are the inputs, its keyword-only parameters the static
params.  Called with tensors an operator computes; called with `Var`s it writes an equation into the current `Builder`:
so gradient rules and expansions, written with operators, work on both.

What the fields mean
  dims      the shape and sharding rule (see `dims.py`), or a function (*types, **params) -> dims text or (text, sizes)
  dtype     of the outputs: "promote" | "float" (integers become the default float) | "first" | a dtype | a function of
            the types; one of these, or a tuple of them for several outputs
  types     the whole type rule, where shapes cannot be read from dims: (*types, **params) -> Type or tuple of Types
  vjp       (g, y, *inputs, **params) -> one cotangent for each input (None: no gradient)
  flops     a function of the dim sizes (`d.k`, `d.rows` = product of "..."); default: one for each output element
  share     of these flops, what a structure given by params leaves: a function of the types and params; default: all
  again     the share of these flops that compute once more what forward has computed: no work of the model's
  expand    the meaning in smaller operators, on the same arguments: its reference, and its gradient if there is no vjp
  pieces    the same where a compiler merges them with what is around: so that backward can keep what is dear of it, and
            compute the rest again
  followed  how many of its first results torch's autograd follows through its kernel; default: all.  Where code that
            torch records uses others, its `expand` takes its place
  write     marks a view; (x, new_outputs, *other inputs, **params) -> x with the viewed part replaced
  fresh     its results are always new memory, shared with no operand
  into      its (last) result written over operand i, as Python: one template for each operand that may be,
            "{0}.add_({1})"; implies fresh
  inplace   a kernel of the same arguments that writes its results over its first operands; runs where these are given
            away
  c         one element of its only result in C, of its operands' elements: "{0} + {1}"; or a function (at, *types,
            **params) -> text, where at(k, index) is an element of operand k (`run/native_blocks.py`), None: not so
  call_c    its only result by a function of `ops/few_rows.c`: a function (names, y, *types, **params) -> statement in
            C, of the names of operands and result; None: not so
  scratch   bytes its kernel needs while it runs, besides operands and results: a function of the types and params
  converts  bytes moved before its kernel starts, to bring operands into the form it takes: a function of the types and
            params
  turns     how many times its kernel does the like, one after another, each with its share of operations and bytes: a
            function of the types and params; None: once
  compiles  a compiler can take its kernel
  apart     it is worth a kernel of its own: a compiler does not merge it with what is before and behind it
  free      it costs nothing
  pads      its kernel pads rows of odd length itself, where aligned ones are faster
  product   a product of matrices, or made of them: what devices are fast at, and ranks share first
  rate      under which name its operations a second are measured: "product", "conv", "attention" …; "": it is bound by
            memory; a function of its inputs' types and parameters, where kernels differ
  precision in mixed precision: "low" in 16 bits, "high" in 32, "kept": it says its dtype itself or has its operand's;
            "": as its widest operand
  kept      operands, by position, that stay as wide as they are where others become 16 bits
  commutes  its two operands may change places: "always", or "exactly": not in floating point, where 0.0 and -0.0 tell
            them apart
  moves     its elements are its operand's, in other places
  looked_up dims of its first operand along which the operands behind it are places, one each: a function of the params
  scalars   operands that may be Python scalars, by position
  padding   what padding of an operand must be where the kernel does not take any value: "ones" (in integers: it
            divides), "zeros"
  averages  it is a mean over rows, or with reduction="sum" their sum: parts of a batch have shares in it
  lies      it says how its operand lies and computes nothing: lowering makes nothing of it
  stacks    it works on stacks, which may keep or return what they are given
  waits     its kernel reads values on the host: it cannot be recorded
  foreign   torch's own operator, `target` by name, of which nothing else is known
  python    it runs code of the user's, which a program names and does not hold
  by_rank   its value depends on the rank, or on other ranks
  collective  what ranks say to each other for it: bytes, steps, meaning (`Collective`)
  transfers it moves a value between memory spaces: it and what is `hosted` take operands that lie on the host
  hosted    it may run on the host: where its first operand lies there, its other tensors do too, and its results
  sent_as_sum  along the axes it names its operands are partial sums, and along no other: what follows reduces them
  linear    operands it is linear in: groups of places, each linear together while the others stay; "all": all of them.
            A partial sum passes through
  parts     how a part is computed where the kernel on parts is not it: {letter: Part}; "*" for whatever letter is
            split, "q k" for two together
  aten      ATen overloads that mean exactly this, with the same arguments in the same order ("exp.default")
  of_rows   what it is of rows of which only some count (capture/rows.py), where zeros before a sum or the least before
            a maximum do not say it: (at, *inputs, **params) -> outputs
  for_ranks it is one operator so that ranks can share it; where there are none its `expand` takes its place
  opens     ranks share it whole; of what each of them runs its `expand` takes its place, so that what several equations
            do to the same operand is done once
  effect    it is run for what it does, not for its value: never left out
  says      … it says something: two that say the same are heard twice
  defaults  of static params; read from the kernel's signature where they are not given
  examples  argument lists the laws run on, e.g. "f[2,3], i64[3]<5, dim=1" (grammar in tests/examples.py)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from mycel.ir import dims as dims_language
from mycel.ir.types import Type, is_float, promote

OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class SplitRule:
    """A rule for a split letter, or for several over the same axes: write(at, *local inputs, **params) -> local
    outputs, written with operators, collectives among them.

    `at` tells where the part lies (lower/spmd.py: At).
    `partial`: the kind in which outputs without the letter are partial over its axes, or one for each output.
    `uneven`: it copes with padding.
    `outer`: of letters split together, one that slower axes may split as well.
    """

    write: Callable[..., Any]
    partial: str | tuple[str, ...] = ""
    uneven: bool = False
    outer: str = ""


@dataclass(frozen=True)
class Collective:
    """What ranks say to each other for an operator of one tensor (of several: each rank's are a tuple); its params tell
    the axes and the `count` k of ranks along them.

    `sent`: bytes a rank puts on the wire for each byte it puts in.  `steps`: messages that wait for each other.
    `meaning`: what the rank at an index gets, from the tensors of all ranks along the axes, (xs, index, **params) -> y;
    simulated ranks do it.  `together`: several may go in one message, begun and waited for apart.  `grows`: it brings
    more than it is given.  `same`: afterwards all ranks have the same.  `counted`: how much is sent is data, as a rule
    the smaller of what it is given and what it brings.
    """

    sent: Callable[[int], float]
    steps: Callable[[int], int]
    meaning: Callable[..., Any]
    together: bool = False
    grows: bool = False
    same: bool = False
    counted: bool = False


@dataclass(frozen=True, eq=False)
class Op:
    """One operator: everything Mycel knows about it."""

    name: str
    kernel: Callable[..., Any]
    dims: str | Callable[..., Any] | None = None
    dtype: Any = "promote"
    types: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | None = None
    flops: Callable[[SimpleNamespace], float] | None = None
    share: Callable[..., float] | None = None
    again: float = 0.0
    expand: Callable[..., Any] | None = None
    pieces: Callable[..., Any] | None = None
    followed: int | None = None
    write: Callable[..., Any] | None = None
    effect: bool = False
    says: bool = False
    examples: Sequence[str] = ()
    fresh: bool = False
    into: Sequence[str] = ()
    inplace: Callable[..., None] | None = None
    c: str | Callable[..., str | None] | None = None
    call_c: Callable[..., str | None] | None = None
    aten: Sequence[str] = ()
    scratch: Callable[..., int] | None = None
    converts: Callable[..., int] | None = None
    turns: Callable[..., int] | None = None
    compiles: bool = True
    apart: bool = False
    free: bool = False
    pads: bool = False
    product: bool = False
    rate: str | Callable[..., str] = ""
    precision: str = ""
    kept: tuple[int, ...] = ()
    commutes: str = ""
    moves: bool = False
    looked_up: Callable[..., Sequence[int]] | None = None
    scalars: tuple[int, ...] = ()
    padding: str = ""
    averages: bool = False
    lies: bool = False
    stacks: bool = False
    waits: bool = False
    foreign: bool = False
    python: bool = False
    by_rank: bool = False
    for_ranks: bool = False
    opens: bool = False
    of_rows: Callable[..., Any] | None = None
    collective: Collective | None = None
    transfers: bool = False
    hosted: bool = False
    sent_as_sum: bool = False
    linear: Sequence[tuple[int, ...]] | str = ()
    parts: dict[str, SplitRule] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    _inferred: dict[Any, tuple[Type, ...]] = field(default_factory=dict)

    def __call__(self, *inputs: Any, **params: Any) -> Any:
        builder = BUILDERS[-1] if BUILDERS else None
        if builder is not None and not any(isinstance(x, torch.Tensor) for x in inputs):
            return builder.emit(self, inputs, params)
        return self.kernel(*inputs, **params)

    def __repr__(self) -> str:
        return self.name

    @property
    def on_elements(self) -> bool:
        """Does each element of the result come from the same element of the operands?"""
        return isinstance(self.dims, str) and set(self.dims) <= set("., ->")

    @property
    def grows(self) -> bool:
        """A collective that brings more than it is given."""
        return self.collective is not None and self.collective.grows

    def infer(self, inputs: Sequence[Any], params: dict[str, Any]) -> tuple[Type, ...]:
        """Types (and literals) of the inputs -> types of the outputs.  Remembered: layers repeat."""
        key = (
            tuple(x if isinstance(x, Type) else (type(x), x) for x in inputs),
            tuple(params.items()),
            torch.get_default_dtype(),
        )
        types = self._inferred.get(key)
        if types is None:
            types = self._inferred[key] = self._infer(inputs, params)
        return types

    def _infer(self, inputs: Sequence[Any], params: dict[str, Any]) -> tuple[Type, ...]:
        if self.types is not None:
            out = self.types(*inputs, **params)
            return out if isinstance(out, tuple) else (out,)
        shapes = self.fit(inputs, params).out_shapes
        dtypes = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,) * len(shapes)
        return tuple(Type(resolve_dtype(d, inputs), s) for d, s in zip(dtypes, shapes, strict=True))

    def fit(self, inputs: Sequence[Any], params: dict[str, Any]) -> dims_language.Fit:
        """The dims of this operator laid over actual input types: letters with sizes."""
        rule, sizes = self.dims, {}
        if callable(rule):
            rule = rule(*inputs, **params)
            if isinstance(rule, tuple):
                rule, sizes = rule
        assert isinstance(rule, str), f"{self.name} has no dims"
        shapes = [x.shape if isinstance(x, Type) else None if x is None else () for x in inputs]
        return dims_language.fit(rule, shapes, sizes)

    def rate_of(self, inputs: Sequence[Any], params: Mapping[str, Any]) -> str:
        """Under which name its operations a second are measured for such inputs."""
        return self.rate if isinstance(self.rate, str) else self.rate(*inputs, **params)

    def cost(self, inputs: Sequence[Any], params: dict[str, Any]) -> Cost:
        """Floating-point operations and bytes moved, from types alone; a view costs nothing."""
        if self.write is not None:
            return Cost(0, 0)
        outs = self.infer(inputs, params)
        moved = sum(t.bytes for t in (*inputs, *outs) if isinstance(t, Type))
        if self.flops is None:
            return Cost(sum(t.numel for t in outs), moved)
        share = 1.0 if self.share is None else self.share(*inputs, **params)
        return Cost(share * self.flops(self.fit(inputs, params).namespace()), moved)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one execution takes."""

    flops: float
    bytes: float


def op(
    dims: str | Callable[..., Any] | None = None, *, name: str | None = None, **facts: Any
) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated kernel an operator and enter it in the one table."""

    def enter(kernel: Callable[..., Any]) -> Op:
        operator = Op(name or kernel.__name__, kernel, dims, **{"defaults": _defaults(kernel), **facts})
        if operator.name in OPS:
            raise ValueError(f"operator {operator.name} is defined twice")
        OPS[operator.name] = operator
        return operator

    return enter


def resolve_dtype(rule: Any, inputs: Sequence[Any]) -> torch.dtype:
    """A dtype policy of a paragraph -> the dtype for these inputs."""
    if isinstance(rule, torch.dtype):
        return rule
    if rule == "first":
        return next(x.dtype for x in inputs if isinstance(x, Type))
    if rule == "promote":
        return promote(*inputs)
    if rule == "float":
        dtype = promote(*inputs)
        return dtype if is_float(dtype) else torch.get_default_dtype()
    return rule(*inputs)


def _defaults(kernel: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except ValueError:  # a C function without a signature has no keyword params of ours
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


# The stack of open builders; the innermost receives equations.  Owned by `build.Builder`.
BUILDERS: list[Any] = []
