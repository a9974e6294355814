"""An optimiser is one paragraph: the torch classes it stands for, the state it keeps, the options it reads, and its
rule for one parameter.

    @optimiser(
        classes={"Lion": {"maximize": False}},
        slots=[StateSlot("exp_avg")],
        hyper={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "weight_decay": "weight_decay"},
        flags={"maximize": "maximize"},
        examples=[...],
    )
    def lion(p, g, *, exp_avg, lr, beta1, beta2, weight_decay):
        "m' = b2 m + (1-b2) g;  p' = p (1 - lr decay) - lr sign(b1 m + (1-b1) g)"
        ...
        return new_p, {"exp_avg": new_exp_avg}

The rule is written with operators.  The paragraph makes an operator of it that updates all parameters of a group in one
equation:

    p1' p2' m1' m2' = lion(p1 p2 m1 m2, g1 g2, lr, beta1, beta2, weight_decay, scale, skip, count=2)

What is updated comes first, in the order of the results; gradients are divided by `scale` (None: taken as they are) and
turned around by `maximize`; where `skip` is 1 nothing changes.  Hyper-parameters are scalar operands, since schedules
change them from step to step; the kernels take numbers or tensors.  The operator writes its results over its operands
where the state of a step is donated.

What the fields mean
  classes    names in torch.optim, each with the options it implies where a group does not state them
  foreign    classes of these names from elsewhere are taken too, if their options are the ones known here
  slots      the state of a parameter
  hyper      scalar operands: name -> option of the group ("betas.0": its first element); None is the eps of the
             parameter's dtype
  flags      static params that are true or false: name -> option
  static     static params with the value of the option
  kinds      static params that depend on the parameter: a function of it; parameters of different kinds are updated
             apart
  first      the option under which the very first step, without state, differs: then the last of `hyper`, `first_step`,
             says so
  off        options that are known only switched off: name -> the value that does so
  pointwise  each element of a parameter is updated by itself, so that any dim may be split; otherwise the rule is
             lowered in smaller operators
  inplace    a kernel of its own over the memory of its operands; default: the rule, parameter by parameter
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.ir import Op, Type, op
from mycel.ops.rules import o

OPTIMISERS: dict[str, Optimiser] = {}
INDIFFERENT = ("foreach", "fused", "capturable", "differentiable")  # how torch computes, not what


def is_group_update(op: Op) -> bool:
    """Does it update a group of parameters, `count` of them?"""
    return op.name in OPTIMISERS


def optimiser_of(update: Op) -> Optimiser:
    """What is known of an optimiser, by the operator that updates a group."""
    return OPTIMISERS[update.name]


@dataclass(frozen=True)
class StateSlot:
    """One tensor of a parameter's state: of the parameter's shape; with one element along some of its dims (`ones`); or
    a scalar in fp32."""

    name: str
    ones: tuple[int, ...] = ()
    scalar: bool = False
    initial: float | str = 0.0  # or the option that says it
    when: str = ""  # there with this flag alone
    unless: str = ""  # there without this flag alone

    def shape(self, param: Sequence[int]) -> tuple[int, ...]:
        """Of the state of a parameter of this shape."""
        return () if self.scalar else tuple(1 if self._is_one(d, len(param)) else n for d, n in enumerate(param))

    def dtype(self, param: torch.dtype) -> torch.dtype:
        return torch.float32 if self.scalar else param

    def type(self, param: Type) -> Type:
        return Type(self.dtype(param.dtype), self.shape(param.shape))

    def value(self, options: Mapping[str, Any]) -> float:
        """What it is filled with at first."""
        return float(options[self.initial]) if isinstance(self.initial, str) else self.initial

    def _is_one(self, dim: int, ndim: int) -> bool:
        return dim in self.ones or dim - ndim in self.ones


@dataclass(frozen=True)
class Optimiser:
    """Everything Mycel knows about an optimiser; see the head of this file."""

    op: Op
    classes: Mapping[str, Mapping[str, Any]]
    slots: tuple[StateSlot, ...]
    hyper: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    static: Mapping[str, str] = field(default_factory=dict)
    kinds: Callable[[Any], Mapping[str, Any]] = lambda p: {}
    foreign: bool = False
    first: str = ""
    off: Mapping[str, Any] = field(default_factory=dict)
    pointwise: bool = True

    def options(self, kind: str, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A group of torch's, with what its class implies."""
        return {**self.classes[kind], **group} if self.classes[kind] else group

    def params(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The static params of a group, those that depend on the parameter apart."""
        return {
            **{k: bool(options[v]) for k, v in self.flags.items()},
            **{k: plain(options[v]) for k, v in self.static.items()},
        }

    def momentum(self, params: Mapping[str, Any]) -> str:
        """Which of `hyper` says how much of its last move a parameter makes again; "": none, with these static
        params."""
        is_off = "momentum" in self.flags and not params.get("momentum")
        return next((name for name in ("beta1", "momentum") if name in self.hyper and not is_off), "")

    def present(self, params: Mapping[str, Any]) -> list[StateSlot]:
        """The slots that there are with these static params."""
        names = present(table(self.slots), params)
        return [slot for slot in self.slots if slot.name in names]

    @property
    def known(self) -> set[str]:
        """The options that are understood."""
        more = [slot.initial for slot in self.slots if isinstance(slot.initial, str)]
        return {
            v.partition(".")[0]
            for v in (
                *self.hyper.values(),
                *self.flags.values(),
                *self.static.values(),
                *more,
                *INDIFFERENT,
                self.first,
            )
        }


def plain(value: Any) -> Any:
    """An option as a static param."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def optimiser(
    *,
    classes: Mapping[str, Mapping[str, Any]],
    slots: Sequence[StateSlot],
    hyper: Mapping[str, str],
    examples: Sequence[str],
    pointwise: bool = True,
    inplace: Callable[..., None] | None = None,
    **facts: Any,
) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated rule an optimiser, and its operator."""

    def enter(rule: Callable[..., Any]) -> Op:
        shown, names = table(slots), tuple(hyper)
        meaning = functools.partial(new_values, rule, shown, names)
        over = functools.partial(update_each, rule, shown, names) if inplace is None else inplace
        kernel = meaning if inplace is None else functools.partial(on_copies, inplace, shown)
        kernel.__doc__ = rule.__doc__

        def dims(*types: Any, count: int, **params: Any) -> str:
            return update_dims(
                types, count, [slot for slot in slots if slot.name in present(shown, params)], "" if pointwise else "^"
            )

        def new_types(*types: Any, count: int, **params: Any) -> tuple[Type, ...]:
            return tuple(types[: count * (1 + len(present(shown, params)))])

        entered = op(
            dims, name=rule.__name__, dtype="first", types=new_types, expand=meaning, inplace=over, apart=True,
            hosted=True, defaults=_defaults(rule, hyper), examples=examples,
        )(kernel)  # fmt: skip
        OPTIMISERS[entered.name] = Optimiser(entered, classes, tuple(slots), hyper, pointwise=pointwise, **facts)
        return entered

    return enter


def _defaults(rule: Callable[..., Any], hyper: Collection[str]) -> dict[str, Any]:
    """Of static params: those of the rule; it is not told of `maximize`, nor of a flag that has the name of a
    hyper-parameter."""
    flags = {k: p.default for k, p in inspect.signature(rule).parameters.items() if isinstance(p.default, bool)}
    return {**dict.fromkeys(("maximize", *hyper), False), **flags}


def update_dims(types: Sequence[Any], count: int, slots: Sequence[StateSlot], flag: str) -> str:
    """Each parameter lies as its state and its gradient do."""
    own = [[f"p{i}d{d}{flag}" for d in range(types[i].ndim)] for i in range(count)]
    states = [_slot_dims(slot, letters) for slot in slots for letters in own]
    params = [" ".join(letters) for letters in own]
    scalars = [""] * (len(types) - (len(slots) + 2) * count)
    return f"{', '.join([*params, *states, *params, *scalars])} -> {', '.join([*params, *states])}"


def _slot_dims(slot: StateSlot, letters: Sequence[str]) -> str:
    return "" if slot.scalar else " ".join("1" if slot._is_one(d, len(letters)) else k for d, k in enumerate(letters))


# -- kernels: copied into generated code, with the rule


def table(slots):
    """Slots as plain data: name, when, unless."""
    return tuple((slot.name, slot.when, slot.unless) for slot in slots)


def present(slots, params):
    """The names of the slots there are, with these static params."""
    return [
        name for name, when, unless in slots if (not when or params.get(when)) and not (unless and params.get(unless))
    ]


def wide(x):
    """A hyper-parameter as a scalar tensor."""
    return torch.tensor(x, dtype=torch.float64) if isinstance(x, (int, float)) else x


def exact(x):
    """x in 32 bits, if it has 16."""
    return o.cast(x, dtype=torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


def one_update(rule, names, hyper, old, g, scalars, params):
    """New values of a parameter and its state, in the order of `old`; those of 16 bits are computed in 32 and rounded
    once."""
    p, *state = [exact(x) for x in old]
    g, scale, skip = exact(g), scalars[-2], scalars[-1]
    g = g if scale is None else o.div(g, o.cast(scale, dtype=p.dtype))
    g = o.neg(g) if params.get("maximize") else g
    given = {k: wide(x) for k, x in zip(hyper, scalars, strict=False)}
    fixed = {k: v for k, v in params.items() if k != "maximize" and k not in given}
    new_p, new = rule(p, g, **dict(zip(names, state, strict=True)), **given, **fixed)
    stay = o.eq(skip, 1.0)
    after = [new_p, *(new[name] for name in names)]
    return [
        o.where(stay, was, x if x.dtype == was.dtype else o.cast(x, dtype=was.dtype))
        for was, x in zip(old, after, strict=True)
    ]


def new_values(rule, slots, hyper, *xs, count, **params):
    """The results of an update by its rule, parameter by parameter."""
    names = present(slots, params)
    k = 1 + len(names)
    rows = [
        one_update(rule, names, hyper, xs[i : k * count : count], xs[k * count + i], xs[(k + 1) * count :], params)
        for i in range(count)
    ]
    results = tuple(row[j] for j in range(k) for row in rows)
    return results if len(results) > 1 else results[0]


def update_each(rule, slots, hyper, *xs, count, **params):
    """An update by its rule over the memory of its operands: one parameter's new values are there at a time."""
    names = present(slots, params)
    k = 1 + len(names)
    for i in range(count):
        old = xs[i : k * count : count]
        new = one_update(rule, names, hyper, old, xs[k * count + i], xs[(k + 1) * count :], params)
        for was, x in zip(old, new, strict=True):
            was.copy_(x)


