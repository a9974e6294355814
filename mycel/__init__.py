"""Mycel: single-device PyTorch code in, the fastest correct program for your devices out."""

from mycel.api import Jit, capture, jit
from mycel.derivatives import Derived, grad, hessian, jvp, stop_gradient, value_and_grad, vjp
from mycel.errors import CaptureError, GradientError, IRError, LoadError, MycelError, PlanError, RunError, TextError
from mycel.ir import Block, Eqn, Program, Type, Var

__all__ = [
    "Block", "CaptureError", "Derived", "Eqn", "GradientError", "IRError", "Jit", "LoadError", "MycelError", "PlanError", "Program", "RunError", "TextError", "Type",
    "Var", "capture", "grad", "hessian", "jit", "jvp", "stop_gradient", "value_and_grad", "vjp",
]  # fmt: skip
