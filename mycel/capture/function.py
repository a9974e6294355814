"""Capture of one call: a function or module and its arguments -> a Program and how to call it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.arguments import (
    ArgumentObjects,
    argument_paths,
    check_arguments,
    device_of,
    input_roles,
    trace_arguments,
)
from mycel.capture.copied_weights import warn_of_copies
from mycel.capture.counters import (
    CHANGES,
    Slot,
    is_counter,
    lift_counters,
    note_changes,
    refuse_counters,
)
from mycel.capture.counters import MOST as MOST_CHANGES
from mycel.capture.expert_loops import may_have_loops, merged_loops
from mycel.capture.facts import CHANGING, Facts
from mycel.capture.fence import opened, refuse, refuse_read
from mycel.capture.hooks import hook_parameters
from mycel.capture.island import ROOT, boundary, next_island, refusal
from mycel.capture.kept_lists import KeptLists, refuse_additions
from mycel.capture.locations import Guarded, Location, is_there
from mycel.capture.masked_experts import warn_of_masks
from mycel.capture.rebound import cleared_grads, copied, effects_of, rebound_slots, restore, toggles, undo, updates_of
from mycel.capture.record import Traced
from mycel.capture.repeats import assemble
from mycel.capture.rows import warn_of_experts
from mycel.capture.shared_memory import Inside
from mycel.capture.slot_holders import GONE, owner
from mycel.capture.state import Reachable
from mycel.capture.structures import Structures
from mycel.capture.syntax import drawn_state, enter, refuse_draws
from mycel.capture.syntax.printing import with_texts
from mycel.capture.trace import CAPTURING, TRACING, Tracer
from mycel.capture.tracing import traced_by
from mycel.capture.tree import Tree, flatten, flatten_arguments
from mycel.capture.unfollowed import UntouchedObjects
from mycel.errors import CaptureError, PlanError
from mycel.ir import Program, Role, Var, check, prune, walk
from mycel.ops import o
from mycel.ops.python_calls import PythonCall


@dataclass(frozen=True)
class Captured:
    """A program and its calling convention.

    The program's inputs are, in any order: the tensors of the arguments, `state` (where each other tensor lives;
    several places for tied ones) and the random key; their roles say which is which.  Its results are the tensors of
    `out`, then those of `effects` (slots that are rebound); its updates are written into their inputs.
    """

    program: Program
    arguments: Tree
    leaves: tuple[str, ...]  # for each tensor of the arguments, the name of its input
    state: Mapping[str, tuple[Location, ...]]  # by name of the input
    out: Tree
    effects: tuple[tuple[Location, Tree], ...]
    modules: tuple[torch.nn.Module, ...]
    links: tuple[Guarded, ...]  # objects that must still be where they were
    statics: tuple[Guarded, ...]  # plain values that must be what they were
    sizes: tuple[tuple[Any, int], ...]  # containers that must hold as much as they did
    devices: Mapping[str, torch.device | None]  # of the inputs but the key, by name; None: any
    device: torch.device
    differentiated: bool = False  # hooks on parameters are part of the program
    facts: tuple[Facts, ...] = ()  # values of the inputs that decided what the program is
    aliases: tuple[tuple[str, Location], ...] = ()  # arguments (their inputs) that are also reached by other ways
    recorded: tuple[tuple[list[torch.Tensor], bool], ...] = ()  # does torch record gradients of these?
    recorded_arguments: tuple[tuple[str, bool], ...] = ()  # … and of these arguments (their inputs)?
    grad_mode: bool = True  # did the caller record gradients?
    islands: tuple[PythonCall, ...] = ()  # what the program runs as plain Python
    environment: tuple[tuple[str, str | None], ...] = ()  # variables of the process that must be what they were
    log_levels: tuple[tuple[logging.Logger, int | None, int], ...] = ()  # … and of loggers: level, is it enabled?
    copies: frozenset[int] = frozenset()  # results that are copies of what lives on: by their places
    inside: tuple[Inside, ...] = ()  # tensors that must lie in the memory of others as they did


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    apart: bool = False,
    known: Mapping[int, Role] | None = None,
    differentiated: bool = False,
    data: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    strict: bool = False,
    by_arguments: bool = False,
) -> Captured:
    """Run `fn` once on tensors without data; once more where libraries are to be rewritten, or a call is to stay
    Python.

    apart           an argument is not the same input as an equal tensor the code reaches otherwise
    known           roles of tensors the code reaches, by id, where the caller has better names than the way on which
                    they are reached
    differentiated  the caller takes the gradient, not torch: hooks on parameters become part of the program
    data            the arguments, where those to trace are without data: what decides (`facts.py`) is read there
    strict          what cannot be captured is refused, and does not become an island (`island.py`)
    by_arguments    the gradient may be taken by any of the arguments
    """
    with CAPTURING, paused():
        islands = dict(TRACING[-1].islands) if TRACING else {}  # an inner capture leaves it to the outer to find more
        selects = set(TRACING[-1].plain_selects) if TRACING else set()
        changing = TRACING[-1].changing if TRACING else frozenset(CHANGING)
        changed: set[str] = set()
        followed: frozenset[int] = frozenset()
        follows = True
        counters = frozenset(slot for slot, n in CHANGES.items() if n > 1) if not TRACING else frozenset()
        lifts = not TRACING
        joins = False
        live: frozenset[Slot] = frozenset()
        while True:
            before = opened()
            try:
                given = data or (args, kwargs)
                once = functools.partial(
                    _capture, fn, args, kwargs, apart, known or {}, differentiated, given, islands, selects,
                    counters=counters if lifts else None, followed=followed, joins=joins, live=live, strict=strict,
                    by_arguments=by_arguments,
                )  # fmt: skip
                return _settled(_as_experts(once, changing)) if not TRACING else once(changing=changing)
            except CaptureError as e:
                error: Exception = e
                if e.shared and not joins:  # once more with what shares memory as views
                    joins = True
                    continue
                if e.live - live and lifts:  # once more with these left to Python
                    live |= e.live
                    counters -= live
                    continue
                if e.counters - counters - live and lifts:  # once more with these as numbers of the program
                    counters |= e.counters - live
                    continue
                if e.looked_at and follows:  # not so, then
                    follows, followed = False, frozenset()
                    continue
                if follows and e.added_to - followed:  # once more with these as lists that are added to
                    followed |= e.added_to
                    continue
                if e.changes_at and not TRACING and e.changes_at not in changed:  # once more as a value not known
                    changed.add(e.changes_at)
                    changing |= {e.changes_at}
                    continue
                if opened() != before:  # what decides on tensors is rewritten now
                    continue
            except PlanError:  # what is wrong about a mesh, plain Python would not see
                raise
            except Exception as e:
                error = e
            chosen_at = getattr(error, "chosen_at", "")
            if chosen_at and not TRACING and chosen_at not in selects:  # once more without that
                selects.add(chosen_at)
                continue
            if counters and lifts and (strict or max(CHANGES[slot] for slot in counters) < MOST_CHANGES):
                lifts = False  # Python needs their values: once more for these
                continue
            if strict or TRACING or not next_island(islands, error):
                if not changing or TRACING:
                    raise refusal(error) from error.__cause__
                changing = frozenset()  # then for each of the values
                islands.clear()


def _as_experts(capture: Callable[..., Captured], changing: frozenset[str]) -> Callable[[], Captured]:
    """How code is captured whose choice of experts comes with the batch (a hash of tokens): for the numbers of tokens
    that each expert gets now, which are others in every batch; but without asking for them where one line asks for
    several, and what it picks rows for is a layer of experts."""

    def once() -> Captured:
        nonlocal changing
        captured = capture(changing=changing)
        lines = [line for facts in captured.facts for line in facts.sources]
        if len(lines) > len(set(lines)):
            with contextlib.suppress(Exception):
                whatever = changing | {*lines}
                layers = capture(changing=whatever)
                if not layers.facts and any(eqn.op is o.experts for _, eqn in walk(layers.program)):
                    captured, changing = layers, whatever
        return captured

    return once


def _settled(capture: Callable[[], Captured]) -> Captured:
    """What code sets once, such as a setting that was None, is set now where its program stays the same: the next call
    would find it so, and be captured again for nothing."""
    captured = capture()
    before: list[tuple[Location, Any]] = []
    for place, tree in captured.effects:
        try:
            old = place.read()
        except LookupError:
            old = GONE  # it was not there
            if not isinstance(owner(place.container), dict):
                return captured
        if tree.kind != "static" or is_counter(old, tree.key):
            return captured
        before.append((place, old))
    if not before:
        return captured
    for place, tree in captured.effects:
        place.write(tree.key)
    with contextlib.suppress(Exception):  # it is said when it is called
        again = capture()
        if not again.effects and again.program == captured.program and again.out == captured.out:
            return again
    for place, old in before:
        if old is GONE:
            del owner(place.container)[place.key]
        else:
            place.write(old)
    return captured


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Captures under way do not see what torch does in here."""
    modes = []
    while TRACING and torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        with _disable_current_modes() if TRACING else contextlib.nullcontext():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def _capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    apart: bool,
    known: Mapping[int, Role],
    differentiated: bool,
    data: tuple[tuple[Any, ...], dict[str, Any]],
    islands: dict[Any, BaseException],
    selects: set[str],
    changing: frozenset[str],
    counters: frozenset[Slot] | None,
    followed: frozenset[int],
    joins: bool,
    live: frozenset[Slot],
    strict: bool,
    by_arguments: bool,
) -> Captured:
    leaves: list[torch.Tensor] = []
    tree = flatten_arguments((args, kwargs), leaves)
    check_arguments(fn, tree)
    places = Reachable(fn, tree.statics())
    device = device_of(leaves, places)
    tracer = Tracer(device, places)
    tracer.islands, tracer.plain_selects, tracer.changing, tracer.is_strict = islands, selects, changing, strict
    tracer.joins, tracer.live_slots = joins, live
    paths = argument_paths(fn, tree)
    traced, given = trace_arguments(tracer, tree, paths, leaves, apart)
    objects = ArgumentObjects(fn, tree, traced)
    held: list[torch.Tensor] = []
    flatten_arguments(data, held)
    tracer.sources.update(zip(given, held, strict=True))
    draws = drawn_state()
    counted = lift_counters(tracer, places, counters or frozenset())
    tracer.counted_slots = counted.keys()
    kept_lists = KeptLists(places, followed)
    untouched = UntouchedObjects(places.unfollowed)
    try:
        with traced_by(tracer):
            tracer.differentiated, tracer.by_arguments = differentiated, by_arguments
            tracer.grad_mode = tracer.grad_mode or differentiated
            if differentiated:
                hook_parameters(tracer, places.parameters())
            result = boundary(tracer, (ROOT,), fn, functools.partial(enter, fn))(*traced[0], **traced[1])
        refuse_draws(draws)
        if replaced := places.replaced_modules():
            raise _refuse_modules(replaced)
        objects.refuse_changes()
        outs: list[torch.Tensor] = []
        out_tree = flatten(result, outs, objects=True, varying=True)
        if not differentiated:
            out_tree = out_tree.with_numbers(iter([isinstance(x, Traced) and x.weak for x in outs]))
        with tracer:
            results = [tracer.cell(x).read() for x in outs]
            copies = copied(tracer, outs)
            if tracer.texts:
                everything: list[tuple[Var, bool]] = []
                out_tree = with_texts(tracer, out_tree, zip(results, copies, strict=True), everything)
                results, copies = [v for v, _ in everything], [is_copy for _, is_copy in everything]
            for number in counted.values():
                number.end(tracer)
        kept_lists.put_back()
        untouched.put_back()
        refuse_additions(places)
        if counters is not None:
            refuse_counters(places, counted)
        structures = Structures(places)
        effects, more, rebound = effects_of(tracer, rebound_slots(tracer, places, counted), structures)
        additions, added, kept = kept_lists.effects(tracer, places)
        effects += additions
        results += more + added
        copies += rebound + kept
        effects += toggles(tracer) + cleared_grads(tracer)
        tracer.refuse_rows(results, "they are what the program returns or keeps")
        _refuse_text(tracer, [tree for _, tree in effects])
    except BaseException as e:
        places.replaced_modules()
        kept_lists.put_back()
        untouched.put_back()
        undo(places)
        if tracer.counted_rows and not getattr(e, "chosen_at", ""):  # it may be their number that does not fit
            e.chosen_at = min(tracer.counted_rows)  # type: ignore[attr-defined]
        raise
    finally:
        for x, asked in tracer.toggled.values():
            x.requires_grad_(asked)
    if TRACING:  # what was captured becomes part of an outer program
        TRACING[-1].python_calls += tracer.python_calls
    note_changes(places, counted)
    restore(places)
    updates, new = updates_of(tracer)
    tracer.refuse_rows(new, "they are what the program keeps")
    blocks = assemble(tracer, results + new)
    names = {v: w.name for v, w in zip(tracer.inputs, blocks["main"].inputs, strict=False)}
    arguments = {
        names[v]: path for v, path in reversed([*zip(given, paths, strict=True)])
    }  # of a tensor passed twice, the first
    roles = input_roles(tracer, names, arguments, known)
    if len(blocks["main"].inputs) > len(names):
        roles[blocks["main"].inputs[-1].name] = Role("key")
    program = check(prune(Program(blocks, "main", tuple(names[v] for v in updates), tracer.consts, roles)))
    if tracer.picks_rows or may_have_loops(program):
        program, merged = merged_loops(program, differentiated, tracer.grad_mode)
        program = check(program)
        for line in sorted(tracer.expert_loops - merged):
            warn_of_experts(line)
        warn_of_copies(program)
        warn_of_masks(program)
    return Captured(
        program,
        tree,
        tuple(names[v] for v in given),
        {names[v]: tuple(map(structures.through, p)) for v, p in tracer.state},
        out_tree,
        tuple(effects),
        tuple(m for _, m in places.modules.values()),
        tuple(filter(is_there, places.links)),
        places.unchanged(),
        places.unresized(p for p, _ in effects),
        {names[v]: x.device for v, (x, _) in zip(tracer.inputs, tracer.lifted.values(), strict=True)},
        device,
        differentiated,
        _facts(tracer, names, updates),
        tuple((names[v], p) for v in given for p in tracer.aliases.get(v.name, ()) if p.kind != "held"),
        tuple(tracer.recorded),
        tuple((names[v], asks) for v, asks in tracer.recorded_arguments.items()),
        tracer.grad_mode,
        tuple(tracer.python_calls),
        tuple(tracer.environment.items()),
        tuple((logger, level, answer) for (logger, level), answer in tracer.log_levels.items()),
        frozenset(i for i, is_copy in enumerate(copies) if is_copy),
        tuple(tracer.inside),
    )


