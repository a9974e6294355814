"""What a plan says of compressed gradients:

    compress: {dp: int8+ef}                          matrices; small tensors, vectors and routers stay exact
    compress: {dp: {"*.mlp.*": int4+ef, "*": int8+ef, "lm_head.*": exact}}
                                                     the first pattern that matches; "*" leaves out the same as above,
                                                     what another pattern names is compressed whatever it is
    compress: {dp: auto}                             whatever the clock finds quickest, exact among it

    compress: {dp: [exact until 100, topk(0.25)+ef until 200, topk(0.01)+ef]}
                                                     one after the other, by the number of steps
    compress: {dp: 1bit-adam(100)}                   Adam, exactly for 100 steps, then its momentum in one bit and its
                                                     variance frozen: [exact until 100, sign+adam]
    compress: {dp: int4+ef, when: noise > 2}         while what is monitored says so, exact otherwise
    gather: {dp: int8}                               parameters of ZeRO-3, when they are gathered for use; by pattern
    send: {stages: int8, experts: fp8}               what stages of a pipeline send each other; tokens for experts
    gather: {dp: int4+ef}                            of ZeRO-1 and 2: by how much an update has changed them

Gradients are compressed on their way along one axis, which splits the batch.  What a codec's text may be says
`ops/codec_kernels.py`; `+ef`, `+ef21`, `+loco`, `+dgc` and `+adam` keep what it loses (`ops/codecs.py`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.ops.codec_kernels import FORMS, codec_of, encode_rows
from mycel.ops.codecs import Compression, rank_of
from mycel.plan.names import unmatched
from mycel.sizes import span

SMALL = 4096  # elements; below it a message's start costs more than its bytes
EXEMPT = ("*router*", "*norm*")  # a little noise changes much, and they are few
GATE, ROWS = "*gate.weight", 8  # a router too, if it is so many times as long as it has rows: one for each expert
EXACT, AUTO = "exact", "auto"
# what may be watched, and how what is measured of it is called
MONITORS = {"noise": "noise_scale", "variance": "gradient_variance", "error": "compression_error"}
SENDERS = ("stages", "experts")
ROW_CODECS = ("int8", "fp8", "bf16", "fp16", "int4", "fp32")  # that lose little of a message that is sent once
NOTHING: Mapping[str, torch.dtype] = {}
ONE_BIT_ADAM = re.compile(r"\s*1bit-adam\(\s*(?:warmup\s*=\s*)?([1-9]\d*)\s*\)\s*")
CANDIDATES = (EXACT, "int8+ef", "int4+ef")  # of auto, the least lossy first
WORTH = 0.05  # the share of a step that losing something of gradients must save: a clock is hardly more exact
_AUTO = re.compile(r"\s*auto\s*(?:\(([^()]*)\))?\s*")


@dataclass(frozen=True)
class CompressedAxis:
    """By pattern of parameters how gradients travel along an axis; None: exactly.  `auto`: not decided yet, of codecs
    that lose no larger share of a gradient than the `budget`."""

    axis: str
    patterns: tuple[tuple[str, Compression | None], ...]
    auto: bool = False
    budget: float = 1.0

    def candidates(self) -> tuple[str, ...]:
        """What auto chooses among."""
        return tuple(text for text in CANDIDATES if usual_loss(text) <= self.budget)

    def codecs(self) -> list[str]:
        """Of these the codecs."""
        return [how.codec for text in self.candidates() if (how := read_codec(text, "compress")) is not None]

    def of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Compression]:
        """Of parameters of these shapes, those that are compressed."""
        chosen = {}
        for name, shape in shapes.items():
            pattern, how = next(((p, how) for p, how in self.patterns if fnmatchcase(name, p)), ("", None))
            if how is not None and (pattern != "*" or not is_exempt(name, shape)):
                chosen[name] = how
                refuse_rank(name, shape, how, f"compress: {self.axis}: {pattern}")
        return chosen

    def refuse_unused(self, shapes: Collection[str], others: Mapping[str, torch.dtype] = NOTHING) -> None:
        """PlanError for a pattern that matches none of these parameters; `others`: tensors that have no gradient."""
        for pattern, how in self.patterns:
            odd = next((name for name in others if pattern == name), None)
            if odd is not None and how is not None:
                kind = str(others[odd]).removeprefix("torch.")
                why = "codecs are of floating point" if not others[odd].is_floating_point else "no step changes it"
                raise PlanError(
                    f"compress: {self.axis}: {odd}: {how}, but {odd} is {kind}: {why}\n  try       {odd}: exact"
                )
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in shapes):
                raise PlanError(f"compress: {self.axis}: {unmatched(pattern, shapes)}")


def is_exempt(name: str, shape: Sequence[int]) -> bool:
    """Is it left alone unless it is named?"""
    if len(shape) < 2 or math.prod(shape) < SMALL or any(fnmatchcase(name, p) for p in EXEMPT):
        return True
    return fnmatchcase(name, GATE) and ROWS * shape[0] <= math.prod(shape[1:])


def refuse_rank(name: str, shape: Sequence[int], how: Compression, where: str) -> None:
    """PlanError where a parameter is no matrix of that rank."""
    rank, sides = rank_of(how.codec), (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    if rank and rank > min(sides):
        raise PlanError(
            f"{where}: {how.codec}, but {name} is {list(shape)}: of rank {min(sides)} at most\n"
            f"  try       a rank up to {min(sides)}, or  {name}: int8+ef"
        )


def refuse_split_momentum(encoded: CompressedAxis | None, zero: int, over: Sequence[str]) -> None:
    """PlanError where momentum is to travel along an axis over which ranks have parts of it."""
    patterns = encoded.patterns if encoded is not None and zero and encoded.axis in over else ()
    for how in (how for _, how in patterns if how is not None and how.memory == "adam"):
        assert encoded is not None
        raise PlanError(
            f"compress: {encoded.axis}: {how}: each rank adds its gradient to all of the momentum, which zero: {zero} "
            f"splits over {encoded.axis}\n  try       zero over another axis, or  int4+loco"
        )


def refuse_update(
    axis: str, name: str, how: Compression, kind: str, flags: Mapping[str, Any], is_warm: bool, others: Sequence[str]
) -> None:
    """PlanError where the optimiser (its `kind` and settings) of a parameter cannot take what travels instead of its
    gradient.  `is_warm`: steps were taken before; `others`: what else asks for gradients."""
    if how.memory not in ("dgc", "adam"):
        return
    where, known = f"compress: {axis}: {how}", kind or "torch's own update"
    if how.memory == "dgc":
        if kind != "sgd" or flags.get("momentum"):
            has = "SGD with momentum" if kind == "sgd" else known
            raise PlanError(
                f"{where}: ranks keep the momentum of {name}, but its optimiser is {has}\n"
                f"  try       torch.optim.SGD with momentum=0, or a group of its own for {name} with momentum=0"
            )
        return
    off = next((flag for flag in ("amsgrad", "maximize") if flags.get(flag)), "")
    if kind != "adam" or off:
        has = f"Adam with {off}" if off else known
        raise PlanError(
            f"{where}: what travels is the momentum of Adam, but the optimiser of {name} is {has}\n"
            "  try       torch.optim.Adam or AdamW, or  sign+ef"
        )
    if not is_warm:
        raise PlanError(
            f"{where}: the variance of {name} is frozen, but no step has measured it\n"
            f"  try       compress: {{{axis}: 1bit-adam(100)}}, or  [exact until 100, {how}]"
        )
    if others:
        raise PlanError(
            f"{where}: what comes of {name} is the momentum of Adam, and {others[0]} asks for its gradient\n"
            f"  try       without {others[0]}, or  {how.codec}+ef"
        )


def read_compress(entry: Any, mesh: Mesh, batch_axes: Sequence[str]) -> CompressedAxis | None:
    """What `compress` says; None for nothing.  PlanError says what is wrong with it."""
    if not entry:
        return None
    if not isinstance(entry, Mapping):
        raise PlanError(f"compress: {entry!r}\n  try       an axis and a codec, such as  compress: {{dp: int8+ef}}")
    axis, *others = entry
    if others:
        raise PlanError(
            f"compress: names {', '.join(map(str, entry))}\n"
            "  try       one axis, that of the slowest link: along others sums stay exact"
        )
    if axis not in mesh:
        raise PlanError(f"compress: there is no axis {axis!r}\n  the mesh  {mesh}\n  try       {_hint(batch_axes)}")
    if axis not in batch_axes:
        raise PlanError(
            f"compress: along {axis} gradients are no sums, since it does not split the batch: what travels there must "
            f"be exact\n  try       {_hint(batch_axes)}"
        )
    said = entry[axis]
    budget = auto_budget(said, f"compress: {axis}")
    if budget is not None:
        return CompressedAxis(axis, (), auto=True, budget=budget)
    patterns = said if isinstance(said, Mapping) else {"*": said}
    where = f"compress: {axis}" if isinstance(said, Mapping) else "compress"
    return CompressedAxis(axis, tuple((str(p), read_codec(how, f"{where}: {p if patterns is said else axis}"))
                                      for p, how in patterns.items()))  # fmt: skip


def auto_budget(said: Any, where: str) -> float | None:
    """Of `auto`, or `auto(0.05)`, the share of a gradient that a codec may lose at a step; None: it is not auto."""
    match = _AUTO.fullmatch(said) if isinstance(said, str) else None
    if match is None:
        return None
    number = match[1] or "1"
    if not _is_number(number) or not 0 < float(number) <= 1:
        raise PlanError(f"{where}: {said}: a share of a gradient, more than 0 and at most 1\n  try       auto(0.05)")
    return float(number)


@functools.cache
def usual_loss(text: str) -> float:
    """The share of a gradient of normal numbers that a codec loses, in the norm."""
    how = read_codec(text, "compress")
    if how is None:
        return 0.0
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    _, left = encode_rows(x, None, None, codec_of(how.codec), 1, x.numel(), True)
    return float(left.norm() / x.norm())


def read_monitor(entry: Any) -> frozenset[str]:
    """What `monitor` asks for."""
    names = [entry] if isinstance(entry, str) else list(entry or ())
    for name in names:
        if name not in MONITORS:
            close = get_close_matches(str(name), MONITORS, 1)
            raise PlanError(
                f"monitor: {name!r}\n  known     {', '.join(MONITORS)}\n  try       {(close or [*MONITORS])[0]}"
            )
    return frozenset(names)


@dataclass(frozen=True)
class Condition:
    """When gradients are compressed: while what is monitored is above, or below, a number."""

    name: str
    above: bool
    limit: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Before anything is measured, it does not."""
        measured = [x for name, x in values.items() if name.startswith(MONITORS[self.name])]
        return bool(measured) and (max(measured) > self.limit if self.above else max(measured) < self.limit)


