"""Mycel: single-device PyTorch code in, the fastest correct program for your devices out.

What needs torch is loaded where it is first used, so that `import mycel`, `mycel --help` and a wrong configuration
answer at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mycel.errors import (
    CaptureError,
    CheckpointError,
    GradientError,
    IRError,
    LoadError,
    MycelError,
    PlanError,
    RunError,
    TextError,
    TrainError,
)

if TYPE_CHECKING:
    from mycel import comm
    from mycel.api import Jit, capture, jit
    from mycel.custom import CustomVjp, custom_vjp
    from mycel.derivatives import Derived, grad, hessian, jvp, stop_gradient, value_and_grad, vjp
    from mycel.hints import manual, shard
    from mycel.ir import Block, Eqn, Mesh, Program, Type, Var
    from mycel.islands import island
    from mycel.mapped import Mapped, vmap
    from mycel.mixture import experts
    from mycel.plan import Plan
    from mycel.step import Step, train_step

__all__ = [
    "Block",
    "CaptureError",
    "CheckpointError",
    "CustomVjp",
    "Derived",
    "Eqn",
    "GradientError",
    "IRError",
    "Jit",
    "LoadError",
    "Mapped",
    "Mesh",
    "MycelError",
    "Plan",
    "PlanError",
    "Program",
    "RunError",
    "Step",
    "TextError",
    "TrainError",
    "Type",
    "Var",
    "capture",
    "comm",
    "custom_vjp",
    "experts",
    "grad",
    "hessian",
    "island",
    "jit",
    "jvp",
    "manual",
    "shard",
    "stop_gradient",
    "train_step",
    "value_and_grad",
    "vjp",
    "vmap",
]

NAMES_OF = {
    "mycel.api": ["Jit", "capture", "jit"],
    "mycel.custom": ["CustomVjp", "custom_vjp"],
    "mycel.derivatives": ["Derived", "grad", "hessian", "jvp", "stop_gradient", "value_and_grad", "vjp"],
    "mycel.hints": ["manual", "shard"],
    "mycel.ir": ["Block", "Eqn", "Mesh", "Program", "Type", "Var"],
    "mycel.islands": ["island"],
    "mycel.mapped": ["Mapped", "vmap"],
    "mycel.mixture": ["experts"],
    "mycel.plan": ["Plan"],
    "mycel.step": ["Step", "train_step"],
}
HOME = {name: module for module, names in NAMES_OF.items() for name in names}


class Package(ModuleType):
    """This module: a public name is loaded from its home when first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "comm":
            return import_module("mycel.comm")
        if name not in HOME:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(HOME[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a folder to its parent when it is imported: the folder capture/ must not take the place of the
        # function
        if not (name in HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = Package
