"""Program + Plan -> the programs that run.  Rewriting never decides."""

from mycel.lower.compress import compress
from mycel.lower.distribute import Distributed, distribute, settled
from mycel.lower.explain import explain, proved, sent, sent_text
from mycel.lower.hoist import hoist
from mycel.lower.lowered import Lowered, finished, local_of, lowered, with_regions, with_residuals
from mycel.lower.overlap import overlap
from mycel.lower.price import Prices
from mycel.lower.residency import reside

__all__ = [
    "Distributed", "Lowered", "Prices", "compress", "distribute", "explain", "finished", "hoist", "local_of", "lowered",
    "overlap", "proved", "reside", "sent", "sent_text", "settled", "with_regions", "with_residuals",
]  # fmt: skip
