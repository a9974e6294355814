"""Tracing: the user's code runs once on tensors without data, and what it does becomes equations.

Two modes (`modes.py`) bring the tracer what the code does: torch functions as the user called them, and ATen operators.  Both look up a rule in
`ops.RULES`; an ATen operator without a rule becomes an `opaque` equation.  Autograd is off: dispatch starts below it.

    Traced      a tensor with shape, dtype, device and strides but no data; its `cell` holds its value, a Var
    Tracer      a Builder that turns torch calls into equations, and knows inputs, regions (module calls) and random draws
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.alias import Cell, view_cells
from mycel.capture.bounds import decide
from mycel.capture.fence import here, refuse, refuse_dynamic, refuse_read
from mycel.capture.schema import Schema, schema_of
from mycel.capture.state import Place, Places
from mycel.capture.subscript import open_key
from mycel.errors import CaptureError, IRError
from mycel.ir import CONTROL, OPS, Atom, Block, Builder, Eqn, Op, Type, Var, is_float, type_of
from mycel.ops import RULES, o
from mycel.ops.opaque import encode

LARGEST_CONCRETE = 1 << 20  # elements of a constant computed while tracing
TRACING: list[Tracer] = []  # captures under way
KEY = Var("key", Type(torch.int64, ()))


SPECIAL: dict[Any, Callable[..., Any]] = {}  # ATen overloads that need more of the tracer than a rule can ask; filled by `modes`


class Traced(torch.Tensor):
    """A tensor without data; its cell holds the Var that is its value."""

    cell: Cell
    tracer: Tracer
    weak: bool = False  # a Python number that control flow made a tensor: it gives way to the dtypes of other tensors

    @staticmethod
    def make(cell: Cell, tracer: Tracer, strides: Sequence[int] | None = None) -> Traced:
        t = cell.var.type
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Traced, t.shape, strides=strides, dtype=t.dtype, device=tracer.device
        )
        made.cell, made.tracer = cell, tracer
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CaptureError(
            f"{func} met a tensor of a capture that is over",
            hint="do not keep tensors in globals or lists across calls of a captured function; return them",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({self.cell.var})"


@dataclass
class Region:
    """One call of a module: its equations are [start, end); `site` is its place among the draws and calls of its parent."""

    name: str
    path: str
    start: int
    source: str = ""
    site: int = 0
    end: int = 0
    sites: int = 0
    children: list[Region] = field(default_factory=list)


class Tracer(Builder):
    """Collects what traced code does."""

    def __init__(self, device: torch.device, places: Places) -> None:
        super().__init__()
        self.device, self.places = device, places
        self.lifted: dict[int, tuple[torch.Tensor, Cell]] = {}
        self.state: list[tuple[Var, list[Place]]] = []
        self.consts: dict[str, torch.Tensor] = {}
        self.regions = [Region("main", "", 0)]
        self.draws = False
        self.frozen: set[int] = set()  # equations recorded under torch.no_grad()
        self.lines: list[tuple[int, str]] = []  # for each equation, how deep the user's frame is, and its line
        self.frame = 0
        self.made: dict[Var, Eqn] = {}
        self.running = True  # a capture inside another may use the outer one's tensors while that is under way
        self.blocks: dict[str, Block] = {}  # finished inner blocks: of control flow and of derivatives
        self.shapes: dict[Any, str] = {}  # blocks by what they are up to names
        self.closed: set[Var] = set()  # values of inner blocks that are finished: nothing outside may use them
        self.hints: dict[str, str] = {}  # names of what control flow gives back
        self.raised: BaseException | None = None  # the last exception of a raise statement in rewritten code
        self.numbers = False  # are there weak tensors?
        self.maybe: set[str] = set()  # variables that only one of two branches defines
        self._arguments: list[torch.Tensor] = []
        self.mode: Any = None  # the dispatch mode that feeds this tracer
        self.manual: list[Any] = []  # manual regions that are open (`region.py`)
        self.local: dict[Var, frozenset[str]] = {}  # values of closed ones that differ from rank to rank, and along which axes

    # -- values ---------------------------------------------------------------------------------------------

    def name(self, hint: str) -> str:
        """Names are numbers while tracing; readable ones are given at the end."""
        self._names["v"] = n = self._names.get("v", 0) + 1
        return f"v{n}"

    def append(self, op: Op, inputs: tuple[Atom, ...], params: dict[str, Any], types: Sequence[Type]) -> Any:
        for region in self.manual:
            inputs = region.given(inputs)
        return self.write(op, inputs, params, types)

    def write(self, op: Op, inputs: tuple[Atom, ...], params: dict[str, Any], types: Sequence[Type], outputs: tuple[Var, ...] = ()) -> Any:
        """Append an equation as it is."""
        if not torch.is_grad_enabled() and op not in CONTROL:  # what a branch or a loop computes is frozen inside; what it passes on is not
            self.frozen.add(len(self.eqns))
        self.lines.append((self.frame, self.source))
        out = super().append(op, inputs, params, types)
        if outputs:
            self.eqns[-1], out = replace(self.eqns[-1], outputs=outputs), outputs
        self.made.update((v, self.eqns[-1]) for v in self.eqns[-1].outputs)
        for region in self.manual:
            region.note(self.eqns[-1])
        return out

    def concrete(self, x: torch.Tensor) -> torch.Tensor | None:
        """The actual value of a traced tensor that depends on no input: computed now.  None if it does depend on one."""
        known: dict[Var, torch.Tensor] = {}

        def compute(var: Var) -> bool:
            if var in known:
                return True
            eqn = self.made.get(var)
            if eqn is None or eqn.op in CONTROL or eqn.op.effect or eqn.op.by_rank or var.type.numel > LARGEST_CONCRETE:
                return False
            if (answer := decide(eqn, self.made)) is not None:
                known[var] = torch.full(var.shape, answer)
                return True
            if not all(map(compute, eqn.vars)):
                return False
            if eqn.op.name == "const":
                known[var] = self.consts[eqn.params["name"]]
                return True
            args = [known[a] if isinstance(a, Var) else a for a in eqn.inputs]
            outs = eqn.op.kernel(*args, **eqn.params)
            known.update(zip(eqn.outputs, outs if isinstance(outs, (tuple, list)) else [outs], strict=True))
            return True

        var = self.cell(x).read()
        with _disable_current_modes():
            return known[var] if compute(var) else None

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
        """A tensor argument becomes an input; `apart`: also where the code reaches the same tensor by another way, that is another input."""
        self._check_tensor(tensor)
        var = Var(name, type_of(tensor))
        self.inputs.append(var)
        cell = Cell(var)
        cell.place = Place(name, "argument", None, None)
        self.lifted[-len(self.lifted) - 1 if apart else id(tensor)] = (tensor, cell)
        return Traced.make(cell, self, tensor.stride())

    def cell(self, tensor: torch.Tensor) -> Cell:
        """The cell of a traced tensor, or of a real one the code reached: that becomes an input."""
        if type(tensor) is Traced and tensor.tracer is self:
            if tensor.cell.var in self.closed:
                raise refuse("a tensor made in a branch or loop was used outside of it", "a variable, attribute or item that every branch assigns")
            if tensor.cell.var in self.local:
                axes = ", ".join(sorted(self.local[tensor.cell.var]))
                raise refuse(
                    f"a tensor that differs from rank to rank along {axes} was used outside of its manual region",
                    "comm.all_gather or comm.all_reduce inside, or a decorated function with outs=",
                )
            return tensor.cell
        if type(tensor) is Traced and not tensor.tracer.running:
            raise refuse("a tensor of another capture was used", "do not keep tensors across calls of captured functions")
        found = self.lifted.get(id(tensor))
        if found is None:
            found = self.lifted[id(tensor)] = (tensor, self._lift(tensor))
        return found[1]

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        """A program holds dense tensors of one device (0-dim ones may lie elsewhere, as in torch)."""
        _check_dense(tensor)
        kinds = {tensor.device.type, self.device.type} - {"meta"}
        if len(kinds) > 1 and tensor.ndim:
            raise refuse(f"a tensor on {tensor.device} was used in a program on {self.device}", "move model and arguments to one device")

    def _lift(self, tensor: torch.Tensor) -> Cell:
        self._check_tensor(tensor)
        places = self.places.find(tensor)
        taken = {v.name for v in self.inputs}
        base = name = places[0].name or "held"
        for i in range(1, 1_000_000):
            if name not in taken:
                break
            name = f"{base}_{i}"
        var = Var(name, type_of(tensor))
        self.inputs.append(var)
        self.state.append((var, places))
        cell = Cell(var)
        cell.place = places[0]
        return cell

    def value(self, x: Any) -> Any:
        """What a rule sees for an argument: Vars for tensors, containers opened."""
        if isinstance(x, torch.Tensor):
            return self.cell(x).read()
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

    # -- what operators' capture rules ask of their builder ------------------------------------------------------

    def draw(self) -> tuple[Var, int]:
        """The key and a site for one random equation; `repeats` passes each region its own key."""
        self.draws = True
        region = self.regions[-1]
        region.sites += 1
        return KEY, region.sites - 1

    def assign(self, target: Var, value: Var) -> None:
        """An in-place update made by a rule: of the tensor whose value is `target`."""
        for tensor in self._arguments:
            cell = self.cell(tensor)
            if cell.var is target or cell.var == target:
                return cell.write(value)
        raise IRError(f"assign: {target} is no argument of the rule")

    # -- calls ----------------------------------------------------------------------------------------------

    def apply(self, rule: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a rule on Vars; ValueErrors are the user's shapes that do not fit."""
        self.here()
        self._arguments = tensors_in((*args, *kwargs.values()))
        with self:
            try:
                vars_ = [self.value(a) for a in args]
                out = rule(*vars_, **{k: self.value(v) for k, v in kwargs.items()})
            except (ValueError, TypeError, IndexError, KeyError, IRError) as e:
                name = getattr(rule, "__name__", str(rule)).strip("_") or "this operator"
                raise refuse(f"{name}: {e}", "look at the shapes and dtypes of the operands") from e
        return out

    def function(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A torch function as the user called it; NotImplemented leaves it to torch and the dispatch mode."""
        rule = RULES.get(func)
        if rule is None or self._autocast() or _wrapped_by_functorch(args):
            return NotImplemented
        before = len(self.eqns)
        out = self.apply(rule, args, kwargs)
        if out is NotImplemented:
            self.undo(before)
            return NotImplemented
        return self.wrap(out)

    def _autocast(self) -> bool:
        """Under autocast torch itself must choose dtypes: functions go to the dispatch mode, after the casts."""
        return self.device.type != "meta" and torch.is_autocast_enabled(self.device.type)

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An ATen operator."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        known = schema_of(func)
        if known.rule is None and known.functional is None and func in SPECIAL:
            return SPECIAL[func](self, *args, **kwargs)
        if known.composite:
            with self.mode:
                return func.decompose(*args, **kwargs)
        if known.dynamic:
            return self._dynamic(func, args, kwargs)
        if known.strided:
            self._check_strided(args[0])
        if known.written and known.rule is None:
            return self._write(func, known, args, kwargs)
        if known.reads is not None:
            return self._ask(func, known.reads, args, kwargs)
        if (device := kwargs.get("device")) is not None:
            self._check_device(torch.device(device))
        before = len(self.eqns)
        out = NotImplemented if known.rule is None else self.apply(known.rule, args, kwargs)
        if out is NotImplemented:
            self.undo(before)
            if known.mask_index and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
                return self.dispatch(func, (args[0], self._places(args[1])), kwargs)
            out = self._opaque(func, args, kwargs)
        if known.view_of is None:
            return self.wrap(out)
        return self._view(func, args, kwargs, before, out)

    def _ask(self, func: Any, read: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator that returns a Python value: computed of constants, else refused.  torch's own that return nothing are checks."""
        if not read:
            if func.namespace == "aten":
                return None
            raise refuse(f"{func} returns nothing: a program has values, not effects", "an operator that returns what it makes")
        values = [self.concrete(x) if isinstance(x, torch.Tensor) else x for x in args]
        if any(v is None for v, x in zip(values, args, strict=True) if x is not None):
            raise refuse_read(read)
        return func(*values, **kwargs)

    def _dynamic(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator whose shape depends on values: computed now if they are constants, else refused."""
        values = torch.utils._pytree.tree_map(self._concrete_or_refuse(func), list(args))
        self.here()
        outs = func(*values, **kwargs)
        with self:
            return self.wrap(self.constant(outs) if isinstance(outs, torch.Tensor) else tuple(map(self.constant, outs)))

    def opened(self, x: torch.Tensor, key: Any) -> tuple[torch.Tensor, Any]:
        """The operand and key of a subscript, without integers that are tensors."""
        return open_key(x, key, lambda n: self.concrete(n) is None, self._select_at)

    def _select_at(self, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        self.here()
        before, base = len(self.eqns), self.cell(x)
        with self:
            source = base.read()
            out = o.select_at(source, self.value(index), dim=dim)
        return Traced.make(view_cells(base, source, self.eqns[before:], [out])[0], self)

    def _places(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices with each mask, which must be a constant, replaced by the places where it holds."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            mask = self.concrete(index)
            if mask is None:
                raise refuse_dynamic("indexing with a boolean mask")
            with self:
                places += [self.wrap(self.constant(p)) for p in mask.nonzero(as_tuple=True)]
        return places

    def _concrete_or_refuse(self, func: Any) -> Callable[[Any], Any]:
        name = func._schema.name.split("::")[-1]

        def value(x: Any) -> Any:
            known = self.concrete(x) if isinstance(x, torch.Tensor) else x
            if known is None and x is not None:
                raise refuse_dynamic(name)
            return known

        return value

    def _view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], before: int, out: Any) -> Any:
        base = self.cell(args[0])
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        cells = view_cells(base, self.value(args[0]), self.eqns[before:], outs)
        whole = _meta(args[0])
        metas = func(whole, *args[1:], **kwargs)
        metas = metas if isinstance(metas, (list, tuple)) else [metas]
        memory = whole.untyped_storage()._cdata
        shared = [m.untyped_storage()._cdata == memory for m in metas]  # reshape, contiguous and to copy where they must
        cells = [c if s else Cell(v) for c, s, v in zip(cells, shared, outs, strict=True)]
        made = [Traced.make(c, self, m.stride()) for c, m in zip(cells, metas, strict=True)]
        return type(out)(made) if isinstance(out, (list, tuple)) else made[0]

    def _write(self, func: Any, known: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`x.add_(y)`: the functional operator, then its result becomes the value of x (in x's dtype and shape)."""
        if known.functional is None:
            raise refuse(f"{func} updates a tensor in place and has no functional form", "the out-of-place operator")
        if torch.Tag.inplace_view in func.tags and (type(args[0]) is not Traced or args[0].cell.place is None):
            return self._turn(func, known, args, kwargs)
        targets = [args[i] if i < len(args) else kwargs[n] for i, n in known.written]
        kwargs = {k: v for k, v in kwargs.items() if k not in known.outs}
        out = self._functional(known.functional, args, kwargs)
        values = list(out) if isinstance(out, (list, tuple)) else [out]
        self.here()
        for target, value in zip(tensors_in(targets), values, strict=False):
            with self:
                self._assign(func, target, value, resizes=bool(known.outs))
        count = len(func._schema.returns)
        return None if count == 0 else targets[0] if count == 1 else tuple(targets)

    def _carrying(self, old: Var, new: Var) -> Var:
        """An update under torch.no_grad() changes the value of a tensor, not what its gradient flows to."""
        if torch.is_grad_enabled() or not is_float(new.dtype) or old.type != new.type:
            return new
        with torch.enable_grad():
            return o.carry(new, old)

    def _assign(self, func: Any, target: torch.Tensor, value: Var, resizes: bool) -> None:
        """The value of `target` is now `value`, in its dtype; an `out=` tensor of another shape takes that of the value."""
        cell = self.cell(target)
        if value.dtype != cell.var.dtype:
            value = o.cast(value, dtype=cell.var.dtype)
        if value.shape == cell.var.shape:
            cell.write(self._carrying(cell.read(), value))
        elif resizes and type(target) is Traced and cell.place is None and cell.parent is None:
            self._become(target, Traced.make(Cell(value), self))
        else:
            name = func._schema.name.split("::")[-1]
            raise refuse(
                f"{name} writes a result of shape {list(value.shape)} into a tensor of shape {list(cell.var.shape)}",
                "the out-of-place operator, or a tensor of the result's shape",
            )

    def _turn(self, func: Any, known: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`x.t_()`: the tensor itself becomes the view."""
        if type(args[0]) is not Traced or schema_of(known.functional).view_of is None:
            raise refuse(f"{func} changes the shape of a tensor in place", "the out-of-place operator")
        self._become(args[0], self.dispatch(known.functional, args, kwargs))
        return args[0]

    def rebind(self, x: torch.Tensor, other: torch.Tensor) -> None:
        """`x.data = other`: x becomes `other`; state from outside takes its value."""
        self.here()
        if type(x) is Traced and type(other) is Traced and x.cell.place is None:
            return self._become(x, other)
        with self:
            self._assign(torch.ops.aten.set_data.default, x, self.cell(other).read(), resizes=False)

    def _become(self, x: Traced, other: Traced) -> None:
        """From here on x is the same tensor as `other`."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            torch.Tensor.data.__set__(x, other)  # type: ignore[attr-defined]
        x.cell = other.cell

    def _functional(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        known = schema_of(func)
        before = len(self.eqns)
        out = NotImplemented if known.rule is None else self.apply(known.rule, args, kwargs)
        if out is NotImplemented:
            self.undo(before)
            out = self._opaque(func, args, kwargs)
        return out

    def _opaque(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            raise refuse("a torch.Generator was passed to a random operator", "leave generator out: jit draws from torch's default generator")
        self.here()
        with self:
            inputs: list[Any] = []
            coded = tuple(encode(self.value(a), inputs) for a in args)
            named = tuple((k, encode(self.value(v), inputs)) for k, v in kwargs.items() if v is not None)
            params = {"target": str(func), "args": coded, "kwargs": named}
            try:
                if torch.Tag.nondeterministic_seeded in func.tags:
                    key, site = self.draw()
                    out = self.emit(OPS["opaque_random"], (key, *inputs), {**params, "site": site})
                else:
                    out = self.emit(OPS["opaque"], inputs, params)
            except (ValueError, IRError) as e:
                raise refuse(f"{func}: {e}", "a different operator, or computing it outside of the captured function") from e
        return _nest(func, out)

    def _check_strided(self, x: torch.Tensor) -> None:
        """Strides of the user mean the memory of x; a program has values in their own order, so both must be the same."""
        cell = self.cell(x)
        if not x.is_contiguous() or cell.parent is not None or cell.place is not None:
            raise refuse("as_strided of an argument, a view or a tensor that is not contiguous", "unfold or slices, or clone() before it")

    def _check_device(self, device: torch.device) -> None:
        if device.type not in (self.device.type, "meta"):
            raise refuse(f"a tensor is moved to or made on {device} in a program on {self.device}", "one device for model, arguments and new tensors")

    # -- modules --------------------------------------------------------------------------------------------

    def module_call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's __call__: what it does is one region."""
        parent = self.regions[-1]
        path = self.places.modules.get(id(module), ("", None))[0]
        region = Region(type(module).__name__, path, len(self.eqns), here()[0], parent.sites)
        parent.sites += 1
        parent.children.append(region)
        self.regions.append(region)
        try:
            return call(module, *args, **kwargs)
        finally:
            self.regions.pop()
            region.end = len(self.eqns)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments, lists opened."""
    found: list[torch.Tensor] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            found.append(v)
        elif isinstance(v, (list, tuple)):
            found.extend(tensors_in(v))
    return found


def _check_dense(x: torch.Tensor) -> None:
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout).split(".")[-1]
        raise refuse(f"a {kind} tensor was used; a program has dense tensors", "to_dense(), or computing it outside of the function")


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _nest(func: Any, out: Any) -> Any:
    """Flat outputs of an opaque operator -> torch's result structure (one list return stays a list)."""
    returns = func._schema.returns
    if len(returns) == 1 and "List" in str(returns[0].type):
        return list(out) if isinstance(out, tuple) else [out]
    return out


def _wrapped_by_functorch(args: Sequence[Any]) -> bool:
    return torch._C._functorch.maybe_current_level() is not None and any(
        torch._C._functorch.is_functorch_wrapped_tensor(x) for x in args if isinstance(x, torch.Tensor)
    )
