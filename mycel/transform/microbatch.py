"""A batch in parts: the same loss and gradients, with the activations of one part at a time.

shares        loss(part) becomes the part's share in the loss of the whole batch, so that shares sum up (and likewise
              whatever else a part returns that is no row of the batch):
                  a / b     =>  a / count     where b (how many tokens count, say) is of the part and depends on no
                                              parameter; `count` is its sum
                  sum(x)    =>  sum(x)        over something that has the part's rows: parts sum up by themselves
                  x         =>  x / parts     otherwise: every part weighs the same
              A mean cross entropy is a sum over a count.  Sums of such terms, multiples and casts of them are taken
              term by term.  Beside the program of a part stands that of the whole batch: what is larger there has the
              part's rows, and a number that is another one there (sum / len(x)) is taken from there.  A loss that goes
              beyond that (a root of a mean, say) is no sum over the batch: its parts weigh the same, and the caller is
              told.
microbatch    a program of one part => a scan over the parts that sums up loss and gradients, puts rows of the batch one
              behind the other, hands buffers from part to part and gives each part random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import (
    OPS,
    Atom,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Role,
    Type,
    Var,
    is_float,
    leading_to,
    prune,
    scan,
)
from mycel.ops import o
from mycel.ops.loss import chosen
from mycel.ops.stack import zeros
from mycel.transform.dce import dce
from mycel.transform.vjp import Vjp, active_vars

BODY = "part"
LIMITS = (o.cast, o.clamp, o.maximum, o.minimum, o.add, o.sub)  # done to a count before something is divided by it
NEXT = 1 << 40  # the key of the next part is the child of this one's that no draw or call is


@dataclass(frozen=True)
class Term:
    """A summand of the loss: `value`, divided by `count` or by nothing (`sums`: parts sum up) or by the number of
    parts; then `outer`, equations that are linear in it, from the inside out.  `limits`: what is done to the count once
    it is summed."""

    value: Atom
    count: Var | None = None
    sums: bool = False
    outer: tuple[Eqn, ...] = ()
    limits: tuple[Eqn, ...] = ()


def shares(
    program: Program, whole: Program, active: Collection[str], split: Collection[str], parts: int
) -> tuple[Program, Program, list[str]]:
    """The program whose first result is the part's share, as are others that are floats and no rows of the batch, with
    an input for each count; the program of the counts alone; and the lines of what is no sum over the batch.

    `whole`: the program of the whole batch.  By name: `active`, inputs that are differentiated; `split`, inputs that
    are parts of something."""
    large = _means_apart(whole.main)
    program = replace(
        program,
        blocks={
            **program.blocks,
            program.entry: _with_numbers_of(_means_apart(program.main), large, len(program.results)),
        },
    )
    main = program.main
    loss = _Loss(program, large, active, split)
    rows = results_in_rows(program, whole)
    summed = {
        i: loss.terms(x)
        for i, x in enumerate(program.results)
        if i not in rows and (i == 0 or (isinstance(x, Var) and is_float(x.dtype)))
    }
    counts = list(dict.fromkeys(t.count for terms in summed.values() for t in terms if t.count is not None))
    b = Builder.after(main)
    given = {c: b.input(f"count_{i}" if i else "count", c.type) for i, c in enumerate(counts)}
    roles = {**program.roles, **{v.name: Role("count", str(i)) for i, v in enumerate(given.values())}}
    outputs = list(main.outputs)
    with b:
        for i, terms in summed.items():
            total: Atom = None
            for t in terms:
                share = _share(t, given, parts)
                total = share if total is None else o.add(total, share)
            outputs[i] = total
    block = Block(tuple(b.inputs), tuple(b.eqns), tuple(outputs))
    counting = Block(main.inputs, main.eqns, tuple(counts))
    return (
        replace(program, blocks={**program.blocks, program.entry: block}, roles=roles),
        dce(replace(program, blocks={**program.blocks, program.entry: counting}, updates=()), effects=False),
        loss.unseen,
    )


@dataclass(frozen=True)
class Weighing:
    """What the terms of a loss are means over: a number of elements, or (an int) a result of `counting`; none at all
    for a loss that is a sum.  `unseen`: lines of what is neither."""

    counting: Program
    terms: tuple[int | float, ...]
    unseen: tuple[str, ...]


def weighing(program: Program, whole: Program, active: Collection[str], split: Collection[str], rows: int) -> Weighing:
    """A loss, beside that of a batch twice as large => what it weighs against losses of other batches."""
    large = _means_apart(whole.main)
    program = replace(program, blocks={**program.blocks, program.entry: _means_apart(program.main)})
    main = program.main
    loss = _Loss(program, large, active, split)
    terms = loss.terms(program.results[0])
    counts = list(dict.fromkeys(t.count for t in terms if t.count is not None))
    counting = Block(main.inputs, main.eqns, tuple(counts))
    weights = [w for w in (loss.weight(t, counts, rows) for t in terms) if w is not None]
    return Weighing(
        dce(replace(program, blocks={**program.blocks, program.entry: counting}, updates=()), effects=False),
        tuple(weights),
        tuple(loss.unseen),
    )


def results_in_rows(part: Program, whole: Program) -> list[int]:
    """Which results of a part are rows of the batch, and put one behind the other: those that are longer for the whole
    of it."""
    both = enumerate(zip(part.results, whole.results, strict=True))
    return [i for i, (x, y) in both if isinstance(x, Var) and isinstance(y, Var) and x.shape != y.shape]


def with_numbers_of(part: Program, whole: Program) -> Program:
    """A part's program as it was captured, with the numbers of the whole batch's on the way to its results: simplified,
    a division by the one row of a part would be gone."""
    return replace(part, blocks={**part.blocks, part.entry: _with_numbers_of(part.main, whole.main, len(part.results))})


def _are_alike(a: Block, b: Block) -> bool:
    return [(e.op, len(e.inputs)) for e in a.eqns] == [(e.op, len(e.inputs)) for e in b.eqns]


def _with_numbers_of(part: Block, whole: Block, results: int) -> Block:
    """Numbers on the way to the results that are others for the whole batch (len(x), say) are those of the whole batch;
    those of integers are places in a part, and stay."""
    if not _are_alike(part, whole):
        return part
    way = {*leading_to(part.eqns, part.outputs[:results])}
    pairs = [(e, zip(e.inputs, w.inputs, strict=True)) for e, w in zip(part.eqns, whole.eqns, strict=True)]
    eqns = [
        replace(e, inputs=tuple(x if isinstance(x, Var) or isinstance(y, Var) else y for x, y in both))
        if i in way and is_float(e.outputs[0].dtype)
        else e
        for i, (e, both) in enumerate(pairs)
    ]
    return Block(part.inputs, tuple(eqns), part.outputs)


def _share(t: Term, given: dict[Var, Var], parts: int) -> Any:
    """What one part contributes to a term."""
    value: Any = t.value
    if t.count is not None:
        count: Any = given[t.count]
        for eqn in t.limits:
            count = eqn.op(count, *eqn.inputs[1:], **eqn.params)
        value = o.div(value, count)
    elif not t.sums:
        is_number = not isinstance(value, Var)
        value = o.full(value / parts, shape=(), dtype=torch.float32) if is_number else o.div(value, parts)
    for eqn in t.outer:
        value = eqn.op(*(value if x is eqn.inputs[_linear_in(eqn)] else x for x in eqn.inputs), **eqn.params)
    return value


def _linear_in(eqn: Eqn) -> int:
    """The operand an outer equation is linear in: the one that is no plain factor."""
    return 1 if eqn.op is o.mul and not isinstance(eqn.inputs[0], Var) else 0


class _Loss:
    """A loss taken apart: which of its values depend on parameters (`moving`), and which on the part (`varying`);
    `large`: an equation as it is for the whole batch.  `unseen`: lines of what could not be taken apart."""

    def __init__(self, program: Program, whole: Block, active: Collection[str], split: Collection[str]) -> None:
        main = program.main
        self.large = (
            {e.outputs: w for e, w in zip(main.eqns, whole.eqns, strict=True)} if _are_alike(main, whole) else {}
        )
        self.unseen: list[str] = []
        self.producers = {v: e for e in main.eqns for v in e.outputs}
        self.moving = active_vars(Vjp(program), main, [v.name in active for v in main.inputs])
        self.varying = {v for v in main.inputs if v.name in split}
        for eqn in main.eqns:
            if any(v in self.varying for v in eqn.vars):
                self.varying.update(eqn.outputs)

    def terms(self, x: Atom, outer: tuple[Eqn, ...] = ()) -> list[Term]:
        eqn = self.producers.get(x) if isinstance(x, Var) else None
        if eqn is None or x not in self.varying:
            return [Term(x, outer=outer)]
        name, (a, b) = eqn.op.name, (*eqn.inputs, None, None)[:2]
        if name in ("add", "sub") and eqn.outputs[0].shape == ():
            minus = replace(eqn, op=OPS["neg"], inputs=(b,))
            return self.terms(a, outer) + self.terms(b, outer if name == "add" else (minus, *outer))
        if name in ("neg", "cast") or (name in ("reshape", "permute", "sum", "mean") and not self.is_over_rows(eqn)):
            is_sum = is_float(a.dtype)  # type: ignore[union-attr]
            return self.terms(a, (eqn, *outer)) if is_sum else [Term(x, outer=outer)]
        if name in ("mul", "div") and isinstance(a, Var) and self.is_factor(b):
            return self.terms(a, (eqn, *outer))
        if name == "mul" and isinstance(b, Var) and self.is_factor(a):
            return self.terms(b, (replace(eqn, inputs=(b, a)), *outer))
        if name == "div" and isinstance(b, Var) and b not in self.moving and b.shape == ():
            count, limits = self.limited(b)
            if not self.is_sum(a) or not self.is_sum(count):
                self.unseen.append(f"{name}  {eqn.source}".strip())
            return [Term(a, count, outer=outer, limits=limits)]
        sums = self.sums_up(eqn)
        if not sums and x in self.varying and not (eqn.op.averages and self.is_over_rows(eqn)):
            self.unseen.append(f"{name}  {eqn.source}".strip())
        return [Term(x, sums=sums, outer=outer)]

    def is_sum(self, x: Atom) -> bool:
        """Is it made of sums over the rows of a part, and of nothing else?"""
        noted, self.unseen = self.unseen, []
        terms = self.terms(x)
        is_sum = not self.unseen and all(t.sums for t in terms)
        self.unseen = noted
        return is_sum

    def is_over_rows(self, eqn: Eqn) -> bool:
        """Has its operand more elements for the whole batch, or, where that is not known, any dim?"""
        large = self.large.get(eqn.outputs)
        if large is None:
            return eqn.input_types[0].shape != ()
        return large.input_types[0].numel > eqn.input_types[0].numel

    def is_factor(self, x: Atom) -> bool:
        """A number, or a scalar that is the same for all parts."""
        if isinstance(x, Var):
            return x.shape == () and x not in self.varying
        return isinstance(x, (int, float))

    def limited(self, count: Var) -> tuple[Var, tuple[Eqn, ...]]:
        """clamp(n, 1) or n + 1e-6 is done to the sum of n, not to each of its parts."""
        eqn = self.producers.get(count)
        if eqn is None or eqn.op not in LIMITS or [*eqn.vars] != [eqn.inputs[0]]:
            return count, ()
        inner, limits = self.limited(next(eqn.vars))
        return inner, (*limits, eqn)

    def weight(self, term: Term, counts: Sequence[Var], rows: int) -> int | float | None:
        """What a term is a mean over: the place of its count, or a number; None for a sum, and for what is the same
        whatever the batch."""
        if term.count is not None:
            return counts.index(term.count)
        if term.sums:
            return self.divided_by(term)
        eqn = self.producers.get(term.value) if isinstance(term.value, Var) else None
        if eqn is None or term.value not in self.varying:
            return None
        return eqn.input_types[0].numel / max(eqn.outputs[0].type.numel, 1) if eqn.op.averages else float(rows)

    def divided_by(self, term: Term) -> float | None:
        """The number of rows or elements that a sum is divided by: one that is another for a larger batch."""
        for eqn in term.outer:
            large = self.large.get(eqn.outputs)
            numbers = [[x for x in e.inputs if isinstance(x, (int, float))] for e in (eqn, large) if e is not None]
            if len(numbers) == 2 and len(numbers[0]) == 1 and numbers[0] != numbers[1]:
                return float(numbers[0][0]) if eqn.op is o.div else 1 / float(numbers[0][0])
        return None

    def sums_up(self, eqn: Eqn) -> bool:
        """Is it a sum over the rows of the part?"""
        if eqn.op.averages and "reduction" in eqn.op.defaults:
            return eqn.params.get("reduction", "mean") == "sum" and self.is_over_rows(eqn)
        return eqn.op is o.sum and eqn.outputs[0] in self.varying and self.is_over_rows(eqn)


def _means_apart(block: Block) -> Block:
    """Mean cross entropies over targets that may be ignored, as a sum over a count."""
    b = Builder(names_of=block)
    b.inputs = list(block.inputs)
    for eqn in block.eqns:
        x, target, weight = eqn.inputs if eqn.op in (o.cross_entropy, o.nll_loss) else (None, None, None)
        if (
            not isinstance(x, Var)
            or not isinstance(target, Var)
            or eqn.params.get("reduction", "mean") != "mean"
            or target.dtype.is_floating_point
        ):
            b.eqns.append(eqn)
            continue
        b.at(eqn)
        with b:
            summed = eqn.op(*eqn.inputs, **{**eqn.params, "reduction": "sum"})
            rows = chosen(x, target, weight, eqn.params.get("ignore_index", -100))[1]
            count = o.sum(rows, dims=tuple(range(rows.ndim)))
        total = summed[0] if isinstance(summed, tuple) else summed
        old = b.eqns[next(i for i, e in enumerate(b.eqns) if total in e.outputs)]
        b.eqns[b.eqns.index(old)] = replace(old, outputs=(total, *eqn.outputs[1:]))
        b.eqns.append(Eqn(OPS["div"], (total, count), Params(), eqn.outputs[:1], eqn.source, eqn.phase))
    return Block(block.inputs, tuple(b.eqns), block.outputs)


def microbatch(
    program: Program, counting: Program, parts: int, split: Collection[str], rows_at: Collection[int] = ()
) -> Program:
    """A program of one part, whose results are summed (those at `rows_at` are put one behind the other) => the program
    of the whole batch, whose inputs `split` (by name) are cut along their first dim.  Its inputs of the role `count`
    are gone: they are what the results of `counting` sum up to."""
    main = program.main
    whole = Builder()
    totals = [program.by_role()[Role("count", str(i))] for i in range(len(counting.results))]
    given = [v for v in main.inputs if v not in totals]
    rows = {v: Type(v.dtype, (parts * v.shape[0], *v.shape[1:])) for v in given if v.name in split}
    outer = {v: whole.input(v.name, rows.get(v, v.type)) for v in given}
    blocks = {**counting.blocks, **program.blocks}
    with whole:
        pieces = {v: o.reshape(outer[v], shape=(parts, *v.shape)) for v in rows}
        counts: list[Var] = []
        if totals:
            counts = _summed(whole, blocks, "count_part", counting.main, counting.results, pieces, outer, {})
        outer.update(zip(totals, counts, strict=True))
        state = {
            v: main.outputs[len(program.results) + program.updates.index(v.name)]
            for v in given
            if v.name in program.updates
        }
        again = next(iter(program.inputs_of("key")), None)
        summed = {i: x for i, x in enumerate(program.results) if i not in rows_at and isinstance(x, Var)}
        stacked = [program.results[i] for i in rows_at]
        outs = _summed(whole, blocks, BODY, main, [*summed.values()], pieces, outer, state, again, stacked)
        results = list(program.results)
        for (i, r), x in zip(summed.items(), outs, strict=False):
            results[i] = x if x.dtype == r.dtype else o.cast(x, dtype=r.dtype)
        for i, x in zip(rows_at, outs[len(outs) - len(rows_at) :], strict=True):
            results[i] = o.reshape(x, shape=(parts * x.shape[1], *x.shape[2:]))
    by_name = dict(zip((v.name for v in state), outs[len(summed) :], strict=False))
    blocks[program.entry] = whole.block((*results, *(by_name[name] for name in program.updates)))
    roles = {v.name: program.roles[v.name] for v in given if v.name in program.roles}
    return prune(replace(program, blocks=blocks, consts={**counting.consts, **program.consts}, roles=roles))


def no_counts(program: Program) -> Program:
    """What `microbatch` counts of a program whose loss is no share of a larger one: nothing."""
    empty = Block(program.main.inputs, (), ())
    return prune(replace(program, blocks={**program.blocks, program.entry: empty}, updates=()))


def _summed(
    whole: Builder,
    blocks: dict[str, Block],
    name: str,
    part: Block,
    results: Sequence[Atom],
    pieces: dict[Var, Var],
    outer: dict[Var, Var],
    state: dict[Var, Atom],
    key: Var | None = None,
    stacked: Sequence[Atom] = (),
) -> list[Var]:
    """A scan of a block over pieces of its inputs: the sums of its results, then the last values of its state, then
    what is `stacked`."""
    held = [v for v in part.inputs if v not in pieces and v not in state and v != key]
    b = Builder(names_of=part)
    totals = [Var(b.name(f"sum_{x.name}"), _wide(x.type)) for x in results if isinstance(x, Var)]
    last = {x: i for i, e in enumerate(part.eqns) for x in e.outputs}
    adds: dict[int, list[int]] = {}
    for i, x in enumerate(results):
        adds.setdefault(last.get(x, len(part.eqns) - 1), []).append(i)  # type: ignore[arg-type]
    sums: dict[int, Var] = {}
    with b:
        for i, eqn in enumerate(part.eqns):
            b.eqns.append(eqn)
            for k in adds.get(i, ()):  # right after what is added was made, which is then freed
                x = results[k]
                b.at(eqn)
                is_wide = x.dtype == totals[k].dtype  # type: ignore[union-attr]
                sums[k] = o.add(totals[k], x if is_wide else o.cast(x, dtype=totals[k].dtype))
        folded = [] if key is None else [o.fold_in(key, data=NEXT)]
    carry = [*totals, *state, *([] if key is None else [key])]
    blocks[name] = Block(
        (*held, *carry, *pieces),
        tuple(b.eqns),
        (*(sums[i] for i in range(len(results))), *state.values(), *folded, *stacked),
    )
    first = [zeros(t.type) for t in totals] + [outer[v] for v in (*state, *([] if key is None else [key]))]
    inputs = (*(outer[v] for v in held), *first, *pieces.values())
    parts = next(iter(pieces.values())).shape[0]
    params = {"body": Ref(name), "length": parts, "consts": len(held), "carry": len(carry)}
    rows = [Type(x.dtype, (parts, *x.shape)) for x in stacked if isinstance(x, Var)]
    outs = whole.append(scan, inputs, params, [*(v.type for v in carry), *rows])
    return list(outs) if isinstance(outs, tuple) else [outs]


def _wide(t: Type) -> Type:
    """Sums of 16-bit values are kept in 32."""
    return Type(torch.float32, t.shape) if t.dtype in (torch.float16, torch.bfloat16) else t
