"""The memory of a block, equation by equation: what each makes and frees, and what it needs while it runs.

Line             an equation as the clock has it: its stream and seconds (`clock.py` enters those), and its memory
remember         enters into the lines of a block what each makes, frees and needs
owners           in whose memory each value of a block lies: its own, that of what it is a view of, or that of an
                 operand it is written over
while_turning    bytes while a scan or loop runs, whose blocks need so many
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mycel.ir import DEVICE, Atom, Block, Eqn, Program, Type, Var, call, loop, rounded, scan
from mycel.ops import o
from mycel.ops.memory_sharing import is_view
from mycel.ops.narrow_products import is_slow_product
from mycel.ops.overwriting import Overwritten, starts, summed
from mycel.ops.written_inputs import NOTHING, WrittenInputs
from mycel.plan.allocations import allocated
from mycel.plan.cost import TURNS
from mycel.plan.message_memory import MessageMemory, message_memory


@dataclass(slots=True)
class Line:
    """An equation as the clock sees it.  kind: work, wait, begin, finish, leave (it finishes what nobody waits for),
    hold (it holds blocks); bytes `new` and `freed`."""

    eqn: Eqn
    kind: str
    seconds: float = 0.0
    stream: int = 0
    busy: float = 0.0
    packing: float = 0.0  # seconds of computing before a message begins, or once it has come
    token: int = -1  # of a finish: the line of its begin
    after: tuple[int, ...] = ()  # of an update on the host: the lines that bring what it reads, all that it waits for
    behind: float | None = None  # it takes what the host makes, so many seconds before the host is free
    new: int = 0
    freed: int = 0
    inner: int = 0  # bytes while it runs, results included
    turning: int = 0  # of a scan or loop: the carry of the turn before, beside what a turn makes
    rows: int = 0  # of a scan: what turns have made that is stacked in the end
    stacking: int = 0  # of it: bytes while that is done, one result at a time


def size(v: Var) -> int:
    """Bytes as an allocator gives them."""
    return rounded(v.type.bytes)


def while_turning(line: Line, peak: int) -> int:
    """Bytes while an equation runs whose blocks need `peak`: what they have made before is there as well."""
    return max(line.turning + line.rows + peak, line.stacking)


def _enter_turns(line: Line, owner: Mapping[Var, Var], dying: Collection[Var]) -> None:
    """What is there of other turns: the carry, unless it is summed where it lies, and rows.  Where the first began is
    free in the second, if nobody reads that any more."""
    eqn, length = line.eqn, line.eqn.params.get("length", TURNS)
    carry = eqn.params.get("carry", 0) if eqn.op is scan else len(eqn.outputs)
    carried = sum(size(v) for v in eqn.outputs[:carry] if owner.get(v) is v)
    rows = [size(v) for v in eqn.outputs[carry:]]
    elsewhere = {owner[v] for v in eqn.vars if v in owner and v not in starts(eqn)}
    free = {owner[v] for v in starts(eqn) if v in owner and owner[v] in dying} - elsewhere
    free -= {owner[v] for v in eqn.outputs[:carry] if v in owner}  # summed there
    carried = max(carried - sum(map(size, free)), 0)
    line.turning = carried if length > 1 else 0
    line.rows = sum(rows) * (length - 1) // max(length, 1)
    line.stacking = carried + sum(rows) + max(rows, default=0)


def _scratch(
    eqn: Eqn, slow: Mapping[torch.dtype, int], makers: Mapping[Var, Eqn] | None, dying: Collection[Var]
) -> int:
    """Bytes besides its results that an equation takes; `makers`: of values of its block, None: a compiler merges what
    the operator does not say.  A product of 16 bits that is computed in 32 (`transform/wide_products.py`) takes copies
    of its operands, one after another, of which those that are `dying` go with that, and of its results before they
    are rounded."""
    is_wide = bool(slow) and is_slow_product(eqn, slow)
    types = eqn.input_types
    if is_wide:
        types = tuple(replace(t, dtype=torch.float32) if isinstance(t, Type) and t.dtype in slow else t for t in types)
    inside = eqn.op.scratch(*types, **eqn.params) if eqn.op.scratch is not None else 0
    if not inside and makers is not None and not eqn.on_host:
        inside = allocated(eqn, types, makers)
    if not is_wide:
        return inside
    copied = copying = gone = 0
    for v in dict.fromkeys(eqn.vars):
        if v.dtype in slow:
            copied += 2 * size(v)
            copying = max(copying, copied - gone)
            gone += size(v) if v in dying else 0
    narrow = sum(size(v) for v in eqn.outputs if v.dtype in slow)
    return max(copying - sum(map(size, eqn.outputs)), copied - gone + inside + narrow, 2 * narrow - gone)


def remember(
    lines: Sequence[Line],
    block: Block,
    lying: Owners,
    there: Collection[Var] | None,
    when: Sequence[int],
    last_read: Sequence[int],
    slow: Mapping[torch.dtype, int],
    is_gpu: bool,
    written: WrittenInputs = NOTHING,
) -> None:
    """Enters what each line makes and frees; `lying`: in whose memory; `there`: the values that lie in memory, None:
    all; `when`: the line at which each one runs; `last_read`: the last that reads its operands; `slow`: dtypes of
    products that are computed in 32 bits; `is_gpu`: by whom messages are carried; `written`: what an entry writes into
    inputs."""
    owner, bytes_of = lying
    end = {owner[v]: len(lines) for v in block.outputs if v in owner and v not in written.results}
    for i, eqn in enumerate(block.eqns):
        for v, until in (*((v, last_read[i]) for v in eqn.vars), *((v, when[i]) for v in eqn.outputs)):
            if v in owner:
                end[owner[v]] = max(end.get(owner[v], -1), until)
    begin_move = o.begin_move
    makers = {v: eqn for eqn in block.eqns for v in eqn.outputs}
    for i, line in enumerate(lines):
        eqn = line.eqn
        if eqn.op is not begin_move:  # its result stands for a copy
            at = lines[line.token if line.kind == "finish" else when[i]]
            for v in eqn.outputs:
                if v.type.space == DEVICE and owner.get(v) is v and (there is None or v in there):
                    bytes_ = bytes_of.get(v, size(v))
                    at.new += bytes_
                    if end[v] < len(lines):
                        lines[end[v]].freed += bytes_
        last = [owner[v] for v in dict.fromkeys(eqn.vars) if v in owner and end[owner[v]] == i]
        dying = {v for v in eqn.vars if v in owner and last.count(owner[v]) == 1}
        if line.kind == "finish" and eqn.op is o.finish:
            begun = lines[line.token]
            _enter_message(begun, line, message_memory(begun.eqn, eqn.outputs, is_gpu, written.results))
        elif line.kind == "wait":
            carried = message_memory(eqn, eqn.outputs, is_gpu)
            most = carried.on_the_way + max(carried.beginning, carried.ending)
            line.inner = most + sum(map(size, eqn.outputs)) if most else 0
        needed = _scratch(eqn, slow, makers if there is None else None, dying)
        copies = [eqn.inputs[k] for k in written.copied.get(i, ()) if k >= len(eqn.outputs)]
        needed += sum(size(x) for x in copies if isinstance(x, Var))
        if needed:
            line.inner = needed + sum(size(v) for v in eqn.outputs if owner.get(v) is v)
        if eqn.op is scan or eqn.op is loop:
            _enter_turns(line, owner, last)


def _enter_message(begun: Line, finish: Line, memory: MessageMemory) -> None:
    """What a message takes from where it is begun to where it is finished."""
    begun.new += memory.on_the_way
    begun.inner = begun.new + memory.beginning
    finish.freed += memory.on_the_way
    finish.inner = memory.ending


class Owners(NamedTuple):
    """`of`: values -> the value whose memory they lie in; `bytes` of that, where it is larger than the value."""

    of: dict[Var, Var]
    bytes: dict[Var, int]


def owners(
    program: Program,
    name: str,
    over: Overwritten | None = None,
    of_results: dict[str, list[tuple[Var, int] | None]] | None = None,
    written: WrittenInputs = NOTHING,
) -> Owners:
    """Of the values that a block makes; inputs own nothing here, their memory is the caller's.  Results of a call that
    are one value of the called block, or views of one, lie in one memory, and a part that is kept keeps all of it.
    `over`: results that lie in an operand's memory, None: those that are only views do.
    `written`: what an entry writes into inputs.
    `of_results`: by block, for each of its results its owner there and the bytes of that, as far as known; None: the
    block was given it."""
    block, owner, bytes_of = program.blocks[name], dict[Var, Var](), dict[Var, int]()
    known = {} if of_results is None else of_results
    here = over[name] if over is not None else {}
    inputs = set(block.inputs)

    def lies_in(x: Atom, results: Iterable[Var]) -> None:
        if x in inputs:
            inputs.update(results)
        elif isinstance(x, Var) and x in owner:
            owner.update((v, owner[x]) for v in results)

    for i, eqn in enumerate(block.eqns):
        if is_view(eqn) and eqn.inputs and isinstance(eqn.inputs[0], Var):
            lies_in(eqn.inputs[0], eqn.outputs)
        elif eqn.op is call:
            called, lying_in = eqn.params["block"], dict[Var, Var]()
            if called not in known:
                inner = owners(program, called, over, known)
                lying = [inner.of.get(x) if isinstance(x, Var) else None for x in program.blocks[called].outputs]
                known[called] = [None if x is None else (x, inner.bytes.get(x, size(x))) for x in lying]
            for v, result in zip(eqn.outputs, known[called], strict=True):
                inside, bytes_ = result or (v, size(v))
                owner[v] = lying_in.setdefault(inside, v)
                bytes_of[owner[v]] = bytes_
        elif eqn.op.inplace is None:
            owner.update((v, v) for v in eqn.outputs)
            if i in here:
                del owner[eqn.outputs[-1]]
                lies_in(eqn.inputs[here[i]], eqn.outputs[-1:])
            elif eqn.op is scan and over is not None:
                body, first = eqn.params["body"], eqn.params.get("consts", 0)
                for j in summed(eqn, program.blocks[body], over[body]):
                    del owner[eqn.outputs[j]]
                    lies_in(eqn.inputs[first + j], eqn.outputs[j : j + 1])
        else:  # what is updated in place has its memory already, but for what is copied first
            for k, (x, y) in enumerate(zip(eqn.inputs, eqn.outputs, strict=False)):
                if k in written.copied.get(i, ()):
                    owner[y] = y
                else:
                    lies_in(x, (y,))
    return Owners(owner, bytes_of)