def read_phases(entry: Any) -> tuple[list[tuple[int | None, Any]], Condition | None]:
    """What `compress` says over time: (the step before which it holds, None: for good; what holds), and what decides
    between exact (the first) and encoded (the second) where that is `when`.

    {dp: [exact until 100, topk(0.01)+ef]}      {dp: int4+ef, when: noise > 2}
    """
    if not isinstance(entry, Mapping) or not entry:
        return [(None, entry)], None
    rest = {axis: how for axis, how in entry.items() if axis != "when"}
    if "when" in entry:
        match = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\w]+)\s*", str(entry["when"]))
        if match is None or match[1] not in MONITORS or not _is_number(match[3]):
            raise PlanError(
                f"compress: when: {entry['when']!r}\n  known     {', '.join(MONITORS)}\n  try       when: noise > 2"
            )
        exact = dict.fromkeys(rest, EXACT)
        return [(None, exact), (None, rest)], Condition(match[1], match[2] == ">", float(match[3]))
    axis, said = next(iter(rest.items()))
    if isinstance(said, str) and said.lstrip().startswith("1bit-adam"):
        match = ONE_BIT_ADAM.fullmatch(said)
        if match is None:
            raise PlanError(
                f"compress: {axis}: {said}\n  try       1bit-adam(100): so many steps are exact, and measure variances"
            )
        said = [f"exact until {match[1]}", "sign+adam"]
    if not isinstance(said, (list, tuple)):
        return [(None, entry)], None
    phases: list[tuple[int | None, Any]] = []
    for i, text in enumerate(said):
        how, _, end = (w.strip() for w in str(text).partition(" until "))
        last = i == len(said) - 1
        if last == bool(end) or (end and not (end.isdigit() and int(end) > (phases[-1][0] or 0 if phases else 0))):
            raise PlanError(
                f"compress: {axis}: {text}\n  try       steps that grow, and one for good at the end: "
                "[exact until 100, topk(0.01)+ef]"
            )
        phases.append((int(end) if end else None, {axis: how}))
    return phases, None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_gather(entry: Any, mesh: Mesh, zero: int, over: Sequence[str]) -> CompressedAxis | None:
    """What `gather` says of parameters that are gathered for use; None for nothing."""
    if not entry:
        return None
    axis = next(iter(entry)) if isinstance(entry, Mapping) and len(entry) == 1 else None
    if axis is None or axis not in mesh:
        raise PlanError(f"gather: {entry!r}\n  try       an axis and a codec, such as  gather: {{dp: int8}}")
    if zero == 0 or tuple(over) != (axis,):
        has = f"zero is {zero} over {'.'.join(over)}" if zero else "there is no zero"
        raise PlanError(f"gather: along {axis} no parameters are gathered: {has}\n  try       zero: 3 over {axis}")
    chosen = read_compress({axis: entry[axis]}, mesh, [axis])
    assert chosen is not None
    for pattern, how in chosen.patterns:
        if how is not None and zero < 3 and (how.memory != "ef" or how.draws):
            raise PlanError(
                f"gather: {axis}: {pattern}: {how}: under zero: {zero} what travels is how parameters have changed, "
                "and what is lost of that is kept\n  try       int4+ef or int8+ef"
            )
        if how is not None and zero == 3 and (how.memory or how.draws or how.codec.startswith("topk")):
            raise PlanError(
                f"gather: {axis}: {pattern}: {how}: parts are encoded anew each time, and nothing is kept\n"
                "  try       int8, int4, bf16 or fp16"
            )
    if chosen.auto:
        raise PlanError(f"gather: {axis}: auto is for gradients\n  try       gather: {{{axis}: int8}}")
    return chosen


