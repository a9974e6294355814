"""Programs -> Python that runs: `emit` writes and loads source, `interpret` runs equation by equation."""

from mycel.ops.space import settle_hosts
from mycel.run.allocator import keep_freed_memory
from mycel.run.compile import start_workers, stop_workers, warm_up, without_collector
from mycel.run.emit import emit, load
from mycel.run.host_space import HostSpace, available, moves
from mycel.run.interpret import interpret, not_finite
from mycel.run.link_probe import LinkWatch, timed_codecs, timed_messages
from mycel.run.native_blocks import is_small
from mycel.run.processes import world
from mycel.run.replay import CudaGraph, GraphPool, Replayed
from mycel.run.replayed_calls import replayed_call
from mycel.run.simulate import part_of, simulate, simulate_places, simulate_stages
from mycel.run.trace import Span, recording
from mycel.run.wide_calls import wide_calls

__all__ = [
    "CudaGraph",
    "GraphPool",
    "HostSpace",
    "LinkWatch",
    "Replayed",
    "Span",
    "available",
    "emit",
    "interpret",
    "is_small",
    "keep_freed_memory",
    "load",
    "moves",
    "not_finite",
    "part_of",
    "recording",
    "replayed_call",
    "settle_hosts",
    "simulate",
    "simulate_places",
    "simulate_stages",
    "start_workers",
    "stop_workers",
    "timed_codecs",
    "timed_messages",
    "warm_up",
    "wide_calls",
    "without_collector",
    "world",
]
