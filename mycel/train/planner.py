"""What `mycel plan` asks: the step of a configuration, or of a function of the user's, on devices that need not be
there.

    question(config, cluster)           the model of the configuration without data, its batch and optimiser
    question_of("module:function")      what the function returns: (model, batch) or (model, optimizer, batch)
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mycel.errors import PlanError
from mycel.parts import UnshardedStep
from mycel.plan import hardware_of
from mycel.plan.cluster import Cluster, nominal_of
from mycel.plan.plan_file import plan_data
from mycel.replica_batch import own_batch
from mycel.search import Search
from mycel.search_given import Given
from mycel.search_space import any_plan
from mycel.sizes import parse_bytes
from mycel.step import Step, train_step
from mycel.train import models
from mycel.train.assemble import adapt, make_optimizer
from mycel.train.config import Config, PlannedConfig, load
from mycel.train.tasks import batch_outline, head_of, task_loss

Say = Callable[[str], None]

STEP_SETTINGS = (
    "parallel.mesh", "parallel.plan", "train.accumulate", "train.clip_norm", "train.memory", "train.precision",
)  # fmt: skip


def question(config: Config, cluster: Cluster, say: Say = lambda text: None) -> Search:
    """Plans for the step of a configuration."""
    train = config.train
    dtype = getattr(torch, config.model.dtype)
    outline = models.outline_of(config.model.path, config.model.config, dtype, head_of(config))
    adapt(config, outline.module)
    rows = train.batch * train.accumulate
    batch = batch_outline(config, outline.module, rows)
    return search(
        outline.module,
        make_optimizer(config.optimizer, outline.module),
        batch,
        cluster,
        _given(config),
        say,
        parse_bytes(train.memory) if train.memory else None,
        loss=task_loss(train),
        precision=train.precision,
        clip_norm=train.clip_norm,
    )


def _given(config: Config) -> dict[str, Any]:
    """What holds in every plan."""
    given: dict[str, Any] = {"mesh": dict(config.parallel.mesh)} if config.parallel.mesh else {}
    given |= {"microbatches": config.train.accumulate} if config.train.accumulate > 1 else {}
    plan = config.parallel.plan
    return given if plan in (None, "auto") else {**plan_data(plan)[0], **given}


def question_of(name: str, cluster: Cluster, say: Say = lambda text: None, settings: Sequence[str] = ()) -> Search:
    """Plans for what a function of the user's makes; `settings`, a.b=c: those of a step and its plan."""
    config = _settings_of_step(name, settings)
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as e:
        hint = "module:function, from the folder it is in"
        raise PlanError(f"cannot find {name}\n  because   {e}\n  try       {hint}") from e
    returned = _made(name, make)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module):
        returned = (returned[0], torch.optim.AdamW(returned[0].parameters()), returned[1])
    is_fit = isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], nn.Module)
    if not is_fit or not isinstance(returned[2], Mapping):
        raise PlanError(
            f"{name} returns {type(returned).__name__}\n"
            "  try       (model, batch) or (model, optimizer, batch), the batch by name: {'input_ids': …}"
        )
    written, memory = config.train.model_fields_set, config.train.memory
    batch, full_masks = with_full_masks(returned[2])
    return search(
        returned[0],
        returned[1],
        batch,
        cluster,
        _given(config),
        say,
        parse_bytes(memory) if memory else None,
        full_masks,
        **{key: getattr(config.train, key) for key in ("precision", "clip_norm") if key in written},
    )


def _settings_of_step(name: str, settings: Sequence[str]) -> Config:
    """What is said about the step of a function's model, and nothing else."""
    for setting in settings:
        key = setting.partition("=")[0]
        if key not in STEP_SETTINGS:
            raise PlanError(
                f"{setting} is no setting of a function's model: {name} says what the model, its optimizer and the "
                f"batch are\n  try       {', '.join(STEP_SETTINGS)}"
            )
    return load(None, settings, PlannedConfig)


def with_full_masks(batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A batch whose masks have no data, with masks of nothing but ones, as of texts without padding; and their
    names."""
    names = [name for name, x in batch.items() if _is_mask_without_data(name, x)]
    ones = {name: torch.ones((), dtype=batch[name].dtype, device="cpu").expand(batch[name].shape) for name in names}
    return {**batch, **ones}, names


def _is_mask_without_data(name: str, x: Any) -> bool:
    if not isinstance(x, torch.Tensor) or x.device.type != "meta" or "mask" not in name:
        return False
    return x.ndim > 1 and not x.is_floating_point() and not x.is_complex()


def _made(name: str, make: Callable[[], Any]) -> Any:
    """What a function returns, without data; where it looks at data on its way, with."""
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError), torch.device("meta"):  # without data
        return make()
    try:
        return make()
    except Exception as e:
        line = traceback.extract_tb(e.__traceback__)[-1]
        raise PlanError(
            f"{name} raised {type(e).__name__}: {e}\n  at        {os.path.relpath(line.filename)}:{line.lineno}"
        ) from e


def search(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    cluster: Cluster,
    given: Mapping[str, Any] | None = None,
    say: Say = lambda text: None,
    memory: int | None = None,
    full_masks: Sequence[str] = (),
    **settings: Any,
) -> Search:
    """Plans for a training step; tensors need no data.  `full_masks`: of the batch, which are taken to be full."""

    if settings.get("precision") == "fp8" and cluster.memory is not None and cluster.hardware.quarter is None:
        raise PlanError(
            f'precision "fp8": {cluster.hardware.name} has no products in 8 bits\n  at        {cluster}\n'
            "  try       precision bf16, devices such as H100, or the device's figures with `quarter`"
        )

    mesh = Given.read(given).mesh if given else None

    def make(microbatches: int, said: Mapping[str, Any], placed: bool = False) -> UnshardedStep:
        plan = any_plan(cluster.world, said, placed, mesh) if cluster.world > 1 else None
        step: Step = train_step(model, optimizer, plan=plan, accumulate=microbatches, compile=True, **settings)
        step.planned_for = cluster.hardware
        args, kwargs = own_batch(plan, 0, (), dict(batch)) if plan is not None else ((), batch)
        return step.unsharded(*args, **kwargs)

    def smaller(rows: int) -> Search:
        whole = max((x.shape[0] for x in batch.values() if isinstance(x, torch.Tensor) and x.ndim), default=1)
        cut = {
            name: x[:rows] if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == whole else x
            for name, x in batch.items()
        }
        return search(model, optimizer, cut, cluster, given, memory=memory, full_masks=full_masks, **settings)

    compiled = cluster.memory is not None
    return Search(model, optimizer, make, cluster, memory, given, compiled, say, smaller, full_masks)


def this_machine() -> Cluster:
    """The devices of this host, as a probe measured them, else as presets have them: the same at each start."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if gpus else "cpu")
    hardware = hardware_of(device)
    count = gpus or 1
    if not gpus and hardware.levels:
        count = max(level.ranks for level in hardware.levels)
    return Cluster("this machine", hardware, count, 1, nominal_of(hardware))


def cluster_of(name: str | None, corrected: bool = False) -> Cluster:
    """One that is named, or this machine; `corrected`: by what earlier runs here took."""
    if name:
        return Cluster.read(name)
    return this_machine().corrected if corrected else this_machine()
