"""What a search found, for people and for programs."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Sequence, Set
from difflib import get_close_matches
from fnmatch import fnmatchcase as fnmatch
from typing import Any

from torch import nn

from mycel.candidates import Answer, Candidate
from mycel.errors import PlanError
from mycel.ir import Block, Program, Var, call, walk
from mycel.plan import BLOCK, Plan, part_bars
from mycel.plan.clock import Event
from mycel.plan.links import message
from mycel.search import Detail, Search
from mycel.sizes import shown, span

GROUPS, SHOWN = 4, 12  # kinds of parameters and equations that are explained
ROW_HEAD = ("plan", "step", "rate", "MFU", "peak", "compute", "waiting", "again", "bubble", "sent by a rank", "")


def table(answer: Answer, top: int = 5) -> str:
    """The best plans, and the ones that lost with why."""
    rate = "tokens/s" if answer.is_text else "rows/s"
    head = [rate if name == "rate" else name for name in ROW_HEAD]
    rows = [row(answer, c) for c in answer.candidates[:top]]
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [str(answer.cluster), ""]
    for line in [head, *rows]:
        sized = enumerate(zip(line, widths, strict=True))
        cells = [x.ljust(w) if i in (0, 9, 10) else x.rjust(w) for i, (x, w) in sized]
        lines.append("  ".join(cells).rstrip())
    best = answer.best
    if best is not None:
        gap = max(0.0, best.seconds / answer.bound - 1) if answer.bound else 0.0  # sums differ in their last digit
        parts = ", ".join(f"{shown(n)} {name.replace('_', ' ')}" for name, n in best.peak_parts.items())
        lines += ["", f"memory     {shown(best.peak)} at the peak of the first plan: {parts}"]
        lines += [f"bound      {span(answer.bound)}: everything computed once, no message waited for"]
        above = f"{100 * gap:.1f} % above" if gap < 1 else f"{1 + gap:,.1f} times"
        lines += [f"           the first plan is at most {above} the fastest there could be"]
        lines += _expected(answer, best)
    lines += [f"remark     {text}" for text in answer.remarks]
    left = "" if answer.complete else "; stopped early, there may be better ones"
    count = f"{len(answer.candidates)} plans" if len(answer.candidates) != 1 else "one plan"
    lines += [f"planning   {span(answer.seconds)}, {count} priced{left}"]
    return "\n".join(lines)


def _expected(answer: Answer, candidate: Candidate) -> list[str]:
    """What earlier runs on such devices make of a prediction."""
    known = answer.cluster.correction
    lines = [f"corrected  {known} (--uncorrected: as the figures say)"] if known is not None else []
    if answer.bars is None:
        return lines
    low, middle, high = answer.bars.expected(candidate.seconds)
    return [*lines, f"expected   {span(middle)}, {span(low)} to {span(high)}: steps took {answer.bars}"]


def _parts_expected(answer: Answer, events: Sequence[Event]) -> Iterator[str]:
    """The same of blocks, and of each collective, of the kinds that some equations are."""
    cluster, sent = answer.cluster, [(message(event.eqn)[0], event.stream) for event in events]
    for kind in dict.fromkeys(f"{name} over {level}" if name else BLOCK for name, level in sent):
        bars = part_bars(cluster.hardware.name, cluster.world, kind, cluster.correction, cluster.basis)
        if bars is not None:
            yield f"expected   {'blocks' if kind == BLOCK else kind} took {bars}"


def row(answer: Answer, c: Candidate) -> list[str]:
    """A plan in the columns of `ROW_HEAD`."""
    if not c.fits or c.times is None:
        return [str(c.shape), *["-"] * 8, "", c.why]
    sent = ", ".join(f"{shown(n)} {level}" for level, n in c.sent.items())
    return [
        str(c.shape), span(c.seconds), f"{answer.tokens / c.seconds:,.0f}", f"{100 * answer.mfu(c):.1f} %",
        shown(c.peak), span(c.times.totals["compute"] - c.again), span(c.exposed + c.moving), span(c.again),
        span(c.bubble) if c.bubble else "-", sent, c.why,
    ]  # fmt: skip


def data(answer: Answer, top: int | None = None) -> dict[str, Any]:
    """Plain data, the best plan first."""
    return {
        "plans": [_data(answer, c) for c in answer.candidates[:top]],
        "cluster": str(answer.cluster),
        "remarks": list(answer.remarks),
        "planning_seconds": answer.seconds,
    }


def _data(answer: Answer, c: Candidate) -> dict[str, Any]:
    if not c.fits or c.times is None or c.plan is None:
        unknown = dict.fromkeys(("step_seconds", "tokens_per_second", "mfu", "peak_bytes", "seconds", "bytes_sent"))
        what = {"mesh": c.shape.mesh.sizes(), "shape": str(c.shape), "why": c.why}
        return {"fits": False, "bound_seconds": answer.bound, **unknown, "peak_parts": None, "plan": None, **what}
    return {
        "fits": True,
        "shape": str(c.shape),
        "step_seconds": c.seconds,
        "bound_seconds": answer.bound,
        "tokens_per_second": answer.tokens / c.seconds,
        "mfu": answer.mfu(c),
        "peak_bytes": c.peak,
        "peak_parts": dict(c.peak_parts),
        "mesh": c.plan.mesh.sizes(),
        "seconds": {
            "compute": c.times.totals["compute"] - c.again,
            "exposed_communication": c.exposed,
            "recomputation": c.again,
            "bubble": c.bubble,
            "exposed_offload": c.moving,
        },
        "bytes_sent": dict(c.sent),
        **({"expected_seconds": list(answer.bars.expected(c.seconds))} if answer.bars is not None else {}),
        "plan": c.plan.given.data(),
        "why": c.why,
    }


def explained(search: Search, answer: Answer, pattern: str) -> str:
    """Of the best plan: what parameters of such a name, or equations of such a name, operator or line, come to; of a
    module its parameters, and the equations of its lines."""
    best = answer.best
    assert best is not None
    detail = search.detail(best)
    lines = [f"{pattern}   in {best.shape}, a step of {span(best.seconds)}"]
    modules = {name: module for name, module in search.model.named_modules() if name and fnmatch(name, pattern)}
    inside = tuple(f"{name}." for name in modules)
    names = [name for name in detail.parameters if fnmatch(name, pattern) or name.startswith(inside)]
    uses = first_uses(search.program)
    for group in list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))[:GROUPS]:
        shape, entry = next(x for name, x in detail.parameters.items() if re.sub(r"\d+", "*", name) == group)
        lines += ["", f"parameter  {group}   {list(shape)}, held as {_entry(entry)}"]
        line = next((uses[name] for name in names if re.sub(r"\d+", "*", name) == group and name in uses), "")
        lines += [f"  first used at {line}"] if line else []
        fixed = search.given_layout(group)
        chosen = best.plan.parameters.get(group, ["-"] * len(shape)) if best.plan is not None else []
        for other, candidate in search.choices(best, group, len(shape)):
            how = "   given" if fixed else "   chosen" if list(other) == list(chosen) else ""
            lines.append(_priced(other, candidate, best, how))
    for value, source in _values(search.program, pattern)[
        : GROUPS if best.shape.pp == 1 and not best.shape.place else 0
    ]:
        lines += ["", f"value      {value.name}   {list(value.shape)}", *([f"  made at {source}"] if source else [])]
        for i, (other, price) in enumerate(search.value_choices(best, value)):
            lines.append(_priced(other, price, best, "   chosen" if i == 0 else ""))
    own = {uses[name] for name in names if name.startswith(inside) and name in uses}
    events = [*_matching(detail, pattern, own, [code for each in modules.values() for code in _code(each)])]
    lines += _equations(detail, events)
    if len(lines) == 1:
        alike = {re.sub(r"\d+", "*", name) for name in detail.parameters}
        near = get_close_matches(pattern, sorted(alike), 3, 0.3)
        names_near = ", ".join(near) or "a parameter"
        raise PlanError(f"nothing is called {pattern!r}\n  try       {names_near}, an operator, or *file.py:12*")
    lines[1:1] = [*_expected(answer, best), *_parts_expected(answer, events)]
    return "\n".join([*lines, ""])


def _priced(entry: Sequence[str], price: Candidate | str, best: Candidate, how: str) -> str:
    """A layout with what a step takes then, and how much more than in the best plan."""
    if isinstance(price, str) or not price.fits:
        return f"  {_entry(entry):14} {price if isinstance(price, str) else price.why}{how}"
    slower = price.seconds - best.seconds
    return f"  {_entry(entry):14} {span(price.seconds)} a step, {'-' if slower < 0 else '+'}{span(abs(slower))}{how}"


def _values(program: Program, pattern: str) -> list[tuple[Var, str]]:
    """What forward makes under such a name, each once, with the line it is made at."""
    by_name: dict[str, tuple[Var, str]] = {}
    for _, eqn in walk(program):
        for v in eqn.outputs[: eqn.phase == "forward"]:
            if v.ndim and fnmatch(v.name, pattern):
                by_name.setdefault(v.name, (v, eqn.line))
    return list(by_name.values())


def first_uses(program: Program) -> dict[str, str]:
    """The line of the user's code where each parameter is used first, by name."""

    def line_of(block: Block, var: Var) -> str:
        for eqn in block.eqns:
            for i, x in enumerate(eqn.inputs):
                if x is var:
                    called = program.blocks[next(eqn.refs)] if eqn.op is call else None
                    line = line_of(called, called.inputs[i]) if called is not None else ""
                    if line or eqn.source:
                        return line or eqn.source
        return ""

    roles = [(program.role(v), v) for v in program.inputs]
    lines = {role.name: line_of(program.main, v) for role, v in roles if role.kind == "parameter"}
    return {name: line for name, line in lines.items() if line}


