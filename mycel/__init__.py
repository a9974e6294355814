"""Mycel: single-device PyTorch code in, the fastest correct program for your devices out."""

from mycel.api import Jit, capture, jit
from mycel.derivatives import CustomVjp, Derived, custom_vjp, grad, hessian, jvp, stop_gradient, value_and_grad, vjp
from mycel.errors import CaptureError, GradientError, IRError, LoadError, MycelError, PlanError, RunError, TextError
from mycel.ir import Block, Eqn, Program, Type, Var

__all__ = [
    "Block", "CaptureError", "CustomVjp", "Derived", "Eqn", "GradientError", "IRError", "Jit", "LoadError",
    "MycelError", "PlanError", "Program", "RunError", "TextError", "Type", "Var", "capture", "custom_vjp", "grad",
    "hessian", "jit", "jvp", "stop_gradient", "value_and_grad", "vjp",
]  # fmt: skip