def read_send(entry: Any, has_stages: bool) -> dict[str, str]:
    """What `send` says: codecs of what stages send each other, and of rows on their way to experts and back."""
    if not entry:
        return {}
    if not isinstance(entry, Mapping) or not entry.keys() <= set(SENDERS):
        raise PlanError(f"send: {entry!r}\n  known     {', '.join(SENDERS)}\n  try       send: {{stages: int8}}")
    codecs = {}
    for name, said in entry.items():
        how = read_codec(said, f"send: {name}")
        if how is None:
            continue
        if how.memory or how.draws or rank_of(how.codec) or codec_of(how.codec).name not in ROW_CODECS:
            raise PlanError(
                f"send: {name}: {how}: each token travels once, and nothing is kept of it\n"
                f"  try       {', '.join(ROW_CODECS)}"
            )
        codecs[name] = how.codec
    if "stages" in codecs and not has_stages:
        raise PlanError("send: stages: there are no stages\n  try       stages: 2, or send: {experts: int8}")
    return codecs


def read_codec(text: Any, where: str) -> Compression | None:
    """How a gradient travels; None: exactly."""
    if text == EXACT:
        return None
    try:
        return Compression.parse(str(text))
    except ValueError as e:
        name = str(text).split("+")[0].split("(")[0].strip()
        close = get_close_matches(name, (*FORMS, "powersgd", EXACT), 1)
        hint = f"{close[0]}" if close and close[0] != name else "int8+ef, int4+ef, topk(0.01)+ef, bf16, exact or auto"
        raise PlanError(f"{where}: {e}\n  try       {hint}") from e


