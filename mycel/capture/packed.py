"""Packed sequences whose lengths are known while code is captured: constants, or facts of the batch.

    pack_padded_sequence(x, lengths)     rows x[b, t] of places that count, step after step: one lookup
    lstm, gru, rnn of packed rows        one product of all rows with what comes from outside; then step by step, each
                                         with as many rows as sequences go on
    pad_packed_sequence                  the rows at their places again, and what it pads with: one lookup

Which rows go where torch's own kernels say, on numbers of rows.  Lengths that are not known, or keep changing, leave
the code around an island, as do layers that take more than MOST_STEPS steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.fence import refuse
from mycel.capture.record import Traced
from mycel.capture.trace import Tracer

MOST_STEPS = 96  # of all layers and directions, that are written out
_VF: Any = torch._C._VariableFunctions


def packed(tracer: Tracer, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """torch._VF._pack_padded_sequence of known lengths: rows and how many of each step; None where it cannot be."""
    known = _known(tracer, lengths)
    if known is None or tracer.device.type not in ("cpu", "meta"):
        return None
    numbers = _numbers(x.shape[:2])
    places, sizes = _plain(_VF._pack_padded_sequence, numbers, known, batch_first)
    return x.flatten(0, 1)[_constant(tracer, places)], _constant(tracer, sizes)


def padded(
    tracer: Tracer, data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total_length: int
) -> Any:
    """torch._VF._pad_packed_sequence: sequences and their lengths."""
    known = _known(tracer, sizes)
    if known is None:
        return None
    numbers = _numbers(data.shape[:1], start=1)  # zero is what it pads with
    places, lengths = _plain(_VF._pad_packed_sequence, numbers, known, batch_first, 0, total_length)
    rows = torch.cat([data.new_full((1, *data.shape[1:]), value), data])
    return rows[_constant(tracer, places)], _constant(tracer, lengths)


def packed_layers(
    tracer: Tracer,
    kind: str,
    data: torch.Tensor,
    sizes: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> Any:
    """Layers of an LSTM (`states`: h and c), GRU or RNN over packed rows: rows, and the last states."""
    known = _known(tracer, sizes)
    if known is None:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        rows = [int(n) for n in known]
    ways = 1 + bidirectional
    if layers * ways * len(rows) > MOST_STEPS:
        raise refuse(
            f"packed sequences: {layers} layers take {layers * ways * len(rows)} steps, more than are written out",
            "the padded sequences as they are, and the output at the last real place of each: "
            "out[torch.arange(len(x)), lengths - 1]",
        )
    each = len(weights) // (layers * ways)
    lasts: list[list[torch.Tensor]] = []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            at = layer * ways + way
            own = weights[at * each : (at + 1) * each]
            w, u, *added = own[: 2 + 2 * biases]
            b, d = added if biases else (None, None)
            projection = own[-1] if each > 2 + 2 * biases else None
            step = _STEPS[kind](u, d, projection)
            out, last = _steps(F.linear(data, w, b), rows, [s[at] for s in states], step, bool(way))
            outs.append(out)
            lasts.append(last)
        data = torch.cat(outs, -1) if bidirectional else outs[0]
        if layer < layers - 1:
            data = F.dropout(data, dropout, training)
    return (data, *(torch.stack(list(of_state)) for of_state in zip(*lasts, strict=True)))


Step = Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]


def _steps(
    x: torch.Tensor, rows: Sequence[int], first: list[torch.Tensor], step: Step, backwards: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One direction: states (the output is the first) of all rows, and those that each sequence ends with."""
    parts = x.split(list(rows))
    outs: dict[int, torch.Tensor] = {}
    ended: list[list[torch.Tensor]] = []
    order = range(len(rows))[::-1] if backwards else range(len(rows))
    states = [s[: rows[order[0]]] for s in first]
    for t in order:
        count, before = rows[t], states[0].shape[0]
        if count < before:  # the shortest have ended
            ended.append([s[count:] for s in states])
            states = [s[:count] for s in states]
        elif count > before:  # and backwards, begin
            states = [torch.cat([s, s0[before:count]]) for s, s0 in zip(states, first, strict=True)]
        states = step(parts[t], states)
        outs[t] = states[0]
    last = [torch.cat(list(pieces)) for pieces in zip(states, *reversed(ended), strict=True)]
    return torch.cat([outs[t] for t in range(len(rows))]), last


def _lstm(u: torch.Tensor, d: torch.Tensor | None, projection: torch.Tensor | None) -> Step:
    def step(x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        i, f, g, o = (x + F.linear(states[0], u, d)).chunk(4, -1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return [h if projection is None else F.linear(h, projection), c]

    return step


def _gru(u: torch.Tensor, d: torch.Tensor | None, projection: torch.Tensor | None) -> Step:
    def step(x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        (r, z, n), (hr, hz, hn) = x.chunk(3, -1), F.linear(states[0], u, d).chunk(3, -1)
        z = (z + hz).sigmoid()
        return [(1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * states[0]]

    return step


def _rnn(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Step]:
    return lambda u, d, projection: lambda x, states: [activation(x + F.linear(states[0], u, d))]


_STEPS: dict[str, Callable[..., Step]] = {
    "lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(torch.relu),
}  # fmt: skip


# -- numbers that are known


def _known(tracer: Tracer, x: torch.Tensor) -> torch.Tensor | None:
    return tracer.fact(x) if type(x) is Traced or torch.is_tensor(x) else None


def _plain(run: Callable[..., Any], numbers: torch.Tensor, *args: Any) -> Any:
    """What torch makes of the numbers of rows, and what it says beside it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        places, beside = run(numbers.unsqueeze(-1), *args)
        return places.squeeze(-1), beside


def _numbers(shape: Sequence[int], start: int = 0) -> torch.Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.arange(start, start + torch.Size(shape).numel()).view(*shape)


def _constant(tracer: Tracer, x: torch.Tensor) -> torch.Tensor:
    tracer.here()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), tracer:
        constant: torch.Tensor = tracer.wrap(tracer.constant(x))
    return constant
