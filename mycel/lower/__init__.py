"""Program + Plan -> the programs that run.  Rewriting never decides."""

from mycel.lower.distribute import Distributed, distribute
from mycel.lower.explain import explain, proved, sent, sent_text
from mycel.lower.hoist import hoist
from mycel.lower.overlap import overlap
from mycel.lower.residency import reside

__all__ = ["Distributed", "distribute", "explain", "hoist", "overlap", "proved", "reside", "sent", "sent_text"]
