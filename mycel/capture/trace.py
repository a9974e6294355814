"""Tracing: the user's code runs once on tensors without data, and what it does becomes equations.

Two modes (`modes.py`) bring the tracer what the code does: torch functions as the user called them, and ATen operators.
Both look up a rule in `ops.RULES`; an ATen operator without a rule becomes an `opaque` equation.  Autograd is off:
dispatch starts below it.  What was traced so far is its record (`record.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.alias import Cell, view_cells
from mycel.capture.chosen_places import present_values
from mycel.capture.dynamic import FORMS, columns_of
from mycel.capture.facts import GIVEN
from mycel.capture.fence import here, refuse, refuse_dynamic, refuse_read
from mycel.capture.record import LARGEST_CONCRETE, ModuleCall, Record, Traced
from mycel.capture.rows import choose, counts_rows, places, put
from mycel.capture.schema import Schema, schema_of
from mycel.capture.state import Reachable
from mycel.capture.subscript import open_key
from mycel.errors import CaptureError, IRError, MisfitError
from mycel.ir import OPS, Type, Var, is_float
from mycel.ops import RULES, o
from mycel.ops.opaque import encode, output_mask
from mycel.ops.python_calls import PythonCall

PLAIN_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()  # not capturing
TRACING: list[Tracer] = []  # captures under way, all of them of one thread
CAPTURING = threading.RLock()  # of the thread that captures: it has torch do other things meanwhile
KEY = Var("key", Type(torch.int64, ()))
SPECIAL: dict[
    Any, Callable[..., Any]
] = {}  # ATen overloads that need more of the tracer than a rule can ask; filled by `modes`


# operators whose shapes are data, and what else does what they are used for
WITH_DATA = {
    "aten._pack_padded_sequence.default": (
        "pack_padded_sequence: the lengths decide its shape, and their values are not known while it is captured",
        "the padded sequences as they are, and the output at the last real place of each: "
        "out[torch.arange(len(x)), lengths - 1]",
    ),
}


class Patch:
    """An attribute of torch's or Python's that is another one while code is traced, or tried."""

    def __init__(self, owner: Any, name: str, traced: Any) -> None:
        self.owner, self.name, self.traced = owner, name, traced
        self.plain = vars(owner).get(name)  # None: it is inherited

    def set(self) -> None:
        setattr(self.owner, self.name, self.traced)

    def unset(self) -> None:
        if self.plain is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.plain)


def is_traced_here() -> bool:
    """Does this thread capture, rather than another beside it?"""
    return bool(TRACING) and TRACING[-1].thread == threading.get_ident()


class Tracer(Record):
    """Turns torch calls into equations of its record; knows module calls and random draws."""

    def __init__(self, device: torch.device, places: Reachable) -> None:
        super().__init__(device, places)
        self._arguments: list[torch.Tensor] = []  # of the rule that is applied
        self.thread = threading.get_ident()  # other threads run meanwhile, and what they do is not traced
        self.mode: Any = None  # the dispatch mode that feeds this tracer
        self.islands: dict[Any, BaseException] = {}  # calls that stay Python, by their keys, and why (`island.py`)
        self.is_strict = False  # no call may stay Python
        self.python_calls: list[PythonCall] = []  # those that were made
        self.samples: dict[Var, Any] = {}  # values they were tried on
        self.made_up = False  # were some of these made up?
        self.remembered: dict[Any, Any] = {}  # what functions under functools.cache gave
        self.leaves: list[Traced] = []  # tensors that ask for a gradient of their own (`autograd.py`)
        self.retained: list[Traced] = []  # others in which backward() is to leave one
        self.duals: dict[Var, Var | None] = {}  # values that code gave a tangent, or took it from (`autograd.py`)
        self.says_now = False  # is a function under functools.cache called, which is heard once?
        self.environment: dict[str, str | None] = {}  # variables of the process that the user's code read
        self.log_levels: dict[tuple[logging.Logger, int | None], int] = {}  # what the user's code asked of loggers
        self.patches: list[Patch] = []  # what torch has other code for while this is traced

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
                raise refuse(f"{_name(rule)}: {e}", "look at the shapes and dtypes of the operands") from e
            except AttributeError as e:
                if e.name is None or e.obj is not None:
                    raise
                what = f"{_name(rule)}: a tensor is asked for, None was given"
                raise refuse(what, "an argument that the call left out") from e
        return out

    def function(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A torch function as the user called it; NotImplemented leaves it to torch and the dispatch mode."""
        rule = RULES.get(func)
        if rule is None or self._autocast() or _wrapped_by_functorch(args):
            return NotImplemented
        before = len(self.eqns)
        with self._misfits(func, args, kwargs):
            try:
                out = self.apply(rule, args, kwargs)
            except CaptureError as e:
                known = self._read_numbers(args) if isinstance(e.__cause__, IRError) else args
                if all(a is b for a, b in zip(known, args, strict=True)):
                    raise
                self.undo(before)
                out = self.apply(rule, known, kwargs)
        if out is NotImplemented:
            self.undo(before)
            return NotImplemented
        return self.wrap(out)

    def _read_numbers(self, args: Sequence[Any]) -> list[Any]:
        """Arguments with the numbers that 0-dim tensors among them are known to be, or are facts: torch reads sizes and
        places of them."""
        read = list(args)
        for i, x in enumerate(args[1:], 1):
            if isinstance(x, torch.Tensor) and x.ndim == 0 and not x.is_floating_point() and not x.is_complex():
                value = self.fact(x)
                read[i] = x if value is None else int(value)
        return read

    @contextlib.contextmanager
    def _misfits(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
        """What is refused in here, and by torch with a RuntimeError too, may be caught as that."""
        before = len(self.eqns)
        try:
            yield
        except CaptureError as e:
            self.undo(before)
            if not e.chosen_at and _is_refused_by_torch(func, args, kwargs):
                raise MisfitError(e.what, file=e.file, line=e.line, text=e.text, hint=e.hint) from e
            raise

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
            if self.rows and counts_rows(func):
                self.refuse_rows([self.value(x) for x in tensors_in(args)], f"{func} asks for their number")
            with self.mode:
                return func.decompose(*args, **kwargs)
        if known.dynamic:
            return self._dynamic(func, args, kwargs)
        if known.strided:
            written = func is torch.ops.aten.as_strided_scatter.default  # what is written stands before the size
            args = (self._in_memory_order(args[0], *args[1 + written :]), *args[1:])
        if known.written and known.rule is None:
            return self._write(func, known, args, kwargs)
        if known.reads is not None:
            return self._ask(func, known.reads, args, kwargs)
        is_number = len(args) > 0 and isinstance(args[0], (list, tuple)) and not args[0]  # a size without dims
        if (device := kwargs.get("device")) is not None and not is_number:  # torch mixes numbers of any device
            self._check_device(torch.device(device))
        before = len(self.eqns)
        with self._misfits(func, args, kwargs):
            out = NotImplemented if known.rule is None else self.apply(known.rule, args, kwargs)
        if out is NotImplemented:
            self.undo(before)
            if known.mask_index and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
                rows = self._choose(args)
                if rows is not None:
                    return self.wrap(rows)
                return self.dispatch(func, (args[0], self._places(args[1]), *args[2:]), kwargs)
            if func in FORMS:
                return self._dynamic(func, args, kwargs)
            out = self._opaque(func, args, kwargs)
        if known.view_of is None:
            return self.wrap(out)
        return self._view(func, args, kwargs, before, out)

    def _ask(self, func: Any, read: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator that returns a Python value: computed of constants, else refused.  torch's own that return
        nothing are checks."""
        if not read:
            if func.namespace == "aten":
                return None
            raise refuse(
                f"{func} returns nothing: a program has values, not effects", "an operator that returns what it makes"
            )
        if func is torch.ops.aten.equal.default:
            with self.mode:
                return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())
        if func is torch.ops.aten.allclose.default:
            with self.mode:
                return bool(torch.isclose(*args, **kwargs).all())
        values = [self.fact(x) if isinstance(x, torch.Tensor) else x for x in args]
        if any(v is None for v, x in zip(values, args, strict=True) if x is not None):
            raise refuse_read(read, routed=self.has_choices())
        return func(*values, **kwargs)

    def _dynamic(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator whose shape depends on values: computed now if they are constants, or made for the numbers that
        the batch decides; else refused."""
        if func in FORMS and any(self.concrete(x) is None for x in tensors_in(args)):
            self.here()
            if func is torch.ops.aten.nonzero.default and self._may_choose(args[0]):
                self.picks_rows = True
                if any(eqn.op is o.topk for eqn in self.producers.values()):
                    self.expert_loops.add(self.source)
                with self:
                    return self.wrap(places(self, self.value(args[0]), self.source))
            with self:
                return self.wrap(FORMS[func](self, *args, **kwargs))
        if func is torch.ops.aten._unique2.default and self._may_choose(args[0]):
            self.here()
            present = present_values(self, *args)
            if present is not None:
                self.picks_rows = True
                return present
        values = torch.utils._pytree.tree_map(self._concrete_or_refuse(func), list(args))
        self.here()
        if (
            self.by_arguments
            and _has_gradient(func, values, kwargs)
            and any(self.concrete(x) is None for x in tensors_in(args))
        ):
            raise refuse(
                f"{func} has a shape that depends on the values of its input: computed of these, its result would have "
                "no gradient",
                "an operator of a static shape, detach(), or mycel.island around the code that calls it",
            )
        outs = func(*values, **kwargs)
        with self:
            return self.wrap(self.constant(outs) if isinstance(outs, torch.Tensor) else tuple(map(self.constant, outs)))

    def opened(self, x: torch.Tensor, key: Any) -> tuple[torch.Tensor, Any]:
        """The operand and key of a subscript, without integers that are tensors."""
        return open_key(x, key, lambda n: self.concrete(n) is None, self._select_at, self._window_at)

    def _window_at(self, x: torch.Tensor, key: slice, dim: int) -> torch.Tensor | None:
        """x[n : n + size] along a dim; None where the size is not known."""
        (start, first), (stop, last) = self._offset(key.start), self._offset(key.stop)
        if start is not stop or not 0 <= last - first <= x.shape[dim]:
            return None
        return self._viewed(x, lambda source: o.window_at(source, self.value(key.start), dim=dim, size=last - first))

    def _offset(self, n: torch.Tensor) -> tuple[Var, int]:
        """A number as another one and what is added to that."""
        var, more = self.cell(n).read(), 0
        while (eqn := self.producers.get(var)) is not None and eqn.op in (o.add, o.sub):
            base, step = eqn.inputs if isinstance(eqn.inputs[0], Var) else eqn.inputs[::-1]
            if not isinstance(base, Var) or type(step) is not int or (eqn.op is o.sub and base is not eqn.inputs[0]):
                break
            var, more = base, more + (step if eqn.op is o.add else -step)
        return var, more

    def _select_at(self, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        return self._viewed(x, lambda source: o.select_at(source, self.value(index), dim=dim))

    def _viewed(self, x: torch.Tensor, view: Callable[[Var], Any]) -> torch.Tensor:
        self.here()
        before, base = len(self.eqns), self.cell(x)
        with self:
            source = base.read()
            out = view(source)
        return Traced.make(view_cells(base, source, self.eqns[before:], [out])[0], self)

    def _places(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices with each mask replaced by the places where it holds."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            mask = self.concrete(index)
            if mask is None:
                places += columns_of(self, index)
                continue
            with self:
                places += [self.wrap(self.constant(p)) for p in mask.nonzero(as_tuple=True)]
        return places

    def _may_choose(self, mask: torch.Tensor) -> bool:
        """May rows be chosen by it without knowing how many: no fact can say it, and it was not tried in vain?"""
        source = here()[0]
        if source in self.plain_selects or mask.numel() == 0:
            return False
        known = self.kinds.get(self.cell(mask).read()) == GIVEN and source not in self.changing
        return not known and self.concrete(mask) is None

    def _choose(self, args: Sequence[Any]) -> Var | None:
        """x[mask], or x with x[mask] = rows, where the shape of what is chosen is not known; None where it is."""
        x, indices, *rest = args
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        value = self.value(rest[0]) if rest else None
        if len(given) != 1 or (value is not None and value not in self.rows):
            return None
        ((front, mask),) = given
        if value is None and not self._may_choose(mask):
            return None
        self.here()
        with self:
            if value is not None:
                return put(self, self.value(x), self.value(mask), front, value, bool(rest[1:] and rest[1]))
            self.picks_rows = True
            return choose(self, self.value(x), self.value(mask), front, self.source)

    def _concrete_or_refuse(self, func: Any) -> Callable[[Any], Any]:
        name = func._schema.name.split("::")[-1]

        def value(x: Any) -> Any:
            return self.asked(x, name) if isinstance(x, torch.Tensor) else x

        return value

    def asked(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The value that an operator of this name needs to know its shape."""
        value = self.fact(x)
        if value is None:
            raise refuse_dynamic(name, routed=self.has_choices())
        return value

    def has_choices(self) -> bool:
        """Does the code choose experts, as it seems: by a topk, or the largest with its place?"""
        return any(eqn.op in (o.topk, o.max_dim) for eqn in self.producers.values())

    def _view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], before: int, out: Any) -> Any:
        base = self.cell(args[0])
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        cells = view_cells(base, self.value(args[0]), self.eqns[before:], outs)
        whole = _meta(args[0])
        metas = func(whole, *args[1:], **kwargs)
        metas = metas if isinstance(metas, (list, tuple)) else [metas]
        memory = whole.untyped_storage()._cdata
        shared = [
            m.untyped_storage()._cdata == memory for m in metas
        ]  # reshape, contiguous and to copy where they must
        cells = [c if s else Cell(v) for c, s, v in zip(cells, shared, outs, strict=True)]
        views = [Traced.make(c, self, m.stride()) for c, m in zip(cells, metas, strict=True)]
        return type(out)(views) if isinstance(out, (list, tuple)) else views[0]

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

    def _put(self, cell: Cell, value: Var) -> None:
        """The value of a cell is now this one.  An update under torch.no_grad() changes values, not what the gradient
        of the tensor that holds them flows to."""
        root = cell.root
        before = root.read()
        cell.write(value)
        if torch.is_grad_enabled() or not is_float(before.dtype):
            return
        with torch.enable_grad():
            root.write(o.carry(root.read(), before))

    def _assign(self, func: Any, target: torch.Tensor, value: Var, resizes: bool) -> None:
        """The value of `target` is now `value`, in its dtype; an `out=` tensor of another shape takes that of the
        value."""
        cell = self.cell(target)
        if value.dtype != cell.var.dtype:
            value = o.cast(value, dtype=cell.var.dtype)
        if value.shape == cell.var.shape:
            self._put(cell, value)
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
        if others := self.shared.others(x):
            name, beside = (self.places.find(y)[0].name for y in (x, others[0]))
            error = refuse(
                f"{name} gets other memory (x.data = y), and {beside} shares the one that it has",
                f"{name}.copy_(y), which {beside} sees, or a clone() where {beside} is made",
            )
            error.final = True
            raise error
        with self:
            value = self.cell(other).read()
            if value.dtype != x.dtype:
                raise refuse(
                    f"a tensor that lives outside of the code becomes one of {value.dtype}; it is of {x.dtype}",
                    "calling the model once before, or model.to(dtype), so that tensors have the dtypes they keep",
                )
            cell = self.cell(x)
            if cell.parent is None and self.cell(other).root is not cell:
                cell.move()
            with torch.no_grad():
                self._assign(torch.ops.aten.set_data.default, x, value, resizes=False)

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
            if known.mask_index and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
                rows = self._choose(args)
                if rows is not None:
                    return rows
                return self._functional(func, (args[0], self._places(args[1]), *args[2:]), kwargs)
            out = self._opaque(func, args, kwargs)
        return out

    def _opaque(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            raise refuse(
                "a torch.Generator was passed to a random operator",
                "leave generator out: jit draws from torch's default generator",
            )
        self.here()
        with self:
            inputs: list[Any] = []
            coded = tuple(encode(self.value(a), inputs) for a in args)
            named = tuple((k, encode(self.value(v), inputs)) for k, v in kwargs.items() if v is not None)
            params = {"target": str(func), "args": coded, "kwargs": named}
            if not inputs and (known := self._of_no_tensor(func, args, kwargs)) is not None:
                return self.constant(known)
            try:
                if torch.Tag.nondeterministic_seeded in func.tags:
                    key, site = self.draw()
                    out = self.emit(OPS["opaque_random"], (key, *inputs), {**params, "site": site})
                else:
                    out = self.emit(OPS["opaque"], inputs, params)
            except (ValueError, IRError) as e:
                raise refuse(
                    *WITH_DATA.get(
                        str(func),
                        (f"{func}: {e}", "a different operator, or computing it outside of the captured function"),
                    )
                ) from e
        return _nest(func, args, out)

    def _of_no_tensor(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What a function of plain numbers makes (torch.hann_window(n)), unless it draws or is large."""
        if torch.Tag.nondeterministic_seeded in func.tags or len(func._schema.returns) != 1:
            return None
        with _disable_current_modes():
            value = func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        return value if isinstance(value, torch.Tensor) and value.numel() <= LARGEST_CONCRETE else None

    def _in_memory_order(
        self, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
    ) -> torch.Tensor:
        """Strides of the user mean the memory of x; a program has values in their own order: x with its dims in the
        order of memory, where that holds all that is asked for."""
        cell = self.cell(x)
        with self.mode:
            ordered = x.permute(sorted(range(x.ndim), key=lambda d: -x.stride()[d])) if not x.is_contiguous() else x
        last = (offset or 0) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        moved = offset is not None and cell.parent is not None
        if not ordered.is_contiguous() or last >= max(x.numel(), 1) or moved or cell.root.place is not None:
            raise refuse(
                "as_strided of an argument, of a part of a tensor, or beyond the tensor",
                "unfold or slices, or clone() before it",
            )
        return ordered

    def _check_device(self, device: torch.device) -> None:
        if device.type not in (self.device.type, "meta"):
            raise refuse(
                f"a tensor is moved to or made on {device} in a program on {self.device}",
                "one device for model, arguments and new tensors",
            )

    # -- modules --------------------------------------------------------------------------------------------

    def module_call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's __call__: what it does is one region."""
        parent = self.regions[-1]
        path = self.places.modules.get(id(module), ("", None))[0]
        region = ModuleCall(type(module).__name__, path, len(self.eqns), here()[0], parent.sites, module=id(module))
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
    tensors: list[torch.Tensor] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            tensors.append(v)
        elif isinstance(v, (list, tuple)):
            tensors.extend(tensors_in(v))
    return tensors


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _is_refused_by_torch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Does it raise a RuntimeError on tensors of these shapes?"""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            metas = torch.utils._pytree.tree_map(
                lambda x: _meta(x) if isinstance(x, torch.Tensor) else x, (list(args), kwargs)
            )
            func(*metas[0], **metas[1])
        except RuntimeError as e:
            return not isinstance(e, NotImplementedError)
        except Exception:
            return False
    return False


def _has_gradient(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Has torch a derivative of its results by tensors of these values?"""
    with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*PLAIN_KEYS), torch.enable_grad():
        given = [
            x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and is_float(x.dtype) else x
            for x in args
        ]
        inputs = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        outs = func(*given, **kwargs) if inputs else ()
        ends = [y for y in (outs if isinstance(outs, (list, tuple)) else (outs,)) if y.requires_grad]
        try:
            grads = torch.autograd.grad(ends, inputs, [*map(torch.ones_like, ends)], allow_unused=True) if ends else ()
        except RuntimeError:  # it has none
            return False
    return any(g is not None for g in grads)


def _nest(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Flat outputs of an opaque operator -> torch's result structure: one list return stays a list, and where
    `output_mask` asks for no output there is None."""
    returns = func._schema.returns
    if len(returns) == 1 and "List" in str(returns[0].type):
        return list(out) if isinstance(out, tuple) else [out]
    mask = output_mask(func, args)
    if mask is not None:
        rest = iter(out if isinstance(out, tuple) else (out,))
        return tuple(next(rest) if asked else None for asked in mask)
    return out


def _wrapped_by_functorch(args: Sequence[Any]) -> bool:
    return torch._C._functorch.maybe_current_level() is not None and any(
        torch._C._functorch.is_functorch_wrapped_tensor(x) for x in args if isinstance(x, torch.Tensor)
    )


def _name(rule: Callable[..., Any]) -> str:
    return getattr(rule, "__name__", str(rule)).strip("_") or "this operator"
