"""Parameters that all ranks have and of which each updates a part (ZeRO 1 and 2): what the others are told is by how
much that part has changed, encoded.

    w' = adam(w, …)                       w' = adam(w, …)
    return w=w'                           y, r = shared_update(w', w, w.unsent, draws, codec="int4", of="w", …)
                               =>         return w=y, w.unsent=r

`lower/compress` writes the gather behind `shared_update` on encoded bytes; all ranks, the one that has updated the
part among them, go on with what these say.  What that leaves out of a change is in the next one: an input of the role
`outer unsent of w`, which lies as the optimiser's state of w does.  A step that is skipped changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Builder, Program, Role, Type
from mycel.ops import o
from mycel.transform.compressing import DRAWS, count_messages

SKIPPED = Role("counter", "skipped")


def share_updates(program: Program, codecs: Mapping[str, str], axis: str) -> Program:
    """The step with the new values of these parameters told along an axis, each by its codec."""
    program = count_messages(program)
    main, inputs, roles = program.main, program.by_role(), dict(program.roles)
    n = len(program.results)
    updates: dict[str, Any] = dict(zip(program.updates, main.outputs[n:], strict=True))
    b = Builder.after(main, phase="update")
    with b:
        skipped = inputs[SKIPPED]
        is_taken = o.eq(updates[skipped.name], skipped)
        for name, codec in codecs.items():
            w = inputs[Role("parameter", name)]
            if w.name not in updates:
                continue
            error = b.input(f"{name}.unsent", Type(torch.promote_types(w.dtype, torch.float32), w.shape))
            roles[error.name] = Role("outer", "unsent", of=name)
            fed_back = o.mul(error, o.cast(is_taken, dtype=error.dtype))
            how = {"codec": codec, "axes": (axis,), "of": name}
            updates[w.name], lost = o.shared_update(updates[w.name], w, fed_back, inputs[DRAWS], **how)
            updates[error.name] = o.where(is_taken, lost, error)
    block = replace(main, inputs=tuple(b.inputs), eqns=tuple(b.eqns), outputs=(*main.outputs[:n], *updates.values()))
    return replace(program, blocks={**program.blocks, program.entry: block}, updates=tuple(updates), roles=roles)
