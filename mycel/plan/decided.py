"""What was decided for one program on one mesh, by name, as plain data: enough to lower it again without a solver.

    decided:
      program: 1f0c52a9e4b7d310              # of the global program it was decided for
      compiled: false
      links: {dp: [1.0e+9, 0.0001]}          # bytes a second and seconds a message, which chose the chains of moves
      layouts:
        main:
          inputs: {x: "f32[64@dp,8]", w: "f32[16,8]"}
          values: {h: "linear a@dp -> f32[64@dp,16]"}
          outputs: ["f32[]"]
      residuals:
        body: main
        pairs: [{block: layer_forward, calls: 4, keep: [h, a], seconds: 0.0001, bytes: 4096}]
      moved:                                 # to the host: values of the body, and inputs that lie there
        body: main
        values: {h: [x_4, dx_3]}             # it has left before x_4 is made, and begins to come back before dx_3 is
        inputs: {w.exp_avg: [[w_7], w_9]}    # it begins to come before w_7 is made, its new value has left before w_9
        chunk: 1048576                       # bytes of them in one update
        inside: {part: {w: [x_2, dx_1]}}     # of blocks that are run for each part: before these it begins to come
        norms: true                          # the norm of gradients is that of the norm of each: these may leave

A value's line says its operator, the letters of the operator's dims that are split, the partial sums that pass through
it (`+tp(0,1)`: of operands 0 and 1), and the type of the result with its layout.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mycel.errors import PlanError
from mycel.ir import CONTROL, DEVICE, HOST, Atom, Axes, Block, Eqn, Layout, Mesh, Program, Type, Var, parse_typed, typed
from mycel.plan.choices import Choice, Laid, Layouts, Options
from mycel.plan.clock import TO_DEVICE, TO_HOST, Times, times_text
from mycel.plan.links import Link, Links
from mycel.plan.offload import Offloaded, equation_key
from mycel.plan.residuals import Decision, Residuals
from mycel.plan.schedule import StageCosts

KEYS = (
    "program", "compiled", "links", "gathered", "layouts", "residuals", "regions", "moved", "stages", "orders",
    "compress", "places", "moved_by_rank", "mesh",
)  # fmt: skip
SHOWN = 3  # differences that a refusal names
_SPLIT = re.compile(r"(\S+)@(\w+(?:\.\w+)*)")
_THROUGH = re.compile(r"\+(\w+)\(([\d,]*)\)")


@dataclass(frozen=True)
class EquationLayout:
    """How an equation lies: `letters` of its dims over axes; `through`: by axis the operands whose partial sums pass;
    its results."""

    op: str
    letters: Mapping[str, Axes]
    through: Mapping[str, tuple[int, ...]]
    results: tuple[tuple[Type, Layout], ...]

    @staticmethod
    def of(eqn: Eqn, choice: Choice) -> EquationLayout:
        results = tuple((v.type, layout) for v, layout in zip(eqn.outputs, choice.outs, strict=True))
        return EquationLayout(eqn.op.name, choice.letters, choice.through, results)

    def choice(self, eqn: Eqn) -> Choice:
        """The layouts of an equation; PlanError if this does not fit its operator."""
        options = Options.of(eqn)
        unknown = [k for k in self.letters if options.fit is None or k not in options.fit.sizes]
        if unknown:
            raise PlanError(f"decided: {self.op} has no dim {unknown[0]}\n  the plan  {self}\n  at        {eqn.source}")
        choice = options.laid(self.letters, self.through)
        if choice.outs != tuple(layout for _, layout in self.results):
            derived, said = str(EquationLayout.of(eqn, choice)).split(" -> "), str(self).split(" -> ")
            raise PlanError(
                f"decided: {derived[0]} gives {derived[1]}, the plan says {said[1]}\n  at        {eqn.source}"
            )
        return choice

    def __str__(self) -> str:
        split = [f"{letter}@{'.'.join(axes)}" for letter, axes in self.letters.items() if axes]
        sums = [f"+{axis}({','.join(map(str, operands))})" for axis, operands in self.through.items()]
        return " ".join(
            [self.op, *split, *sums, "->", "; ".join(typed(t, layout) for t, layout in self.results)]
        ).rstrip()

    @staticmethod
    def parse(text: str) -> EquationLayout:
        head, arrow, tail = text.partition("->")
        op, *words = head.split()
        split, sums = (
            [m for w in words if (m := _SPLIT.fullmatch(w))],
            [m for w in words if (m := _THROUGH.fullmatch(w))],
        )
        if not arrow or len(split) + len(sums) != len(words):
            raise ValueError(f"{text!r} is no layout of a value")
        letters = {m[1]: tuple(m[2].split(".")) for m in split}
        through = {m[1]: tuple(map(int, filter(None, m[2].split(",")))) for m in sums}
        return EquationLayout(op, letters, through, tuple(parse_typed(x.strip()) for x in tail.split(";") if x.strip()))


@dataclass(frozen=True)
class BlockLayouts:
    """The layouts of a block by the names of its values; an equation goes by its first result, control flow has none of
    its own."""

    inputs: Mapping[str, tuple[Type, Layout]]
    values: Mapping[str, EquationLayout]
    outputs: tuple[tuple[Type | None, Layout], ...]  # no type: a number

    @staticmethod
    def of(block: Block, laid: Laid) -> BlockLayouts:
        return BlockLayouts(
            {v.name: (v.type, layout) for v, layout in zip(block.inputs, laid.inputs, strict=True)},
            {
                equation_key(i, e): EquationLayout.of(e, c)
                for i, (e, c) in enumerate(zip(block.eqns, laid.choices, strict=True))
                if c is not None
            },
            tuple((_type(x), layout) for x, layout in zip(block.outputs, laid.outputs, strict=True)),
        )

    def laid(self, block: Block) -> Laid:
        """The same by positions, for a block that `differences` finds nothing wrong with."""
        choices = tuple(
            x.choice(e) if (x := self.values.get(equation_key(i, e))) is not None else None
            for i, e in enumerate(block.eqns)
        )
        return Laid(
            tuple(layout for _, layout in self.inputs.values()), choices, tuple(layout for _, layout in self.outputs)
        )

    def differences(self, block: Block) -> Iterator[str]:
        """Where a block is not the one this was decided for."""
        yield from self.other_inputs(block)
        yield from self._other_values(block)
        if len(block.outputs) != len(self.outputs):
            yield f"it returns {len(block.outputs)} values, in the plan {len(self.outputs)}"

    def other_inputs(self, block: Block) -> Iterator[str]:
        here, there = {v.name: v.type for v in block.inputs}, {name: t for name, (t, _) in self.inputs.items()}
        for name in dict.fromkeys((*here, *there)):
            if here.get(name) != there.get(name):
                yield f"input {name} is {here.get(name, 'not there')}, in the plan {there.get(name, 'not there')}"
        if list(here) != list(there) and here == there:
            yield f"inputs are {', '.join(here)}, in the plan {', '.join(there)}"

    def _other_values(self, block: Block) -> Iterator[str]:
        values = {equation_key(i, e): e for i, e in enumerate(block.eqns) if e.op not in CONTROL}
        for name in dict.fromkeys((*values, *self.values)):
            if name not in values or name not in self.values:
                yield f"{name} is {'not in the plan' if name in values else 'in the plan only'}"
                continue
            eqn, planned = values[name], self.values[name]
            results = tuple(v.type for v in eqn.outputs)
            if eqn.op.name != planned.op or results != tuple(t for t, _ in planned.results):
                types = ", ".join(map(str, results))
                yield (
                    f"{name} is {eqn.op.name} -> {types}, in the plan {planned.op} -> "
                    f"{', '.join(str(t) for t, _ in planned.results)}"
                )

    def data(self) -> dict[str, Any]:
        return {
            "inputs": {name: typed(t, layout) for name, (t, layout) in self.inputs.items()},
            "values": {name: str(x) for name, x in self.values.items()},
            "outputs": ["-" if t is None else typed(t, layout) for t, layout in self.outputs],
        }

    @staticmethod
    def read(data: Mapping[str, Any]) -> BlockLayouts:
        return BlockLayouts(
            {name: parse_typed(text) for name, text in data["inputs"].items()},
            {name: EquationLayout.parse(text) for name, text in data["values"].items()},
            tuple((None, Layout()) if text == "-" else parse_typed(text) for text in data["outputs"]),
        )


@dataclass(frozen=True)
class Decided:
    """All decisions for one program.

    program     a digest of the global program
    compiled    was it planned to be compiled?
    links       of each axis
    gathered    inputs of the entry that are gathered anew for each use (ZeRO-3)
    layouts     by block; on one device the inputs of the entry alone
    residuals   what forward keeps for backward
    regions     by block, the stretches between calls that are compiled as one, each by its first value
    moved       what is on the host while it is not needed
    stages      of a pipeline: the values at which the second and later ones begin
    orders      of a searched schedule: the steps of each rank
    compress    the codec that `compress: auto` has come to
    places      of sub-models on meshes of their own: what was decided for the program of each
    moved_by_rank  of a pipeline: `moved` of the program of each rank along its axis
    mesh        of the ranks it was decided for
    """

    program: str
    residuals: Residuals
    compiled: bool = False
    links: Mapping[str, Link] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    layouts: Mapping[str, BlockLayouts] = field(default_factory=dict)
    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    moved: Offloaded | None = None
    stages: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    compress: str = ""
    places: tuple[Decided, ...] = ()
    moved_by_rank: tuple[Offloaded, ...] = ()
    mesh: str = ""

    def links_of(self, mesh: Mesh) -> Links:
        return Links(mesh, named=self.links)

    def laid(self, whole: Program) -> Layouts:
        """The layouts of a settled program's blocks; PlanError if it is not the one they were decided for."""
        _refuse(self._differences(whole))
        return {name: self.layouts[name].laid(block) for name, block in whole.blocks.items()}

    def refuse_other(self, program: Program) -> None:
        """PlanError if this was decided for another program than this one: on one device the step's, on several the
        settled one."""
        entry = self.layouts.get(program.entry)
        if digest(program) != self.program:
            _refuse(entry.other_inputs(program.main) if entry is not None else ())
            _refuse(["operators, their operands or parameters"])

    def refuse_other_in_places(self, program: Program, places: int) -> None:
        """PlanError if this was decided for sub-models of another program, or for others of them."""
        if len(self.places) != places:
            _refuse([f"there are {places} places, in the plan {len(self.places)}"])
        if digest(program) == self.program:
            return
        entries = [x.layouts[program.entry] for x in self.places if program.entry in x.layouts]
        there = {name: t for entry in entries for name, (t, _) in entry.inputs.items()}
        here = {v.name: v.type for v in program.inputs if program.role(v).kind == "parameter"}
        _refuse(
            f"input {name} is {t}, in the plan {there.get(name, 'not there')}"
            for name, t in here.items()
            if there.get(name) != t
        )
        _refuse(["operators, their operands or parameters"])

    def _differences(self, whole: Program) -> Iterator[str]:
        """What a program has that the one decided for has not, and the other way round."""
        for name in dict.fromkeys((*whole.blocks, *self.layouts)):
            if name not in whole.blocks or name not in self.layouts:
                yield f"block {name} is {'not in the plan' if name in whole.blocks else 'in the plan only'}"
            else:
                yield from (f"in {name}: {text}" for text in self.layouts[name].differences(whole.blocks[name]))

    # -- reading and writing -----------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"program": self.program, "compiled": self.compiled}
        data |= {"links": {axis: x.data() for axis, x in self.links.items()}} if self.links else {}
        data |= {"gathered": list(self.gathered)} if self.gathered else {}
        data |= {"layouts": {name: x.data() for name, x in self.layouts.items()}} if self.layouts else {}
        data["residuals"] = _residuals_data(self.residuals)
        data |= {"regions": {name: list(firsts) for name, firsts in self.regions.items()}} if self.regions else {}
        data |= {"moved": self.moved.data()} if self.moved else {}
        data |= {"stages": list(self.stages)} if self.stages else {}
        data |= {"orders": list(self.orders)} if self.orders else {}
        data |= {"compress": self.compress} if self.compress else {}
        data |= {"places": [x.data() for x in self.places]} if self.places else {}
        data |= {"moved_by_rank": [x.data() for x in self.moved_by_rank]} if self.moved_by_rank else {}
        data |= {"mesh": self.mesh} if self.mesh else {}
        return data

    @staticmethod
    def read(data: Any, where: str) -> Decided:
        try:
            unknown = [k for k in data if k not in KEYS]
            if unknown:
                raise ValueError(f"unknown key {unknown[0]!r}")
            return Decided(
                str(data["program"]),
                _read_residuals(data["residuals"]),
                bool(data["compiled"]),
                {axis: Link.read(x) for axis, x in data.get("links", {}).items()},
                tuple(data.get("gathered", ())),
                {name: BlockLayouts.read(x) for name, x in data.get("layouts", {}).items()},
                {name: tuple(firsts) for name, firsts in data.get("regions", {}).items()},
                Offloaded.read(data["moved"]) if data.get("moved") else None,
                tuple(data.get("stages", ())),
                tuple(data.get("orders", ())),
                str(data.get("compress", "")),
                tuple(Decided.read(x, where) for x in data.get("places", ())),
                tuple(map(Offloaded.read, data.get("moved_by_rank", ()))),
                str(data.get("mesh", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            what = f"{e} is missing" if isinstance(e, KeyError) else str(e)
            raise PlanError(
                f"{where}: decided cannot be read\n  because   {what}\n"
                "  try       leave `decided` out: it is found anew"
            ) from e


@dataclass(frozen=True)
class Predicted:
    """What the clock says of the step.

    peak, held   bytes: of the whole step, and of what is there between steps; `at` is the line of the peak
    seconds      of one step; `parts`: of each stream, in all and exposed; `assumed`: what they rest on
    gap          how far the layouts may be above the cheapest, as a share of their seconds; 0: none cost less
    host         bytes on the host, of a step that moves values there
    steps        of a pipeline: seconds of the forward, backward and weight steps of each stage, and of a message
    compress     where `compress: auto` chose: the seconds of a step by each of its choices
    sync         what replicas say to each other: seconds and bytes for each step, those of a rank (in `seconds`)
    """

    peak: int
    held: int
    at: str = ""
    budget: int | None = None
    gap: float = 0.0
    seconds: float = 0.0
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    host: int = 0
    steps: StageCosts | None = None
    compress: Mapping[str, float] = field(default_factory=dict)
    sync: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def of(times: Times, budget: int | None, gap: float) -> Predicted:
        parts = {
            name: (part.total, part.exposed)
            for name, part in times.parts.items()
            if part.total or name not in (TO_HOST, TO_DEVICE)
        }
        device, host = times.peak[DEVICE], times.peak.get(HOST, 0)
        return Predicted(device, times.held, times.at, budget, gap, times.seconds, parts, times.assumed, host)

    def __str__(self) -> str:
        """The seconds and their parts."""
        return times_text(self.seconds, self.parts, self.assumed)

    def data(self) -> dict[str, Any]:
        own = {
            k: v
            for k, v in vars(self).items()
            if v is not None and (k not in ("host", "compress") or v) and k != "sync"
        }
        own |= {"sync": list(self.sync)} if any(self.sync) else {}
        own |= {"steps": self.steps.data()} if self.steps is not None else {}
        return {**own, "parts": {name: list(part) for name, part in self.parts.items()}, "assumed": list(self.assumed)}

    @staticmethod
    def read(data: Any, where: str) -> Predicted:
        try:
            parts = {name: (float(total), float(exposed)) for name, (total, exposed) in data.get("parts", {}).items()}
            steps = StageCosts.read(data["steps"]) if data.get("steps") else None
            first, second = data.get("sync", (0.0, 0.0))
            more = {"assumed": tuple(data.get("assumed", ())), "steps": steps, "sync": (float(first), float(second))}
            return Predicted(**{**data, "parts": parts, **more})
        except (TypeError, ValueError, AttributeError, KeyError) as e:
            raise PlanError(
                f"{where}: predicted cannot be read\n  because   {e}\n  try       leave `predicted` out"
            ) from e


def digest(program: Program) -> str:
    """Of a program's text without its comments."""
    return hashlib.sha256(re.sub(r" *# .*", "", str(program)).encode()).hexdigest()[:16]


def _refuse(differences: Iterable[str]) -> None:
    """PlanError with the first differences, if there are any."""
    shown = list(itertools.islice(differences, SHOWN + 1))
    if shown:
        shown[SHOWN:] = ["…"] * (len(shown) > SHOWN)
        raise PlanError(
            "the plan was decided for another program\n  differs   " + "\n            ".join(shown) + "\n"
            "  try       the model, batch, optimiser and settings it was made with, or plan.given to decide anew"
        )


def _type(x: Atom) -> Type | None:
    return x.type if isinstance(x, Var) else None


def _residuals_data(residuals: Residuals) -> dict[str, Any]:
    same = lambda d: (d.block, d.keep, d.seconds, d.bytes)
    pairs = [
        {"block": block, "calls": len(list(group)), "keep": list(keep), "seconds": seconds, "bytes": size}
        for (block, keep, seconds, size), group in itertools.groupby(residuals.pairs, same)
    ]
    return {"body": residuals.body, "pairs": pairs} | ({"again": list(residuals.again)} if residuals.again else {})


def _read_residuals(data: Mapping[str, Any]) -> Residuals:
    pairs = [
        Decision(str(p["block"]), tuple(p["keep"]), float(p["seconds"]), int(p["bytes"]))
        for p in data["pairs"]
        for _ in range(int(p["calls"]))
    ]
    return Residuals(str(data["body"]), tuple(pairs), tuple(data.get("again", ())))
