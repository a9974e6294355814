"""Messages between two ranks: which ones a program has, so that they can be connected before the first of them.

    rank 1 sends to 2 and receives from 0 and 2:     (0, 1)  (1, 2)  (2, 1)     source, target

Over TCP (gloo) one group serves all pairs, and messages are told apart by tags.  NCCL knows no tags: a communicator
gives what was sent first to who receives first, and to make one both ends have to come.  So there each pair has one of
its own for each direction, made before the first message, by every rank in the order of the pairs: of those that are
not made yet, both ends of the smallest come to it next, so nobody waits in a circle.  Programs receive from a rank in
the order in which it sends (`RankWriter.ask_for`; the simulator holds it): a receive waits for none but messages that
were sent before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mycel.ir import Axes, Program
from mycel.ops import o
from mycel.run.groups import RankGroup, Works

Pair = tuple[int, int]  # source, target: ranks by their numbers in the world


@dataclass(frozen=True)
class Channel:
    """From one rank to another, the first and the second of a group: what is sent first is received first."""

    group: RankGroup

    def send(self, x: torch.Tensor, to: int = 1, tag: int = 0) -> Works:
        return self.group.send(x, 1, 0)

    def receive(self, out: torch.Tensor, source: int = 0, tag: int = 0) -> Works:
        return self.group.receive(out, 0, 0)


def pairs_of(program: Program, rank: int, members: Callable[[Axes], Sequence[int]]) -> list[Pair]:
    """Those of a rank that runs this program, in their order; `members`: the ranks along some axes."""
    pairs: set[Pair] = set()
    for eqn in program.main.eqns:
        p = eqn.params
        if eqn.op is o.begin_send:
            pairs.add((rank, members(p["axes"])[p["to"]]))
        elif eqn.op is o.begin_receive:
            pairs.add((members(p["axes"])[p["source"]], rank))
        elif eqn.op in (o.begin_send_across, o.begin_receive_across):
            pairs |= {(piece[0], piece[1]) for piece in p["pieces"] if rank in piece[:2]}
    return sorted(pairs)
