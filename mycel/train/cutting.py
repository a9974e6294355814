"""Models made straight in their parts: a rank never holds more than its parts and the tensor or two that are being
made.

    constructor ──▶ a parameter is registered: open ──▶ … another one is: closed
                                                 ▲                        │
                                                 └──── written over ◀─────┘

A closed one is cut to this rank's part, its memory given back; reading it is refused.  Of a pipeline that is nothing
for parameters of other stages.

The constructor runs as it would for one device, with the same draws in the same order, so the parts are those of what
one device would have, bit for bit.  Which parameter is which is known from an outline: the same constructor on the meta
device.  A model whose constructor reads what it has made before is made whole, and then cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook as on_registration
from torch.utils._python_dispatch import TorchDispatchMode

from mycel.ir import Layout, Mesh
from mycel.parts import parameter_layouts
from mycel.plan import Plan
from mycel.run import part_of

OVERWRITES = {
    "normal_",
    "uniform_",
    "zero_",
    "fill_",
    "copy_",
    "bernoulli_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
}


class Unreadable(BaseException):
    """A closed parameter is asked for its values.  Not an Exception: constructors, and who calls them, handle those in
    their own way."""


@dataclass(frozen=True)
class Outline:
    """A model without data, the parameters in the order in which its constructor registers them, and its tensors by the
    names it gives them."""

    module: nn.Module
    registered: tuple[nn.Parameter, ...]
    names: dict[str, torch.Tensor]


def outline(make: Callable[[], nn.Module]) -> Outline:
    """What a constructor makes, on the meta device."""
    parameters: list[nn.Parameter] = []
    with torch.device("meta"), _registering(lambda p: parameters.append(p)):
        module = make()
    return Outline(module, tuple(parameters), dict(_tensors(module)))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@contextmanager
def _registering(note: Callable[[nn.Parameter], None]) -> Iterator[None]:
    handle = on_registration(lambda module, name, p: note(p) if p is not None else None)
    try:
        yield
    finally:
        handle.remove()


class Cuts:
    """How the tensors of a model are cut for one rank; `shapes` and `layouts` are by name, with the adapters that were
    added to its outline.  Parameters of other stages of a pipeline (`foreign`) are left as one number."""

    def __init__(self, model: Outline, plan: Plan, mesh: Mesh, rank: int, foreign: Collection[str] = ()) -> None:
        self.outline, self.mesh, self.rank, self.foreign = model.module, mesh, rank, frozenset(foreign)
        named = list(_tensors(model.module))
        name_of = {id(x): name for name, x in named}
        one = {name: name_of[id(x)] for name, x in named}
        trained = {name_of[id(p)] for p in model.module.parameters() if p.requires_grad}
        self.shapes = {name: x.shape for name, x in named}
        self.layouts = parameter_layouts(plan, self.shapes, trained, one)
        self.order = [name_of.get(id(p)) for p in model.registered]
        self.renamed = {old: name_of[id(x)] for old, x in model.names.items() if id(x) in name_of}
        self.largest_bytes = max((x.nbytes for x in model.module.parameters()), default=0)
        self.notes: list[str] = []
        self.done: set[int] = set()

    def built(self, make: Callable[[], Any]) -> Any:
        """What a constructor makes, in parts."""
        cutter = Cutter(self)
        try:
            with cutter, _registering(cutter.register):
                module = make()
            cutter.finish()
        except Unreadable as why:
            self.notes.append(f"the model was made whole on each rank and then cut: its constructor {why}")
            module = make()
        return self.cut(module)

    def cut(
        self, module: Any, convert: Callable[[torch.Tensor, bool], torch.Tensor] = lambda x, is_parameter: x
    ) -> Any:
        """Tensors that are still whole become parts; `convert` is given each part, and whether it is one of a
        parameter."""
        for name, x in _tensors(module):
            if id(x) not in self.done:
                self.done.add(id(x))
                known = name if name in self.layouts else self.renamed[name]
                if known in self.foreign:
                    one = x.data.new_zeros(())
                    x.data = convert(one, True).expand(x.shape)
                else:
                    x.data = convert(self.part(x.data, self.layouts[known]), isinstance(x, nn.Parameter))
        return module

    def part(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's, as memory of its own; the tensor itself where the layout leaves it whole."""
        return (
            x
            if layout.is_whole
            else part_of(x, layout, self.mesh, self.rank).clone(memory_format=torch.contiguous_format)
        )


@dataclass
class CutParameter:
    """A parameter that is cut: its whole memory while it is open, its part once it is closed."""

    parameter: nn.Parameter
    layout: Layout
    whole_bytes: int
    foreign: bool = False
    part: torch.Tensor | None = None


@dataclass
class Cutter(TorchDispatchMode):
    """Sees what a constructor does with its parameters, and closes those that it has left."""

    cuts: Cuts
    count: int = 0
    cells: dict[int, CutParameter] = field(default_factory=dict)  # by their storage

    def __post_init__(self) -> None:
        super().__init__()

    def register(self, p: nn.Parameter) -> None:
        """The next parameter of the constructor; from here on its memory counts."""
        name = self.cuts.order[self.count] if self.count < len(self.cuts.order) else None
        self.count += 1
        if name is not None and self.cuts.shapes[name] != p.shape:
            raise Unreadable(
                f"makes {name} of shape {list(p.shape)}, and not always: {list(self.cuts.shapes[name])} before"
            )
        key, layout = _storage(p), self.cuts.layouts[name] if name is not None else Layout()
        foreign = name in self.cuts.foreign
        if key in self.cells or (layout.is_whole and not foreign) or p.untyped_storage().nbytes() != p.nbytes:
            return
        self.cells[key] = CutParameter(p, layout, p.nbytes, foreign)
        self._make_room(self.cells[key])

    def _make_room(self, newest: CutParameter) -> None:
        """Close the others, the oldest first, until no more is open than the largest parameter has."""
        is_open = [cell for cell in self.cells.values() if cell.part is None]
        total = sum(cell.whole_bytes for cell in is_open)
        for cell in is_open:
            if total <= self.cuts.largest_bytes or cell is newest:
                continue
            cell.part = self._part(cell)
            cell.parameter.untyped_storage().resize_(0)
            total -= cell.whole_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        closed = [
            (x, cell) for x in given if (cell := self.cells.get(_storage(x))) is not None and cell.part is not None
        ]
        for x, cell in closed if not _is_view(func) else ():
            if x is not args[0] or x.nbytes != cell.whole_bytes or func.overloadpacket.__name__ not in OVERWRITES:
                raise Unreadable(f"reads a parameter that it has made before ({func})")
            cell.part = None
            cell.parameter.untyped_storage().resize_(cell.whole_bytes)
            self.cells[_storage(x)] = self.cells.pop(_storage(x))  # the newest
            self._make_room(cell)
        return func(*args, **(kwargs or {}))

    def _part(self, cell: CutParameter) -> torch.Tensor:
        whole = cell.parameter.detach()
        return whole.new_zeros(()).expand(whole.shape) if cell.foreign else self.cuts.part(whole, cell.layout)

    def finish(self) -> None:
        """All parameters become their parts."""
        for cell in self.cells.values():
            cell.parameter.data = cell.part if cell.part is not None else self._part(cell)
            self.cuts.done.add(id(cell.parameter))


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0


def _is_view(func: Any) -> bool:
    """Does an operator give nothing but other views of its arguments?"""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
