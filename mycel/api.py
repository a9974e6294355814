"""The pipeline in the open: capture, a plain list of passes, code.

program = mycel.capture(fn, *args)     what the code is, as a Program
fast    = mycel.jit(fn)                captured once for each signature, simplified, generated, run
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel import transform
from mycel.capture import (
    CAPTURING,
    MISS,
    TRACING,
    Captured,
    bind,
    differentiate_with,
    growing,
    is_static_cache,
    is_traced_here,
    make_room,
    refuse_mixed_products,
    rewritten,
)
from mycel.capture import capture as capture_call
from mycel.changing_values import CompiledValues
from mycel.errors import RunError, warn
from mycel.growing_cache import StaticTwins, can_have_twin, takes_twin, with_twin
from mycel.ir import Program, Var, check, type_of
from mycel.ops import o
from mycel.ops.product_speed import slow_products
from mycel.run import interpret, is_small, load, not_finite, replayed_call, wide_calls

MODES = ("graph", "eager")
differentiate_with(transform.value_and_grad, transform.jvp)


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program of one call, as written: no pass has touched it.  It stands for itself: code that would have to stay
    Python (an island) is refused."""
    return capture_call(unjit(fn), args, kwargs, strict=True).program


def jit(fn: Any = None, *, mode: str = "graph", check_finite: bool = False, strict: bool = False) -> Any:
    """A function, module or Program that runs as generated code (mode="eager": equation by equation), with the same
    call signature.

    `check_finite` runs equation by equation and names the first operator and source line that made a NaN or infinity.
    `strict` refuses what cannot be captured; without it the smallest call around that stays Python, with a warning.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: use one of {', '.join(map(repr, MODES))}")
    if fn is None:
        return functools.partial(jit, mode=mode, check_finite=check_finite, strict=strict)
    if isinstance(fn, Program):
        return _program_function(fn, mode)
    if not callable(fn):
        raise TypeError(f"mycel.jit takes a function, a module or a Program, not {type(fn).__name__}")
    return Jit(unjit(fn), mode, check_finite, strict)


@dataclass(frozen=True)
class CompiledCall:
    """One captured signature: what it became, the guarded call, and the guards alone."""

    captured: Captured
    program: Program
    source: str
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    fits: Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Jit:
    """A callable that captures once for each signature: shapes, dtypes, device, static values, train mode."""

    def __init__(self, fn: Callable[..., Any], mode: str, check_finite: bool = False, strict: bool = False) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: use one of {', '.join(map(repr, MODES))}")
        self.fn, self.mode, self.check_finite, self.strict = fn, mode, check_finite, strict
        self.entries: list[CompiledCall] = []
        self._told = False  # that a cache grows
        self._twins = StaticTwins()  # of caches that grow
        self._forward: Jit | None = None  # of a module that generates
        self._compiled_values = CompiledValues(getattr(fn, "__name__", type(fn).__name__), "call")
        self._last: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda args, kwargs: MISS
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if TRACING and is_traced_here():
            return rewritten(self.fn)(*args, **kwargs)  # part of the program that is being captured
        out = self._last(args, kwargs)
        return self._other(args, kwargs) if out is MISS else out

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for cache in growing(args, kwargs):
            if takes_twin(self.fn, cache, args, kwargs):
                return with_twin(self, self.fn, self._twins, args, kwargs)
            return self._as_it_is(cache, args, kwargs)
        for entry in self.entries:
            out = entry.call(args, kwargs)
            if out is not MISS:
                self._last = entry.call
                return out
        with CAPTURING:  # another thread may have captured it meanwhile
            self._last = self.entry_for(args, kwargs).call
            self._compiled_values.add(args, kwargs)
        out = self._last(args, kwargs)
        if out is MISS:
            raise RunError(f"{self.fn!r} was captured for these arguments, yet they do not fit what was captured")
        return out

    def _as_it_is(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call with a cache that no program takes; said once, unless it is the call that fills one for those that
        follow."""
        begins = type(cache).__name__ == "StaticCache" or (
            can_have_twin(self.fn, cache) and not torch.is_grad_enabled()
        )
        if not begins and not self._told:
            self._told = True
            name = type(cache).__name__
            what = f"a {name} grows at every call: what is given one runs as it is"
            hint = 'mycel.jit(model).generate(…), or cache_implementation="static"'
            if can_have_twin(self.fn, cache):
                what = f"where autograd records, what is given a {name} runs as it is"
                hint = "torch.no_grad() around it"
            if name == "EncoderDecoderCache":
                what = f"an {name} is no input of a program: what is given one runs as it is"
                hint = "mycel.jit of the encoder, or of the loss; text is written as without jit"
            warn(f"{what}\n  try       {hint}")
        rows = max((_rows(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), default=0)
        with wide_calls(getattr(self.fn, "__self__", self.fn), rows):
            return self.fn(*args, **kwargs)

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        entry = self.compile(args, kwargs)
        make_room(self.entries, lambda e: e.captured.facts, entry.captured.facts, oldest=0)
        self.entries.append(entry)
        return entry

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        """capture -> simplify -> fuse -> generate -> bind: the whole way of one call."""
        captured = capture_call(self.fn, args, kwargs, strict=self.strict)
        return compile_captured(captured, self.mode, self.check_finite)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that runs for these arguments."""
        return self.entry_for(args, kwargs).program

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Python that runs for these arguments."""
        return self.entry_for(args, kwargs).source

    def entry_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        """What runs for these arguments, captured where it is not there yet."""
        for entry in self.entries:
            if entry.fits(args, kwargs) is not MISS:
                return entry
        return self._entry(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "fn" not in self.__dict__:
            raise AttributeError(name)
        attribute = getattr(self.fn, name)
        if name == "generate" and isinstance(self.fn, torch.nn.Module):
            return functools.partial(self._generate, attribute)
        if getattr(attribute, "__self__", None) is not self.fn:
            return attribute

        @functools.wraps(attribute)
        def method(*args: Any, **kwargs: Any) -> Any:
            # module.eval() and its like return the module: here the jitted one
            out = attribute(*args, **kwargs)
            return self if out is self.fn else out

        return method

    def _generate(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, each token by generated code: with a static cache, unless another is asked for."""
        module = self.fn
        assert isinstance(module, torch.nn.Module)
        config = kwargs.get("generation_config") or module.generation_config
        asked = {name: kwargs.get(name, getattr(config, name, None)) for name in ("use_cache", *OTHER_CACHES)}
        own = asked.pop("use_cache") is False or any(x is not None and x is not False for x in asked.values())
        if not own and getattr(module, "_can_compile_fullgraph", False):
            kwargs |= {"cache_implementation": "static"}
            kwargs.setdefault("disable_compile", True)
        self._forward = self._forward or Jit(module.forward, self.mode, self.check_finite, self.strict)
        before = vars(module).get("forward")
        vars(module)["forward"] = self._forward
        try:
            return plain(*args, **kwargs)
        finally:
            del vars(module)["forward"]
            if before is not None:
                vars(module)["forward"] = before

    def __get__(self, thing: Any, owner: Any = None) -> Any:
        """As a method of a class."""
        return self if thing is None else functools.partial(self, thing)

    def __repr__(self) -> str:
        return f"mycel.jit({self.fn!r})"


# what `generate` is asked for where its cache is another, or has to forget what was guessed wrong
OTHER_CACHES = (
    "past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit",
    "use_mtp",
)  # fmt: skip


def _rows(x: torch.Tensor) -> int:
    """Of a batch of ids, or of rows of numbers."""
    return x.numel() // max(x.shape[-1], 1) if x.is_floating_point() and x.ndim else x.numel()


def compile_captured(
    captured: Captured, mode: str, check_finite: bool = False, around: Callable[[Any], Any] = lambda run: run
) -> CompiledCall:
    """A captured call, simplified and made to run; `around` wraps the function that runs."""
    program = refuse_mixed_products(transform.simplify(captured.program))
    program = check(transform.fuse(program, recorded=True))
    run, source = _runner(program, captured.device, mode, check_finite)
    captured = replace(captured, program=program)
    return CompiledCall(captured, program, source, *bind(captured, around(run)))


def graph_run(program: Program, device: torch.device, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The program's code for when torch's autograd records, and for when it does not: then memory is used again, and on
    a GPU it is replayed."""
    lean = unrecorded_run(check(transform.fuse(program)), device)

    def run(*inputs: Any) -> Any:
        return plain(*inputs) if torch.is_grad_enabled() else lean(*inputs)

    return run


def unrecorded_run(program: Program, device: torch.device) -> Callable[..., Any]:
    """A fused program's code for when torch's autograd does not record."""
    program = _as_fast(check(transform.few_rows(program)), device) if device.type == "cpu" else program
    return _donating(program, device) if program.updates else _lean(program, device)


def one_block(program: Program) -> Program:
    """All that runs in the entry; what its blocks had in common is computed once."""
    whole = transform.inline(program, small=sum(len(b.eqns) for b in program.blocks.values()))
    return check(transform.dce(transform.cse(whole)))


def _donating(program: Program, device: torch.device) -> Callable[..., Any]:
    """The code that writes updates into its inputs as it goes, where they need not wait for the end of the call (a
    cache of keys and values); blocks that write so become part of the entry, which knows whose memory it is."""
    written = [name for name, b in program.blocks.items() if any(e.op.inplace is not None for e in b.eqns)]
    if written and written != [program.entry]:
        program = one_block(program)
    position = {v.name: i for i, v in enumerate(program.inputs)}
    at = [position[name] for name in program.updates]
    results = program.results
    new = dict(zip(program.main.outputs[len(results) :], at, strict=True))
    # a result that is the new value of an input is that input, and no copy of it
    kept = [i for i, x in enumerate(results) if not (isinstance(x, Var) and x in new)]
    outputs = (*(results[i] for i in kept), *program.main.outputs[len(results) :])
    block = replace(program.main, outputs=outputs)
    program = replace(program, blocks={**program.blocks, program.entry: block})
    code = _lean(program, device, donate=True)
    if len(kept) == len(results):
        return lambda *inputs: (*code(*inputs), *(inputs[i] for i in at))
    replaced = {i: new[x] for i, x in enumerate(results) if isinstance(x, Var) and x in new}

    def run(*inputs: Any) -> tuple[Any, ...]:
        rest = iter(code(*inputs))
        whole = [inputs[replaced[i]] if i in replaced else next(rest) for i in range(len(results))]
        return (*whole, *(inputs[i] for i in at))

    return run


def _lean(program: Program, device: torch.device, donate: bool = False) -> Callable[..., Any]:
    """Code for when nothing is recorded; beside products of a few rows, as each token of a text needs them, what is
    small is in C."""
    native: list[str] = []
    if any(eqn.op in (o.linear_few_rows, o.linear_rounded) for eqn in program.main.eqns):
        program, native = transform.small_blocks(program, is_small)
    code, _ = load(check(program), device, reuse=True, donate=donate, native=native)
    return replayed_call(code, program, device)


def compile_program(program: Program, device: torch.device, mode: str) -> Callable[..., Any]:
    """A program, simplified and made to run on its inputs in order."""
    return _runner(check(transform.fuse(transform.simplify(program))), device, mode)[0]


def _runner(
    program: Program, device: torch.device, mode: str, check_finite: bool = False
) -> tuple[Callable[..., Any], str]:
    recorded = _as_fast(check(transform.recordable(program)), device)
    run, source = load(recorded, device)
    run = graph_run(program, device, _keeping(program, run))
    if check_finite or mode == "eager":
        hook = not_finite if check_finite else None
        return _keeping(program, lambda *inputs: interpret(recorded, inputs, hook)), source
    return run, source


def _as_fast(program: Program, device: torch.device) -> Program:
    """With products as wide as the device is fast in."""
    return check(transform.wide_products(program, slow_products(device, transform.halves(program))))


def _keeping(program: Program, run: Callable[..., Any]) -> Callable[..., Any]:
    """Where torch's autograd records, inputs that get new values after the call are copied: backward asks for the old
    ones."""
    updated = set(program.updates)
    at = [v.name in updated for v in program.inputs]
    if not updated:
        return run

    def keeping(*inputs: Any) -> Any:
        if torch.is_grad_enabled():
            inputs = tuple(x.clone() if is_updated else x for x, is_updated in zip(inputs, at, strict=True))
        return run(*inputs)

    return keeping


def _program_function(program: Program, mode: str) -> Callable[..., Any]:
    """A program as a function of its inputs, in order or by name; returns a tuple of its results and updates inputs in
    place."""
    loaded: dict[torch.device, Callable[..., Any]] = {}
    ready = check(transform.fuse(transform.simplify(program), recorded=True))

    def run(*args: torch.Tensor, **named: torch.Tensor) -> tuple[Any, ...]:
        inputs = _match_inputs(program, args, named)
        device = inputs[0].device if inputs else torch.device("cpu")
        if device not in loaded:
            loaded[device], _ = _runner(ready, device, mode)
        outs = loaded[device](*inputs)
        n = len(outs) - len(program.updates)
        by_name = {v.name: x for v, x in zip(program.inputs, inputs, strict=True)}
        with torch.no_grad():
            for name, new in zip(program.updates, outs[n:], strict=True):
                by_name[name].copy_(new)
        return tuple(outs[:n])

    return run


def _match_inputs(
    program: Program, args: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    rest = [v for v in program.inputs[len(args) :] if v.name not in named]
    unknown = named.keys() - {v.name for v in program.inputs[len(args) :]}
    if rest or unknown or len(args) > len(program.inputs):
        lacking = ", ".join(map(repr, rest)) or "none"
        raise RunError(
            f"the program takes {len(program.inputs)} inputs, was given {len(args)} in order and {len(named)} by name\n"
            f"  missing   {lacking}\n  unknown   {', '.join(sorted(unknown)) or 'none'}"
        )
    inputs = [*args, *(named[v.name] for v in program.inputs[len(args) :])]
    for var, x in zip(program.inputs, inputs, strict=True):
        if not isinstance(x, torch.Tensor) or type_of(x) != var.type:
            raise RunError(
                f"input {var.name} is {type_of(x) if isinstance(x, torch.Tensor) else type(x).__name__}, the program "
                f"takes {var.type}"
            )
    return inputs


def unjit(fn: Any) -> Any:
    return fn.fn if type(fn) is Jit else fn


__all__ = [
    "CompiledCall",
    "Jit",
    "capture",
    "compile_captured",
    "compile_program",
    "graph_run",
    "is_static_cache",
    "jit",
    "unjit",
]