def least_lossy(seconds: Mapping[str, float]) -> str:
    """What `auto` chooses, by the seconds of a step with each choice, the least lossy first: the first that is about as
    quick as the quickest."""
    quickest = min(seconds.values())
    return next(text for text, s in seconds.items() if (1 - WORTH) * s <= quickest)


def choice_text(seconds: Mapping[str, float], chosen: str) -> str:
    """Why `auto` chose as it did: the seconds of a step by each choice, and what loses too much."""
    took = {text: span(s) for text, s in seconds.items()}
    lossy = [f"; {text} would lose {usual_loss(text):.2g} of a gradient" for text in CANDIDATES if text not in seconds]
    others = {text: s for text, s in seconds.items() if text not in (EXACT, chosen)}
    text = min(others, key=others.__getitem__, default="")
    saved = 1 - others[text] / seconds[chosen] if text else 0.0
    more = f"{text} would save {saved:.1%} more, {WORTH:.0%} are asked for what it loses" if saved > 0 else ""
    if chosen != EXACT:
        return f"{chosen}: {took[chosen]} a step, exact {took[EXACT]}{more and f'; {more}'}{''.join(lossy)}"
    if not others:
        return f"exact: {took[EXACT]} a step{''.join(lossy)}"
    cost = f"compression would cost {span(others[text] - seconds[EXACT])} a step"
    why = more.replace(" more,", ",") or f"links are fast: {cost}"
    return f"exact: {why} ({text} {took[text]}, exact {took[EXACT]}){''.join(lossy)}"


def _hint(axes: Sequence[str]) -> str:
    return f"compress: {{{axes[0]}: int8+ef}}" if axes else "an axis that splits the batch:  batch: [dp, -]"