def _code(module: nn.Module) -> Iterator[tuple[str, range]]:
    """The file and lines of the code of a module and of those in it, without torch's own."""
    for kind in {type(each) for each in module.modules()}:
        if not kind.__module__.startswith("torch."):
            with contextlib.suppress(OSError, TypeError):
                text, first = inspect.getsourcelines(kind.forward)
                yield inspect.getfile(kind), range(first, first + len(text))


def _is_inside(source: str, code: Sequence[tuple[str, range]]) -> bool:
    file, _, line = source.rpartition(":")
    return any(path.endswith(file) and line.isdigit() and int(line) in lines for path, lines in code if file)


def _matching(detail: Detail, pattern: str, own: Set[str], code: Sequence[tuple[str, range]]) -> Iterator[Event]:
    """Equations of such a name, operator or line, on one of `own` or in some code."""
    for event in detail.times.events():
        eqn = event.eqn
        texts = [*(v.name for v in eqn.outputs), eqn.op.name, eqn.line, str(eqn.params.get("op", ""))]
        if eqn.source in own or _is_inside(eqn.source, code) or any(fnmatch(text, pattern) for text in texts):
            yield event


def _equations(detail: Detail, events: Sequence[Event]) -> list[str]:
    """What all of them take in a step, by line."""
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for event in events:
        eqn = event.eqn
        results = ", ".join(str(v.type) for v in eqn.outputs[:2]) or eqn.op.name
        seconds.setdefault((eqn.op.name, results, eqn.line), []).append(event.end - event.start)
    ranked = sorted(seconds.items(), key=lambda x: -sum(x[1]))
    head = ["", f"equations   of the step as drawn: {detail.what}" if detail.what else "equations"] if ranked else []
    return [
        *head,
        *(
            f"  {span(sum(times)):>12}  {len(times):4} x  {op:20} {results:32} {line}"
            for (op, results, line), times in ranked[:SHOWN]
        ),
    ]


def file_text(answer: Answer) -> str:
    """The best plan as a file that `mycel train` takes and people edit."""
    best = answer.best
    assert best is not None and best.plan is not None
    heading = [
        f"# {answer.cluster}",
        f"# predicted: a step takes {span(best.seconds)}, {shown(best.peak)} at its peak, "
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