def on_copies(inplace, slots, *xs, count, **params):
    """The results of a kernel that writes over its operands, these left alone."""
    done = (1 + len(present(slots, params))) * count
    new = [*(x.clone() for x in xs[:done]), *(g.clone() for g in xs[done : done + count])]
    inplace(*new, *xs[done + count :], count=count, **params)
    return tuple(new[:done]) if done > 1 else new[0]


# -- what rules are written with


def times(x, scalar):
    """x times a scalar, in x's dtype."""
    return o.mul(x, o.cast(scalar, dtype=x.dtype))


def plus(x, scalar):
    """x plus a scalar, in x's dtype."""
    return o.add(x, o.cast(scalar, dtype=x.dtype))


def blend(old, new, share):
    """old + share (new - old)"""
    return o.add(old, times(o.sub(new, old), share))


def decayed(p, lr, weight_decay):
    """p (1 - lr decay): decay apart from the gradient"""
    return times(p, o.sub(1.0, o.mul(lr, weight_decay)))


def laid_like(params, grads):
    """Gradients that lie as their parameters do, each in memory of its own: a kernel that scales them writes them
    back."""
    seen = set()
    matched = []
    for p, g in zip(params, grads, strict=True):
        if g.stride() != p.stride() or place(g) in seen:
            g = torch.empty_like(p).copy_(g)
        seen.add(place(g))
        matched.append(g)
    return matched


def place(x):
    """Where the memory of x begins, also without data."""
    return x.untyped_storage()._cdata, x.storage_offset()


def rate(lr):
    """The learning rate for torch's fused kernels: a number, or 32 bits on the device, where a recorded step reads
    it."""
    return lr.to(torch.float32) if isinstance(lr, torch.Tensor) and lr.is_cuda else float(lr)


def columns(xs, count, slots):
    """The operands of an update: lists of `count` each (the parameter, then its state), the gradients, the scalars."""
    lists = [list(xs[i * count : (i + 1) * count]) for i in range(slots + 1)]
    return lists[:slots], lists[slots], xs[(slots + 1) * count :]
