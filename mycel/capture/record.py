"""What traced code did so far: its equations, its inputs, and the value of each tensor it holds.

    Traced      a tensor with shape, dtype, device and strides but no data; its `cell` holds its value, a Var
    Region      one call of a module: which equations are its own
    Record      a Builder that knows the Var of every tensor: traced ones, those that the code reached (they become
                inputs), constants

The tracer (`trace.py`) adds to it what torch calls become.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.alias import Cell
from mycel.capture.facts import CONSTANT, GIVEN, UNKNOWN, Fact, dependence, evaluate, needed
from mycel.capture.fence import here, refuse, refuse_read
from mycel.capture.locations import Location
from mycel.capture.rows import ChosenRows, refuse_rows, together, write_rows
from mycel.capture.shared_memory import Inside, SharedMemory, lies_in, part_of
from mycel.capture.state import Reachable
from mycel.capture.traced_text import TextOf, TracedText
from mycel.errors import CaptureError
from mycel.ir import CONTROL, OPS, Atom, Block, Builder, Eqn, Op, Type, Var, type_of

LARGEST_CONCRETE = 1 << 20  # elements of a constant computed while tracing
LARGEST_FACT = 1 << 24  # … and of a value on the way to one that the batch decides


class Traced(torch.Tensor):
    """A tensor without data; its cell holds the Var that is its value."""

    cell: Cell
    tracer: Record
    weak: bool = False  # a Python number that control flow made a tensor: it gives way to the dtypes of other tensors

    @staticmethod
    def make(cell: Cell, tracer: Record, strides: Sequence[int] | None = None) -> Traced:
        t = cell.var.type
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Traced, t.shape, strides=strides, dtype=t.dtype, device=tracer.device
        )
        tensor.cell, tensor.tracer = cell, tracer
        return tensor

    @property  # type: ignore[misc]  # what code that asks for its class takes it for
    def __class__(self) -> type:  # type: ignore[override]
        return torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *rest: Any) -> Any:  # type: ignore[override]
        raise CaptureError(
            f"{func} met a tensor of a capture that is over",
            hint="do not keep tensors in globals or lists across calls of a captured function; return them",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.tracer.running:
            return f"Traced({self.cell.var})"
        return self.tracer.text_of(self, "number" if self.weak else "text")

    def as_subclass(self, cls: Any) -> Any:
        """A tensor of another class has code that would not be seen."""
        if cls is torch.Tensor:
            return self.view_as(self)
        raise refuse(
            f"a traced tensor was made a {cls.__name__}, which is a class of tensors with code of its own",
            "a plain tensor, and functions for what the class does",
        )

    def __round__(self, digits: int | None = None) -> Any:
        """Python rounds as decimal numbers are written."""
        raise refuse_read("__round__")

    def __hash__(self) -> int:
        """Tensors are found by what they are, numbers by their value, which is not known."""
        if self.weak:
            raise refuse_read("__hash__")
        return id(self)


_NUMBERS = itertools.count()  # of texts: those of two captures are not the same


@dataclass
class ModuleCall:
    """One call of a module: its equations are [start, end); `site` is its place among the draws and calls of its
    parent."""

    name: str
    path: str
    start: int
    source: str = ""
    site: int = 0
    end: int = 0
    sites: int = 0
    children: list[ModuleCall] = field(default_factory=list)
    module: int = 0  # its id


class Record(Builder):
    """The equations, inputs and blocks of a capture under way, and what its tensors are."""

    def __init__(self, device: torch.device, places: Reachable) -> None:
        super().__init__()
        self.device, self.places = device, places
        self.lifted: dict[int, tuple[torch.Tensor, Cell]] = {}
        self.state: list[tuple[Var, list[Location]]] = []
        self.shared = SharedMemory(locations[0].read() for locations in places.tensors.values())
        self.joins = False  # is what shares memory with another tensor of outside a view of that one?
        self.joined_cells: dict[int, tuple[torch.Tensor, Cell]] = {}  # these, in the place of inputs
        self.inside: list[Inside] = []  # … and where they lie
        self.counted_slots: AbstractSet[Any] = frozenset()  # of numbers of the program (`counters.py`)
        self.live_slots: frozenset[Any] = frozenset()  # … that are Python's alone, since backward changes them
        self.writes_shared = False  # does the code write one that is not joined?
        self.consts: dict[str, torch.Tensor] = {}
        self.regions = [ModuleCall("main", "", 0)]
        self.draws = False
        self.frozen: set[int] = set()  # equations recorded under torch.no_grad()
        self.lines: list[tuple[int, str]] = []  # for each equation, how deep the user's frame is, and its line
        self.frame = 0
        self.producers: dict[Var, Eqn] = {}
        self.kinds: dict[Var, int] = {}  # what values depend on (`facts.py`)
        self.sources: dict[Var, torch.Tensor] = {}  # inputs whose values may be asked for
        self.data: dict[Var, Any] = {}  # values that were computed because they were asked for
        self.facts: dict[Var, Fact] = {}
        self.changing: frozenset[str] = frozenset()  # lines whose values keep changing: no fact is asked for there
        self.rows: dict[Var, ChosenRows] = {}  # values of which not all rows count (`rows.py`)
        self.counted_rows: set[str] = set()  # lines that chose rows whose number was asked for
        self.plain_selects: set[str] = set()  # lines that choose rows for which that did not work
        self.aliases: dict[str, list[Location]] = {}  # arguments that the code also reaches otherwise, and where
        self.differentiated = False  # is the gradient taken of what is captured, so that hooks on it are called?
        self.by_arguments = False  # … is it taken by arguments?
        self.grad_mode = torch.is_grad_enabled()  # of the caller
        self.recorded: list[tuple[list[torch.Tensor], bool]] = []  # would torch record gradients of these?
        self.recorded_arguments: dict[Var, bool] = {}  # … and of these?
        self.toggled: dict[int, tuple[torch.Tensor, bool]] = {}  # code set their requires_grad; what it was before
        self.frozen_tensors: dict[int, torch.Tensor] = {}  # … of these to False
        self.running = True  # a capture inside another may use the outer one's tensors while that is under way
        self.texts: dict[str, TextOf] = {}  # by what stands for it
        self.blocks: dict[str, Block] = {}  # finished inner blocks: of control flow and of derivatives
        self.shapes: dict[Any, str] = {}  # blocks by what they are up to names
        self.closed: set[Var] = set()  # values of inner blocks that are finished: nothing outside may use them
        self.hints: dict[str, str] = {}  # names of what control flow gives back
        self.caught: list[Callable[[], Any]] = []  # what try statements around the line catch, the outermost first
        self.leaf_grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # what .grad is, since backward()
        self.raised: BaseException | None = None  # the last exception of a raise statement in rewritten code
        self.numbers = False  # are there weak tensors?
        self.maybe: set[str] = set()  # variables that only one of two branches defines
        self.lists_vary = False  # are there lists whose length depends on values?
        self.picks_rows = False  # has code asked for rows, or places, at which a mask holds?
        self.expert_loops: set[str] = set()  # lines that asked for places after a topk
        self.manual: list[Any] = []  # manual regions that are open (`region.py`)
        self.local: dict[
            Var, frozenset[str]
        ] = {}  # values of closed ones that differ from rank to rank, and along which axes

    def name(self, hint: str) -> str:
        """Names are numbers while tracing; readable ones are given at the end."""
        self._names["v"] = n = self._names.get("v", 0) + 1
        return f"v{n}"

    def emit(self, op: Op, inputs: Sequence[Any], params: dict[str, Any]) -> Any:
        return super().emit(op, together(self, op, inputs) if self.rows else inputs, params)

    def append(self, op: Op, inputs: tuple[Atom, ...], params: dict[str, Any], types: Sequence[Type]) -> Any:
        for region in self.manual:
            inputs = region.given(inputs)
        if self.rows and any(x in self.rows for x in inputs if isinstance(x, Var)):
            return write_rows(self, op, inputs, params, types)
        return self.write(op, inputs, params, types)

    def write(
        self,
        op: Op,
        inputs: tuple[Atom, ...],
        params: dict[str, Any],
        types: Sequence[Type],
        outputs: tuple[Var, ...] = (),
    ) -> Any:
        """Append an equation as it is."""
        if (
            not torch.is_grad_enabled() and op not in CONTROL
        ):  # what a branch or a loop computes is frozen inside; what it passes on is not
            self.frozen.add(len(self.eqns))
        self.lines.append((self.frame, self.source))
        out = super().append(op, inputs, params, types)
        if outputs:
            self.eqns[-1], out = replace(self.eqns[-1], outputs=outputs), outputs
        self.producers.update((v, self.eqns[-1]) for v in self.eqns[-1].outputs)
        largest = max((v.type.numel for v in self.eqns[-1].outputs), default=0)
        computable = op not in CONTROL and not op.effect and not op.by_rank and largest <= LARGEST_FACT
        kind = dependence(self.eqns[-1], self.kinds, self.producers, computable)
        self.kinds.update((v, kind) for v in self.eqns[-1].outputs)
        for region in self.manual:
            region.note(self.eqns[-1])
        return out

    def text_of(self, x: torch.Tensor, form: str) -> str:
        """What stands for the text of a tensor while code is captured: print finds the value that it is of (`show`)."""
        cell = self.cell(x)
        with self:
            text = f"Traced({next(_NUMBERS)}: {cell.var.type})"
            self.texts[text] = TextOf(cell.read(), form, here()[0])
        return TracedText(text, self)

    def concrete(self, x: torch.Tensor) -> torch.Tensor | None:
        """The actual value of a traced tensor that depends on no input: computed now.  None if it does depend on
        one."""
        var = self.cell(x).read()
        if self.kinds.get(var) != CONSTANT or var.type.numel > LARGEST_CONCRETE:
            return None
        known: dict[Var, torch.Tensor] = {}
        with _disable_current_modes():
            evaluate(needed(var, self.producers, ()), known, self.consts)
        return known[var]

    def fact(self, x: torch.Tensor) -> torch.Tensor | None:
        """The same also for what depends on the program's inputs, parameters apart: from here on the program holds for
        that value alone.  None if it depends on parameters or random numbers, or keeps changing."""
        var = self.cell(x).read()
        self.refuse_rows([var], "their values were asked for")
        if self.kinds.get(var, UNKNOWN) != GIVEN:
            return self.concrete(x)
        if var not in self.facts and here()[0] in self.changing:
            return None
        if var not in self.facts:
            eqns = needed(var, self.producers, self.data.keys() | self.sources.keys())
            for eqn in eqns:  # what they begin with
                self.data.update({v: self._data(v) for v in eqn.vars if v in self.sources and v not in self.data})
            if var in self.sources:
                self.data.setdefault(var, self._data(var))
            with torch.no_grad(), _disable_current_modes():
                evaluate(eqns, self.data, self.consts)
                value = self.data[var].clone()
            self.facts[var] = Fact(var, value, here()[0], tuple(eqns))
        return self.facts[var].value

    def refuse_rows(self, values: Sequence[Any], why: str) -> None:
        """These may not be rows of which only some count."""
        for v in values:
            if isinstance(v, Var) and v in self.rows:
                raise refuse_rows(self.rows[v].source, why)

    def _data(self, var: Var) -> torch.Tensor:
        """The values of an input, on the host."""
        x = self.sources[var]
        value = x.tracer.fact(x) if type(x) is Traced and x.tracer is not self else x
        if value is None or value.device.type == "meta":
            error = refuse(
                "the value of a tensor that the program is given decides here, and it has no data",
                "compiling with a batch that has data, or keeping it a tensor",
            )
            error.final = True
            raise error
        with _disable_current_modes():
            return value.detach().cpu()

    def add_block(self, name: str, block: Block) -> str:
        """Enter a finished block; an equal one that is there already is used instead."""
        tried = name
        for i in itertools.count(2):
            if tried not in self.blocks:
                self.blocks[tried] = block
                return tried
            if self.blocks[tried] == block:
                return tried
            tried = f"{name}_{i}"
        raise AssertionError

    def here(self) -> None:
        """The equations that follow are the user's current line."""
        self.source, self.frame = here()

    def undo(self, length: int) -> None:
        """Forget the equations from `length` on."""
        del self.eqns[length:], self.lines[length:]
        self.frozen -= {i for i in self.frozen if i >= length}

    def argument(self, name: str, tensor: torch.Tensor, apart: bool = False) -> Traced:
        """A tensor argument becomes an input; `apart`: also where the code reaches the same tensor by another way, that
        is another input."""
        self._check_tensor(tensor)
        var = Var(name, type_of(tensor))
        self.inputs.append(var)
        cell = Cell(var)
        cell.place = Location(name, "argument", None, None)
        self.lifted[-len(self.lifted) - 1 if apart else id(tensor)] = (tensor, cell)
        self.sources[var], self.kinds[var] = tensor, GIVEN
        return Traced.make(cell, self, tensor.stride())

    def cell(self, tensor: torch.Tensor) -> Cell:
        """The cell of a traced tensor, or of a real one the code reached: that becomes an input."""
        if type(tensor) is Traced and tensor.tracer is self:
            if tensor.cell.var in self.closed:
                raise refuse(
                    "a tensor made in a branch or loop was used outside of it",
                    "a variable, attribute or item that every branch assigns",
                )
            if tensor.cell.var in self.local:
                axes = ", ".join(sorted(self.local[tensor.cell.var]))
                raise refuse(
                    f"a tensor that differs from rank to rank along {axes} was used outside of its manual region",
                    "comm.all_gather or comm.all_reduce inside, or a decorated function with outs=",
                )
            return tensor.cell
        if type(tensor) is Traced and not tensor.tracer.running:
            raise refuse(
                "a tensor of another capture was used", "do not keep tensors across calls of captured functions"
            )
        entry = self.lifted.get(id(tensor)) or self.joined_cells.get(id(tensor))
        if entry is None and (whole := self._whole_of(tensor)) is not None:
            entry = self.joined_cells[id(tensor)] = (tensor, part_of(self.cell(whole), whole, tensor))
            part, whole_at = self.places.find(tensor)[0], self.places.find(whole)[0]
            self.inside.append(Inside(part, whole_at, lies_in(tensor, whole)))
        elif entry is None:
            entry = self.lifted[id(tensor)] = (tensor, self._lift(tensor))
        elif entry[1].place is not None and entry[1].place.kind == "argument":
            self.aliases[entry[1].place.name] = self.places.find(tensor)
        return entry[1]

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        """A program holds dense tensors of one device (0-dim ones may lie elsewhere, as in torch)."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise refuse(
                "a tensor inside a transform of torch.func was given to one of Mycel's", "mycel.vmap, mycel.grad"
            )
        _check_dense(tensor)
        if type(tensor) is Traced and isinstance(tensor.tracer, Record):
            tensor.tracer.refuse_rows([tensor.cell.var], "a function inside is captured by itself")
        kinds = {tensor.device.type, self.device.type} - {"meta"}
        if len(kinds) > 1 and tensor.ndim:
            raise refuse(
                f"a tensor on {tensor.device} was used in a program on {self.device}",
                "move model and arguments to one device",
            )

    def _lift(self, tensor: torch.Tensor) -> Cell:
        self._check_tensor(tensor)
        places = self.places.find(tensor)
        used = {v.name for v in self.inputs}
        base = name = places[0].name or "held"
        for i in range(1, 1_000_000):
            if name not in used:
                break
            name = f"{base}_{i}"
        var = Var(name, type_of(tensor))
        self.inputs.append(var)
        self.state.append((var, places))
        if not isinstance(tensor, torch.nn.Parameter):
            self.sources[var], self.kinds[var] = tensor, GIVEN
        cell = Cell(var)
        cell.place = places[0]
        if others := self.shared.others(tensor):
            cell.beside = functools.partial(self._refuse_shared, tensor, others)
            if self.joins and any(id(y) in self.lifted and self.lifted[id(y)][1].version for y in others):
                cell.write(var)
        return cell

    def _whole_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that this one is a view of in the program, where what shares memory is one input."""
        whole = self.shared.whole(tensor) if self.joins and self.shared.others(tensor) else None
        return None if whole is tensor else whole

    def _refuse_shared(self, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> CaptureError | None:
        """What is raised where it is written."""
        whole = self.shared.whole(tensor)
        used = [y for y in others if id(y) in self.lifted]
        if self.joins and (whole is not None or not used):
            return None
        name, other = (self.places.find(x)[0].name for x in (tensor, (used or others)[0]))
        error = refuse(
            f"{name} and {other} share memory, of which the code writes a part, and neither lies inside of the other, "
            "without a gradient of its own",
            f"one tensor of which both are views, or a clone() where {name} is made",
        )
        error.shared, error.final = not self.joins, self.joins
        self.writes_shared = True
        return error

    def lift_at(self, tensor: torch.Tensor, places: list[Location]) -> Traced:
        """A tensor that is found there at every call becomes an input, which no fact is asked of."""
        used = {v.name for v in self.inputs}
        names = itertools.chain([places[0].name], (f"{places[0].name}_{i}" for i in itertools.count(1)))
        var = Var(next(name for name in names if name not in used), type_of(tensor))
        cell = Cell(var)
        cell.place = places[0]
        self.inputs.append(var)
        self.state.append((var, places))
        self.lifted[id(tensor)] = (tensor, cell)
        return Traced.make(cell, self)

    def value(self, x: Any) -> Any:
        """What a rule sees for an argument: Vars for tensors, containers opened."""
        if isinstance(x, torch.Tensor):
            value = self.cell(x).read()
            return self.emit(OPS["stop_gradient"], (value,), {}) if id(x) in self.frozen_tensors else value
        if isinstance(x, (list, tuple)) and x and not isinstance(x, torch.Size):
            return type(x)(map(self.value, x)) if type(x) in (list, tuple) else [self.value(v) for v in x]
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise refuse("symbolic sizes are not supported; a program has static shapes")
        return x

    def wrap(self, out: Any) -> Any:
        """What user code gets for a rule's result."""
        if isinstance(out, Var):
            return Traced.make(Cell(out), self)
        if isinstance(out, (list, tuple)):
            return type(out)(map(self.wrap, out))
        return out

    def constant(self, tensor: torch.Tensor) -> Var:
        """A literal tensor in the user's code."""
        data = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(repr((data.dtype, tuple(data.shape))).encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        name = f"c{digest.hexdigest()[:12]}"
        self.consts[name] = data
        return self.emit(OPS["const"], (), {"name": name, "shape": tuple(data.shape), "dtype": data.dtype})


def _check_dense(x: torch.Tensor) -> None:
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout).split(".")[-1]
        raise refuse(
            f"a {kind} tensor was used; a program has dense tensors",
            "to_dense(), or computing it outside of the function",
        )