def _refuse_modules(names: Sequence[str]) -> CaptureError:
    """The code puts other modules in the place of these, at every call."""
    error = refuse(
        f"the code puts another module in the place of {', '.join(names)}: a program is one of those it was made of",
        "a flag that chooses between modules, or replacing them between calls",
    )
    error.final = True
    return error


def _refuse_text(tracer: Tracer, trees: Sequence[Tree]) -> None:
    """CaptureError for text of traced tensors that is kept: it would be that of one call."""
    kept = [value for tree in trees for value in tree.statics() if isinstance(value, str)] if tracer.texts else []
    for text, value in tracer.texts.items():
        if any(text in held for held in kept):
            raise refuse_read("__format__", value.source)


def _facts(tracer: Tracer, names: Mapping[Var, str], updates: Sequence[Var]) -> tuple[Facts, ...]:
    """What was asked of the program's inputs, as a program of its own; refused where the program itself changes these
    at every call."""
    if not tracer.facts:
        return ()
    facts = tuple(tracer.facts.values())
    changed = {v for v, _ in tracer.state} & set(updates)
    for fact in facts:
        for v in (fact.var, *(v for e in fact.eqns for v in e.vars)):
            if v in changed:
                error = refuse(
                    f"a Python value was asked of {names[v]}, which the code itself changes at every call",
                    "keeping it a tensor (0-dim tensors index, compare and multiply)",
                    fact.source,
                )
                error.changes_at = fact.source
                raise error
    used = dict.fromkeys(v for f in facts for v in (f.var, *(v for e in f.eqns for v in e.vars)) if v in tracer.sources)
    consts = {e.params["name"] for f in facts for e in f.eqns if e.op is o.const}
    return (Facts(tuple(names[v] for v in used), tuple(used), facts, {k: tracer.consts[k] for k in consts}),)


__all__ = ["CaptureError", "Captured", "capture"]
