"""A batch -> the program of its loss and gradients, on one device.

capture -> all-ones masks gone -> simplified, 16 bits, head -> scaled -> 8 bits -> gradient -> parts of the batch

With `accumulate` the loss of one part and that of the whole batch are both captured: how a part weighs in the whole,
and whether rows of different parts meet, is read off the two programs side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel import optimizers, plan, transform
from mycel.capture import (
    Captured,
    all_ones,
    differentiate_with,
    flatten_arguments,
    input_tensors,
    refuse_mixed_products,
)
from mycel.capture import capture as capture_call
from mycel.errors import CaptureError, GradientError, TrainError, warn
from mycel.feed import Arguments
from mycel.ir import Program, Var, check
from mycel.objective import Batch, refuse_outputs
from mycel.parts import UnshardedStep, roles_of
from mycel.step.settings import Settings
from mycel.step.shares_tried import shares_add_up

differentiate_with(transform.value_and_grad, transform.jvp)


OTHER_OPTIMIZER = (
    "the loss depends on no parameter of the optimizer\n"
    "  try       an optimizer over the parameters of this model: torch.optim.AdamW(model.parameters())"
)
ALL_FROZEN = (
    "no parameter of the optimizer requires a gradient: the loss depends on no parameter that could change\n"
    "  try       parameter.requires_grad_(True) for those to train"
)
OTHER_FOR_PARTS = (
    "is another program for a part of the batch (a loop over rows, say),\n"
    "which is not shown to give a share of the loss (accumulate=1, or one call for all rows, would be)"
)
CUT_OFF = (
    "the loss depends on no parameter of the optimizer by a gradient: it is cut off on the way\n"
    "  try       model and loss without detach(), item(), argmax or torch.no_grad()"
)


def prepared(captured: Captured, settings: Settings, for_ranks: bool) -> Program:
    """The loss, simplified, in its precision, with its head."""
    program = transform.simplify(captured.program, ranks=for_ranks)
    if settings.half is not None:
        program = check(transform.precision(program, settings.half))
    return check(transform.head(program, mean=settings.half is not torch.float16 and settings.accumulate == 1))


def trained(captured: Captured, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Parameters the optimiser may change and the loss uses, by id: the names of their inputs."""
    at = {id(places[0].read()): name for name, places in captured.state.items()}
    used = {id(p): at[id(p)] for p in optimizers.trainable(optimizer) if id(p) in at}
    if not used:
        raise GradientError(OTHER_OPTIMIZER if optimizers.trainable(optimizer) else ALL_FROZEN)
    return used


