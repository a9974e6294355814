"""Mycel: single-device PyTorch code in, the fastest correct program for your devices out."""

from mycel.api import Jit, capture, jit
from mycel.errors import CaptureError, IRError, LoadError, MycelError, PlanError, RunError, TextError
from mycel.ir import Block, Eqn, Program, Type, Var

__all__ = [
    "Block", "CaptureError", "Eqn", "IRError", "Jit", "LoadError", "MycelError", "PlanError", "Program", "RunError", "TextError", "Type",
    "Var", "capture", "jit",
]  # fmt: skip
