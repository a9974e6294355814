"""What a search found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mycel.plan import Plan
from mycel.search import Answer, Candidate
from mycel.sizes import shown


def table(answer: Answer, top: int = 5) -> str:
    """The best plans, and the ones that lost with why."""
    rate = "tokens/s" if answer.is_text else "rows/s"
    head = ["plan", "step", rate, "MFU", "peak", "compute", "waiting", "again", "sent by a rank", ""]
    rows = [_row(answer, c) for c in answer.candidates[:top]]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [str(answer.cluster), ""]
    for row in [head, *rows]:
        cells = [x.ljust(w) if i in (0, 8, 9) else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    best = answer.best
    if best is not None:
        gap = best.seconds / answer.bound - 1 if answer.bound else 0.0
        lines += ["", f"bound      {_ms(answer.bound)}: everything computed once, no message waited for"]
        lines += [f"           the first plan is at most {100 * gap:.1f} % above the fastest there could be"]
        if answer.bars is not None:
            low, middle, high = answer.bars.expected(best.seconds)
            lines += [f"expected   {_ms(middle)}, {_ms(low)} to {_ms(high)}: steps took {answer.bars}"]
    left = "" if answer.complete else "; stopped early, there may be better ones"
    lines += [f"planning   {answer.seconds:.1f} s, {len(answer.candidates)} plans priced{left}"]
    return "\n".join(lines)


def _row(answer: Answer, c: Candidate) -> list[str]:
    if not c.fits or c.times is None:
        return [str(c.shape), *["-"] * 7, "", c.why]
    sent = ", ".join(f"{shown(n)} {level}" for level, n in c.sent.items())
    return [
        str(c.shape), _ms(c.seconds), f"{answer.tokens / c.seconds:,.0f}", f"{100 * answer.mfu(c):.1f} %",
        shown(c.peak), _ms(c.times.totals["compute"] - c.again), _ms(c.exposed), _ms(c.again), sent, c.why,
    ]  # fmt: skip


def data(answer: Answer, top: int | None = None) -> dict[str, Any]:
    """Plain data, the best plan first."""
    return {
        "plans": [_data(answer, c) for c in answer.candidates[:top]],
        "cluster": str(answer.cluster),
        "planning_seconds": answer.seconds,
    }


def _data(answer: Answer, c: Candidate) -> dict[str, Any]:
    if not c.fits or c.times is None or c.plan is None:
        return {"fits": False, "mesh": c.shape.mesh.sizes(), "shape": str(c.shape), "why": c.why}
    return {
        "fits": True,
        "shape": str(c.shape),
        "step_seconds": c.seconds,
        "bound_seconds": answer.bound,
        "tokens_per_second": answer.tokens / c.seconds,
        "mfu": answer.mfu(c),
        "peak_bytes": c.peak,
        "mesh": c.plan.mesh.sizes(),
        "seconds": {
            "compute": c.times.totals["compute"] - c.again,
            "exposed_communication": c.exposed,
            "recomputation": c.again,
            "bubble": 0.0,
            "exposed_offload": 0.0,
        },
        "bytes_sent": dict(c.sent),
        **({"expected_seconds": list(answer.bars.expected(c.seconds))} if answer.bars is not None else {}),
        "plan": c.plan.given.data(),
        "why": c.why,
    }


def file_text(answer: Answer) -> str:
    """The best plan as a file that `mycel train` takes and people edit."""
    best = answer.best
    assert best is not None and best.plan is not None
    heading = [
        f"# {answer.cluster}",
        f"# predicted: a step takes {_ms(best.seconds)}, {shown(best.peak)} at its peak, "
        f"{answer.tokens / best.seconds:,.0f} {'tokens' if answer.is_text else 'rows'}/s",
    ]
    return "\n".join([*heading, str(best.plan.given)])


def difference(a: Plan, b: Plan) -> str:
    """What is given differently in two plans, line by line; nothing where they are the same."""
    first, second = a.given.data(), b.given.data()
    lines: list[str] = []
    for key in dict.fromkeys([*first, *second]):
        old, new = first.get(key), second.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names = dict.fromkeys([*old, *new])
            lines += [_changed(f"{key}: {n}", old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]
        elif old != new:
            lines.append(_changed(key, old, new))
    return "\n".join(lines)


def _changed(what: str, old: Any, new: Any) -> str:
    return f"{what:40} {_entry(old)} -> {_entry(new)}"


def _entry(value: Any) -> str:
    if value is None:
        return "(nothing)"
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return "[" + ", ".join(map(str, value)) + "]" if is_list else str(value)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