@dataclass(frozen=True)
class Recipe:
    """What the program of a step is made from; `fn` is the objective that is captured."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    fn: Callable[..., Any]
    settings: Settings
    device: torch.device
    written: plan.Plan | None
    by_rule: bool  # is the update part of the program?
    for_ranks: bool  # is what ranks share kept in the program?
    whole_batch: bool  # is all of it at hand here, whoever computes with it?
    planned_for: plan.Hardware | None  # the devices it is planned for, where these are not its own
    changed: Callable[[Captured], Captured]  # what becomes of what is captured

    def loss_and_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments) -> UnshardedStep:
        """`data`: the batch, where the arguments hold none."""
        batch, captured, whole = self._captured((args, kwargs), data)
        program = self._prepared(replace(captured, program=transform.with_numbers_of(captured.program, whole.program)))
        names = self._trained(captured)
        refuse_mixed_products(program)
        if batch.parts > 1:
            return self._of_parts(captured, whole, program, batch, names, data)
        program, groups, results, fp8 = self._differentiated(self._scaled(program), names)
        program = self._in_pieces(program)
        body = program.entry
        # stages are cut from what is done with a part: of a batch with too few rows to divide, the whole
        if self._is_staged and (self.settings.accumulate > 1 or (self.written is not None and self.written.place)):
            tensors = [v.name for v in program.inputs if program.role(v).kind == "batch" and v.ndim]
            program = check(transform.microbatch(program, transform.no_counts(program), 1, tensors))
            body = transform.BODY
        return UnshardedStep(captured, program, groups, results, body, fp8)

    def _of_parts(
        self,
        captured: Captured,
        whole: Captured,
        part: Program,
        batch: Batch,
        names: dict[int, str],
        data: Arguments,
    ) -> UnshardedStep:
        """Loss and gradients of the whole batch, from the program of the loss of a part."""
        if kept := [place.name for place, tree in captured.effects if tree.kind != "static"]:
            raise TrainError(
                f"with accumulate what the model, or a hook of it, keeps in {kept[0]} would be of a part of the batch\n"
                "  try       accumulate=1, buffers that it updates, or outputs=True for what it returns"
            )
        split, large, scaled = batch.split(captured.leaves), self._prepared(whole), self._scaled(part)
        if flags := [place.name for place, _ in captured.effects if place.key != "grad"]:
            return self._at_once(whole, large, batch, f"sets {flags[0]}, so it is another one for the next part")
        refuse_outputs(scaled, large, batch.parts)
        captured = replace(captured, out=whole.out)  # plain numbers among the outputs are those of the whole batch
        coupling = transform.coupled(captured.program, whole.program, names.values(), split)
        program, counting, unseen = transform.shares(scaled, large, names.values(), split, batch.parts)
        meeting = coupling.meeting
        if not coupling.are_alike or (coupling.believed and not (meeting or unseen)):
            shares = transform.shares(part, large, names.values(), split, batch.parts)[:2]
            add_up = shares_add_up(*shares, large, _inputs(captured, data), split, batch.parts)
            if not coupling.are_alike and not add_up and not self._is_staged:
                return self._at_once(whole, large, batch, OTHER_FOR_PARTS)
            meeting, unseen = coupling.believed if add_up is False else [], []
        if meeting or unseen:
            met = None
            if not self._is_staged:
                met = transform.by_parts(part, large, names.values(), split, batch.parts)
            if met is not None:
                program, groups, results, fp8 = self._differentiated(check(self._scaled(met)), names)
                return UnshardedStep(captured, program, groups, results, program.entry, fp8)
        if meeting:
            warn(
                "accumulate: rows of the batch meet before the loss sums them up, so the loss is of its parts,\n"
                f"not of the whole: {'; '.join(meeting[:5])}\n"
                "  try       accumulate=1, or memory=… for a batch that does not fit",
            )
        if unseen:
            warn(
                f"accumulate: no sum or mean over the batch, so its parts weigh the same: {'; '.join(unseen)}",
            )
        if changed := [str(captured.program.roles[name]) for name in captured.program.updates] if not meeting else []:
            warn(
                f"accumulate={batch.parts}: each part of the batch is a call of the model, which changes\n"
                f"{', '.join(changed[:3])}{' …' if changed[3:] else ''}: {batch.parts} times a step, as in a loop over "
                "the parts"
            )
        rows = transform.results_in_rows(scaled, large)
        program, groups, results, fp8 = self._differentiated(program, names)
        program = check(transform.microbatch(self._in_pieces(program), counting, batch.parts, split, rows))
        return UnshardedStep(captured, program, groups, results, transform.BODY, fp8)

    def _at_once(self, whole: Captured, program: Program, batch: Batch, why: str) -> UnshardedStep:
        """Loss and gradients of a batch that is not computed in parts."""
        if self._is_staged:
            raise TrainError(f"accumulate={batch.parts}, in stages: the code {why}\n  try       accumulate=1")
        warn(f"accumulate={batch.parts}: the code {why}: the batch is computed at once")
        program, groups, results, fp8 = self._differentiated(self._scaled(program), self._trained(whole))
        return UnshardedStep(whole, self._in_pieces(program), groups, results, program.entry, fp8)

    # -- what is captured ----------------------------------------------------------------------------------------

    def _captured(self, arguments: Arguments, data: Arguments) -> tuple[Batch, Captured, Captured]:
        """The batch, the loss of its first part, and of all of it: the same, where that is one part."""
        known, strict, parts = roles_of(self.model, self.optimizer), self.settings.strict, self.settings.accumulate

        def of(args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments) -> Captured:
            captured = capture_call(self.fn, args, kwargs, known=known, differentiated=True, data=data, strict=strict)
            return self.changed(captured)

        captured = whole = of(*arguments, data)
        apart = transform.without_rows(whole.program, whole.leaves) if parts > 1 else set()
        places = [i for i, name in enumerate(whole.leaves) if name in apart]
        batch, first = (Batch(*given, parts, places) for given in (arguments, data))
        if batch.parts > 1:
            if whole.effects:  # the next part goes on with what this one changed: numbers of the program
                whole = of(*arguments, data)
            captured = self._of_first_part(of, batch, first)
            captured = self._for_all_parts(captured, whole, batch, data)
        return batch, *self._unmasked(captured, whole, data)

    def _of_first_part(self, of: Callable[..., Captured], batch: Batch, data: Batch) -> Captured:
        """The loss of the first part: code that takes the whole batch may not take it."""
        try:
            return of(*batch.part(), data.part())
        except CaptureError as e:
            assert batch.rows is not None
            raise TrainError(
                f"accumulate={batch.parts}: the code runs for the whole batch of {batch.rows} rows, and not for a part "
                f"of {batch.rows // batch.parts}\n  because   {str(e).partition(chr(10) + '  try')[0]}\n"
                "  try       sizes of the tensors at hand (len(x)) in place of numbers, tensors in place of lists with "
                "an item for each row, or accumulate=1"
            ) from e

    def _for_all_parts(self, captured: Captured, whole: Captured, batch: Batch, data: Arguments) -> Captured:
        """What was captured for the first part, where what the batch decided is decided so by every part."""
        split = batch.split(captured.leaves)
        of_parts = tuple(f.in_parts(batch.parts, split) for f in captured.facts)
        inputs = _inputs(captured, data)
        for facts in of_parts:
            if not facts.hold(*(inputs[name] for name in facts.inputs)):
                raise TrainError(
                    "with accumulate the parts of a batch decide differently what the program is\n"
                    f"  at        {'; '.join(map(str, facts.facts))}\n"
                    "  try       accumulate=1, or keep it a tensor: torch.where, masks, padding to a fixed size"
                )
        return replace(captured, facts=(*of_parts, *whole.facts))

    def _unmasked(self, captured: Captured, whole: Captured, data: Arguments) -> tuple[Captured, Captured]:
        """Inputs of nothing but ones are taken for constants where masks of attention go for it: a guard asks at every
        call, and other batches get a program that reads them.  A rank that has a part of the batch cannot ask."""
        leaves: list[torch.Tensor] = []
        flatten_arguments(data, leaves)
        given = dict(zip(whole.leaves, leaves, strict=True))
        ones = [v for v in whole.program.inputs if v.name in given and v.ndim > 1 and _is_ones(given[v.name])]
        if not ones or not self.whole_batch or self.settings.buckets is not None:  # one program for each bucket
            return captured, whole

        def left(inputs: Sequence[Var]) -> int:
            return transform.masks(transform.simplify(transform.with_ones(whole.program, {v.name for v in inputs})))

        least = left(ones)
        if least == left(()):
            return captured, whole
        for v in ones[1:]:  # those that matter
            others = [w for w in ones if w is not v]
            ones = others if left(others) == least else ones
        fact, names = all_ones(ones, f"{', '.join(v.name for v in ones)}: all ones"), {v.name for v in ones}
        facts = (*captured.facts, fact)
        whole = replace(whole, program=transform.with_ones(whole.program, names))
        return replace(captured, program=transform.with_ones(captured.program, names), facts=facts), whole

    def _trained(self, captured: Captured) -> dict[int, str]:
        """Parameters that get a gradient, by id: the names of their inputs."""
        if self.settings.precision == "fp16" and any(p.dtype == torch.bfloat16 for p in self.model.parameters()):
            raise TrainError('precision="fp16" with parameters in bf16\n  try       precision="bf16", or model.float()')
        return trained(captured, self.optimizer)

    @property
    def _is_staged(self) -> bool:
        """Are stages cut from what is done with a part, or sub-models placed?"""
        return self.written is not None and bool(self.written.is_pipeline or self.written.place)

    # -- passes --------------------------------------------------------------------------------------------------

    def _prepared(self, captured: Captured) -> Program:
        return prepared(captured, self.settings, self.for_ranks)

    def _scaled(self, program: Program) -> Program:
        """With the loss scale of fp16."""
        return transform.with_scale(program) if self.settings.precision == "fp16" else program

    def _in_pieces(self, program: Program) -> Program:
        """Operators that are one for the sake of a kernel, where a compiler makes the kernels."""
        return check(transform.in_pieces(program)) if self.settings.compiles(self.device) else program

    def _differentiated(
        self, program: Program, names: dict[int, str]
    ) -> tuple[Program, tuple[optimizers.Bound, ...], int, plan.Fp8Products | None]:
        """The program that also returns gradients, with the groups these are in, the number of its other results, and
        which products are in 8 bits."""
        results = len(program.results)
        program, fp8 = self._in_eight_bits(program)
        program, groups = self._with_gradients(program, names)
        return program, groups, results, fp8

    def _in_eight_bits(self, program: Program) -> tuple[Program, plan.Fp8Products | None]:
        """With precision="fp8" the program with products of linear layers in 8 bits, and which these are."""
        if self.settings.precision != "fp8":
            return program, None
        hardware = self.planned_for
        if hardware is None:
            plan.refuse_without_fp8(self.device)
            hardware = plan.hardware_of(self.device)
        chosen = plan.fp8_products(program, hardware, self.settings.compiles(self.device))
        if not chosen.narrow:
            reasons = "; ".join(f"{reason}: {', '.join(names[:3])}" for reason, names in chosen.wide.items())
            warn(
                'precision="fp8": no product is in 8 bits, all are as with precision="bf16"\n'
                f"  because   {reasons or 'the model has no linear layers'}",
            )
        return check(transform.fp8(program, chosen.narrow)), chosen

    def _with_gradients(
        self, program: Program, trained: dict[int, str]
    ) -> tuple[Program, tuple[optimizers.Bound, ...]]:
        """The program that also returns gradients, group by group, of the parameters the loss depends on."""
        names = {id_: program.roles[v].name for id_, v in trained.items()}
        wrt, results = program.positions(trained.values()), len(program.results)
        program, counters = transform.count_uses(program, trained.values())
        scaled = transform.scaled(program)
        differentiated = transform.value_and_grad(
            scaled, wrt, len(scaled.results) - 1 if scaled is not program else 0, dense=False
        )
        outs = list(differentiated.main.outputs)
        if scaled is not program:
            del outs[results]  # the scaled loss
        reached = {
            name: g for name, g in zip(names.values(), outs[results : results + len(wrt)], strict=True) if g is not None
        }
        if not reached:
            raise GradientError(CUT_OFF)
        bound = {id_: name for id_, name in names.items() if name in reached}
        groups = optimizers.bind_groups(self.optimizer, bound, self.by_rule, counters)
        ordered = [reached[name] for g in groups for name in g.group.params]
        block = replace(differentiated.main, outputs=(*outs[:results], *ordered, *outs[results + len(wrt) :]))
        differentiated = replace(differentiated, blocks={**differentiated.blocks, differentiated.entry: block})
        return transform.simplify(differentiated, ranks=self.for_ranks), tuple(groups)


def _inputs(captured: Captured, data: Arguments) -> dict[str, torch.Tensor]:
    """What is behind the inputs of the program, by name; of the arguments what is in `data`."""
    leaves: list[torch.Tensor] = []
    flatten_arguments(data, leaves)
    return input_tensors(captured, leaves)


def _is_ones(x: torch.Tensor) -> bool:
    return x.device.type != "meta" and not x.is_floating_point() and not x.is_complex() and bool((x == 1).all())
