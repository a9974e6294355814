"""Dead code.  A value is kept if the entry's outputs need it; what nobody needs goes, also across blocks.

    def f(x: f32[2], w: f32[2]):                def f(x: f32[2]):
      a: f32[2] = exp(x)                          a: f32[2] = exp(x)
      b: f32[2] = mul(x, w)                       return a
      return a, b                        =>     def main(x: f32[2], w: f32[2]):
    def main(x: f32[2], w: f32[2]):               y: f32[2] = call(x, block=@f)
      y: f32[2], z: f32[2] = call(x, w, block=@f) return y
      return y

Liveness is one worklist over *slots*: the inputs and outputs of blocks, the operands and results of control-flow
equations.  An equation that holds blocks ties slots together (operand k of a call and input k of its block; state k of
a loop, of its test and of its body …): tied slots are kept or dropped together.  The entry's inputs always stay, and so
do equations with an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mycel.ir import CONTROL, Atom, Block, Eqn, Params, Program, Var, call, cond, custom, is_float, loop, order, prune

Slot = tuple[str, str, int]  # ("in" | "out", block, k); ("operand" | "result", equation id, k)


def dce(program: Program, effects: bool = True) -> Program:
    """Equations, block inputs, block outputs, blocks and constants that nobody needs => nothing.  Without `effects`
    what an equation does is no reason to keep it: another program that computes the same does it."""
    live = _Needed(program, effects)
    return prune(replace(program, blocks={n: live.rest(n, b) for n, b in live.blocks.items()}))


class _Needed:
    """What is needed: values of blocks, equations (by id) and slots."""

    def __init__(self, program: Program, effects: bool) -> None:
        self.program = program
        self.blocks = {name: program.blocks[name] for name in order(program)}
        self.producers = {n: {v: e for e in b.eqns for v in e.outputs} for n, b in self.blocks.items()}
        self.numbers = {n: {v: i for i, v in enumerate(b.inputs)} for n, b in self.blocks.items()}
        self.values: set[tuple[str, Var]] = set()
        self.eqns: set[str] = set()
        self.slots: set[Slot] = set()
        self.ties: dict[Slot, list[list[Slot]]] = {}
        self.homes: dict[str, tuple[str, Eqn]] = {}
        self.acting = _acting(self.blocks) if effects else set()
        self.todo: list[tuple[str, Atom]] = [(program.entry, x) for x in program.main.outputs]
        if effects:
            self._effects(program.entry)
        while self.todo:
            self._value(*self.todo.pop())

    def _value(self, block: str, x: Atom) -> None:
        if not isinstance(x, Var) or (block, x) in self.values:
            return
        self.values.add((block, x))
        eqn = self.producers[block].get(x)
        if eqn is None:
            self._slot(("in", block, self.numbers[block][x]))
            return
        if eqn.op not in CONTROL:
            if _me(block, eqn) not in self.eqns:
                self.todo.extend((block, v) for v in eqn.vars)
                self.eqns.add(_me(block, eqn))
            return
        if _me(block, eqn) not in self.eqns:
            self._hold(block, eqn)
        self._slot(("result", _me(block, eqn), eqn.outputs.index(x)))

    def _effects(self, block: str) -> None:
        """A block that is needed is run: so are its equations that do something, and those that hold such blocks."""
        for eqn in self.blocks[block].eqns:
            if eqn.op.effect and _me(block, eqn) not in self.eqns:
                self.eqns.add(_me(block, eqn))
                self.values.update((block, v) for v in eqn.outputs)
                self.todo.extend((block, v) for v in eqn.vars)
            elif _me(block, eqn) not in self.eqns and any(ref in self.acting for ref in eqn.refs):
                self._hold(block, eqn)

    def _hold(self, block: str, eqn: Eqn) -> None:
        """A control-flow equation becomes needed: tie its slots, keep what decides where control goes."""
        self.eqns.add(_me(block, eqn))
        self.homes[_me(block, eqn)] = (block, eqn)
        for tie in _ties(eqn, _me(block, eqn)):
            for slot in tie:
                self.ties.setdefault(slot, []).append(tie)
            if any(slot in self.slots for slot in tie):
                for slot in tie:
                    self._slot(slot)
        if eqn.op is cond:
            self.todo.append((block, eqn.inputs[0]))
        if eqn.op is loop:
            self._slot(("out", str(eqn.params["test"]), 0))
        for ref in eqn.refs:
            if ref in self.acting:
                self._effects(ref)

    def _slot(self, slot: Slot) -> None:
        if slot in self.slots:
            return
        self.slots.add(slot)
        kind, where, k = slot
        if kind == "out":
            self.todo.append((where, self.blocks[where].outputs[k]))
        elif kind == "operand":
            block, eqn = self.homes[where]
            self.todo.append((block, eqn.inputs[k]))
        for tie in self.ties.get(slot, ()):
            for other in tie:
                self._slot(other)

    def rest(self, name: str, block: Block) -> Block:
        """What is left of a block."""
        eqns = tuple(self._left(e, _me(name, e)) for e in block.eqns if _me(name, e) in self.eqns)
        if name == self.program.entry:
            return Block(block.inputs, eqns, block.outputs)
        inputs = tuple(v for i, v in enumerate(block.inputs) if ("in", name, i) in self.slots)
        outputs = tuple(x for i, x in enumerate(block.outputs) if ("out", name, i) in self.slots)
        return Block(inputs, eqns, outputs)

    def _left(self, eqn: Eqn, me: str) -> Eqn:
        if eqn.op not in CONTROL:
            return eqn
        keep = [("operand", me, k) in self.slots or (eqn.op is cond and k == 0) for k in range(len(eqn.inputs))]
        inputs = tuple(x for x, kept in zip(eqn.inputs, keep, strict=True) if kept)
        outputs = tuple(v for k, v in enumerate(eqn.outputs) if ("result", me, k) in self.slots)
        params, n = dict(eqn.params), eqn.params.get("consts", 0)
        m = n + eqn.params.get("carry", 0)
        for key, count in (("consts", sum(keep[:n])), ("carry", sum(keep[n:m]))):
            if key in params and (count or key not in eqn.op.defaults):
                params[key] = count
            else:
                params.pop(key, None)
        return replace(eqn, inputs=inputs, outputs=outputs, params=Params(params))


def _me(block: str, eqn: Eqn) -> str:
    """One equation of one block; blocks may share equations."""
    return f"{block} {id(eqn)}"


def _acting(blocks: Mapping[str, Block]) -> set[str]:
    """Blocks with equations that do something, inner blocks first."""
    acting: set[str] = set()
    for name, block in blocks.items():
        if any(e.op.effect or any(ref in acting for ref in e.refs) for e in block.eqns):
            acting.add(name)
    return acting


def _ties(eqn: Eqn, me: str) -> Iterator[list[Slot]]:
    """The slots that a control-flow equation keeps or drops together."""
    p = eqn.params
    operands, results = range(len(eqn.inputs)), range(len(eqn.outputs))
    if eqn.op is call:
        yield from ([("operand", me, k), ("in", p["block"], k)] for k in operands)
        yield from ([("result", me, k), ("out", p["block"], k)] for k in results)
    elif eqn.op is cond:
        yield from ([("operand", me, k), ("in", p["then"], k - 1), ("in", p["orelse"], k - 1)] for k in operands if k)
        yield from ([("result", me, k), ("out", p["then"], k), ("out", p["orelse"], k)] for k in results)
    elif eqn.op is custom:  # two blocks with one signature: all or nothing
        parts: list[Slot] = [("in", p["forward"], k) for k in operands] + [("out", p["forward"], k) for k in results]
        floats = sum(is_float(v.dtype) for v in eqn.outputs[: p["outs"]])
        parts += [("in", p["backward"], k) for k in range(len(eqn.inputs) + len(eqn.outputs) + floats)]
        parts += [
            ("out", p["backward"], k)
            for k in range(sum(is_float(x.dtype) for x in eqn.inputs[: p["wrt"]] if isinstance(x, Var)))
        ]
        yield [*(("operand", me, k) for k in operands), *(("result", me, k) for k in results), *parts]
    else:
        n = p.get("consts", 0)
        state = len(eqn.outputs) if eqn.op is loop else p.get("carry", 0)
        held = [p["test"], p["body"]] if eqn.op is loop else [p["body"]]
        for k in operands:
            tie: list[Slot] = [("operand", me, k), *(("in", str(b), k) for b in held)]
            if n <= k < n + state:
                tie += [("result", me, k - n), ("out", p["body"], k - n)]
            yield tie
        yield from ([("result", me, k), ("out", p["body"], k)] for k in results if k >= state)
