"""Which products of linear layers are computed in 8 bits, and why others are not.

A linear layer is a product (`linear`, `matmul`) with a matrix that is made of parameters alone.  It stays in 16 bits

    first            where nothing learnt was before it: it reads the batch
    last             where no other layer follows on the way to the loss: a head
    router           where integers are made of its result: it chooses
    sizes            where a size is no multiple of 16
    too small        where 8 bits would take as long: operands have to be converted first, of products that read the
                     same one once.  The product and its two gradients, as the device's figures have them; where it
                     has none for 8 bits (a CPU, which emulates them) this is not asked
    other product    where there is no such kernel: convolutions, experts, recurrent layers
    branch or loop   where a block is run that is no plain call

A block that is called several times has one answer: it is first or last where it is so at all of its calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mycel.errors import TrainError
from mycel.ir import CONTROL, Atom, Builder, Eqn, Op, Program, Var, call, is_float
from mycel.ops import o
from mycel.ops.fp8 import FP8_MULTIPLE
from mycel.plan.cost import Costs
from mycel.plan.hardware import Hardware

IN_EIGHT_BITS: dict[Op, Op] = {o.linear: o.fp8_linear, o.matmul: o.fp8_matmul}
EqnPlace = tuple[str, int]  # a block, and which of its equations
CAPABILITY = (8, 9)  # the least compute capability of GPUs that multiply 8 bits
SHOWN = 3  # weights that a reason is given for by name


@dataclass(frozen=True)
class Fp8Products:
    """`narrow`: equations to compute in 8 bits.  `layers`, `flops`: how many calls of layers these are of how many, and
    of how many operations.  `wide`: weights of the others, by reason."""

    narrow: Mapping[EqnPlace, Op] = field(default_factory=dict)
    layers: tuple[int, int] = (0, 0)
    flops: tuple[float, float] = (0.0, 0.0)
    wide: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        count, of = self.layers
        share = f", {self.flops[0] / self.flops[1]:.0%} of their operations" if self.flops[1] else ""
        lines = [f"fp8              {count} of {of} products with weights{share}"]
        for i, (reason, names) in enumerate(self.wide.items()):
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{'in 16 bits' if i == 0 else '':<16} {reason}: {', '.join(names[:SHOWN])}{more}")
        return "\n".join(lines)


def fp8_products(program: Program, hardware: Hardware, compiled: bool) -> Fp8Products:
    """The answer for a program with its loss, before it is differentiated."""
    flow = _LayerFlow(program)
    costs = Costs(program, hardware, compiled)
    visits: dict[EqnPlace, list[_LayerCall]] = defaultdict(list)
    for visit in flow.visits:
        if visit.weight is not None:
            visits[visit.place].append(visit)
    reasons = {place: flow.by_default(of_place) or _by_size(of_place[0].eqn) for place, of_place in visits.items()}
    if hardware.quarter is not None:
        likely = {place: visits[place][0].eqn for place, reason in reasons.items() if not reason}
        reasons |= dict.fromkeys(_too_small(likely, costs), "too small to pay")
    narrow: dict[EqnPlace, Op] = {}
    wide: dict[str, list[str]] = {}
    layers, flops = [0, 0], [0.0, 0.0]
    for place, of_place in visits.items():
        eqn, reason = of_place[0].eqn, reasons[place]
        work = len(of_place) * eqn.op.cost(eqn.input_types, dict(eqn.params)).flops
        layers[1] += len(of_place)
        flops[1] += work
        if reason:
            wide.setdefault(reason, []).extend(visit.name for visit in of_place)
        else:
            narrow[place] = IN_EIGHT_BITS[eqn.op]
            layers[0] += len(of_place)
            flops[0] += work
    if flow.elsewhere:
        wide["in a branch or loop"] = [f"{flow.elsewhere} product(s)"]
    return Fp8Products(narrow, (layers[0], layers[1]), (flops[0], flops[1]), wide)


def refuse_without_fp8(device: torch.device) -> None:
    """TrainError where products in 8 bits are neither computed nor emulated."""
    if device.type in ("cpu", "meta"):
        return
    name, where = f"a device of type {device.type}", str(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= CAPABILITY:
            return
        name = torch.cuda.get_device_name(device)
        where += f", compute capability {capability[0]}.{capability[1]}; {CAPABILITY[0]}.{CAPABILITY[1]} has them"
    raise TrainError(
        f'precision="fp8": {name} has no products in 8 bits\n  at        {where}\n'
        '  try       precision="bf16", or a GPU such as H100 or L40S'
    )


def _by_size(eqn: Eqn) -> str:
    """Why sizes or the operator keep it in 16 bits."""
    if eqn.op not in IN_EIGHT_BITS:
        return f"there is no {eqn.op} in 8 bits"
    x, w = eqn.vars
    rows = x.type.numel // max(x.shape[-1], 1)
    sizes = (rows, *w.shape)
    odd = [str(size) for size in sizes if size % FP8_MULTIPLE or not size]
    return f"a size is no multiple of {FP8_MULTIPLE}" if odd or x.ndim < 2 else ""


def _too_small(likely: Mapping[EqnPlace, Eqn], costs: Costs) -> Iterator[EqnPlace]:
    """Those that 8 bits do not make faster.  Of products that read the same operand one after another goes that costs
    more than it saves."""
    readers: dict[tuple[str, Atom], list[EqnPlace]] = defaultdict(list)
    for place, eqn in likely.items():
        readers[place[0], eqn.inputs[0]].append(place)
    known: dict[object, float] = {}

    def seconds(price: Callable[[Sequence[Eqn], Costs], float], eqns: Sequence[Eqn]) -> float:
        key = price, tuple((eqn.op, eqn.input_types) for eqn in eqns)
        if key not in known:
            known[key] = price(eqns, costs)
        return known[key]

    def loss(place: EqnPlace, chosen: Sequence[EqnPlace]) -> float:
        """Seconds more than in 16 bits, beside the others that are chosen."""
        own, all_of_them = likely[place], [likely[each] for each in chosen]
        rest = [likely[each] for each in chosen if each != place]
        return seconds(_narrow_seconds, all_of_them) - seconds(_narrow_seconds, rest) - seconds(_wide_seconds, [own])

    for chosen in readers.values():
        while chosen:
            worst = max(chosen, key=lambda place: loss(place, chosen))
            if loss(worst, chosen) <= 0:
                break
            chosen.remove(worst)
            yield worst


def _gradients(eqns: Sequence[Eqn], ops: Mapping[Op, Op]) -> Builder:
    """Products of one operand with their gradients, by other operators where `ops` has them."""
    b = Builder()
    x = b.input("x", eqns[0].input_types[0]) if eqns else None
    for eqn in eqns:
        op = ops.get(eqn.op, eqn.op)
        assert op.vjp is not None
        w, g = b.input("w", eqn.input_types[1]), b.input("g", eqn.outputs[0].type)
        with b:
            op.vjp(g, op(x, w), x, w)
    return b


def _wide_seconds(eqns: Sequence[Eqn], costs: Costs) -> float:
    return sum(costs.kernel(each) for each in _gradients(eqns, {}).eqns if each.op.write is None)


def _narrow_seconds(eqns: Sequence[Eqn], costs: Costs) -> float:
    """In 8 bits, each operand converted once; by rows that is merged with what is before it, where a compiler is."""
    b = Builder()
    with b:
        for eqn in _gradients(eqns, IN_EIGHT_BITS).eqns:
            assert eqn.op.expand is not None
            eqn.op.expand(*eqn.inputs, **eqn.params)
    once = {(each.op, each.inputs, each.params): each for each in b.eqns if each.op.write is None}
    return sum(costs.seconds(each, each.outputs) for each in once.values())


@dataclass(frozen=True)
class _LayerCall:
    """An equation at one of the calls of its block: its operands and results as numbers of values; of a product with a
    weight, what it is a product of: `weight`, and the name of that."""

    place: EqnPlace
    eqn: Eqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weight: Var | None = None
    name: str = ""


class _LayerFlow:
    """A program as the equations it runs, one after the other, calls of blocks opened; and what of its values is
    learnt, read, or leads to other layers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.visits: list[_LayerCall] = []
        self.elsewhere = 0  # products in blocks that are not simply called
        self._learnt: list[bool] = []  # of each value: is it made of parameters?
        self._read: list[bool] = []  # … of the batch, or drawn?
        self._names: list[str] = []  # the parameter it is, cast or seen otherwise
        numbers = dict[Atom, int]()
        for v in program.inputs:
            role = program.role(v)
            is_learnt = role.kind == "parameter"
            numbers[v] = self._new(is_learnt, role.kind in ("batch", "key"), role.name if is_learnt else "")
        self._walk(program.entry, numbers)
        count = len(self._learnt)
        self._followed, self._chosen_of = [False] * count, [False] * count
        for visit in reversed(self.visits):
            is_product = visit.eqn.op.product
            leads = visit.weight is not None or any(self._followed[n] for n in visit.outputs)
            chooses = not is_product and (
                any(self._chosen_of[n] for n in visit.outputs)
                or any(not is_float(v.dtype) and v.dtype.itemsize > 1 for v in visit.eqn.outputs)
            )
            for n in visit.inputs:
                self._followed[n] |= leads
                self._chosen_of[n] |= chooses

    def by_default(self, visits: Sequence[_LayerCall]) -> str:
        """Why it stays in 16 bits whatever its size."""
        if all(not self._learnt[n] for visit in visits for n in visit.inputs[:1]):
            return "first"
        if not any(self._followed[n] for visit in visits for n in visit.outputs):
            return "last"
        return "router" if any(self._chosen_of[n] for visit in visits for n in visit.outputs) else ""

    def _new(self, learnt: bool, read: bool, name: str) -> int:
        self._learnt.append(learnt)
        self._read.append(read)
        self._names.append(name)
        return len(self._learnt) - 1

    def _walk(self, block: str, numbers: dict[Atom, int]) -> None:
        for i, eqn in enumerate(self.program.blocks[block].eqns):
            operands = list(eqn.vars)
            given = [numbers[v] for v in operands]
            if eqn.op is call:
                inner = self.program.blocks[eqn.params["block"]]
                inside: dict[Atom, int] = {
                    v: numbers[x] for v, x in zip(inner.inputs, eqn.inputs, strict=True) if x in numbers
                }
                inside |= {v: self._new(False, False, "") for v in inner.inputs if v not in inside}
                self._walk(eqn.params["block"], inside)
                pairs = zip(eqn.outputs, inner.outputs, strict=True)
                numbers |= {v: inside[x] if x in inside else self._new(False, False, "") for v, x in pairs}
                continue
            if eqn.op in CONTROL:
                self.elsewhere += sum(1 for e in self._inside(eqn) if e.op in IN_EIGHT_BITS)
            learnt, read = any(self._learnt[n] for n in given), any(self._read[n] for n in given)
            name = self._names[given[0]] if len(given) == 1 else ""
            outputs = tuple(self._new(learnt, read, name) for _ in eqn.outputs)
            numbers |= dict(zip(eqn.outputs, outputs, strict=True))
            at = self._weight(eqn.op, operands, given) if eqn.op.product else None
            weight, of = (None, "") if at is None else (operands[at], self._names[given[at]] or operands[at].name)
            self.visits.append(_LayerCall((block, i), eqn, tuple(given), outputs, weight, of))

    def _weight(self, op: Op, operands: Sequence[Var], given: Sequence[int]) -> int | None:
        """Which operand of a product is made of parameters alone, and has two dims or more: of a linear layer the
        second, of other products one that is a parameter (a bias of attention is none)."""
        learnt = [i for i, n in enumerate(given) if self._learnt[n] and not self._read[n] and operands[i].ndim > 1]
        if op in IN_EIGHT_BITS:
            return 1 if 1 in learnt and operands[1].ndim == 2 and 0 not in learnt else None
        return next((i for i in learnt if self._names[given[i]]), None)

    def _inside(self, eqn: Eqn) -> Iterator[Eqn]:
        for ref in eqn.refs:
            for e in self.program.blocks[ref].eqns:
                yield e
                yield from self._inside(e)
