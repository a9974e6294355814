"""A zoo of control flow: small functions of f64 tensors, each with argument lists that take its different ways.

    @case((X,), (-X,))            the argument lists; all of one signature, so that one capture must serve them all
    @case(..., has={"cond"})      control-flow operators the program must hold (default: any of cond, loop, scan)

All are differentiable almost everywhere with respect to their float tensors.
"""

from control_flow import branches, loops, scopes
from control_flow.case import CASES

__all__ = ["CASES", "branches", "loops", "scopes"]
