"""Program + Plan -> the programs that run.  Rewriting never decides."""

from mycel.lower.residency import reside

__all__ = ["reside"]
