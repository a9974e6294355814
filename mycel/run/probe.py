"""Measures what this device and its links can do, for planning (`plan/hardware.py` reads it): products, attention,
convolutions and copies by size and dtype, starting a kernel, the host's link, and every collective by size and number
of ranks.

    mycel probe                         this device
    mycel probe --nproc 4               and the links between four processes, all of which compute at once: as they will
    torchrun … -m mycel probe           and between hosts; where these differ in size, between parts of them as large

Ranks do the same things at the same time, and the numbers are their mean; where they share cores, those of a typical
round and not of the luckiest, and messages are sent between computing.  A curve is a list of [work, work a second],
less the starting of a kernel; messages are [ranks, bytes each puts in, seconds], sent by the communicator that steps
use.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from mycel.ir import OPS, Mesh, type_of
from mycel.ops.conv import channels_last
from mycel.ops.sdpa import counted
from mycel.run.allocator import keep_freed_memory
from mycel.run.brief_probe import KERNELS, small_operators
from mycel.run.host_space import update_thread
from mycel.run.processes import Processes, world
from mycel.run.rendezvous import ranks_on_a_host, seat

# a number is the least of so many rounds, each of at least so long: what else a machine does only adds to it
ROUNDS, LEAST_S = 7, 0.01
CROWDED_S = 0.04  # and for so long where ranks share cores: turns of the system's scheduler are shorter
HOT_S = 0.15  # a GPU computes for so long before it is timed hot: its clock falls under load
LONG_S = 0.25  # a message that takes longer is sent once
LONGEST_MASK = 1024  # of attention: the gradient of a mask in 32 bits holds all pairs
GRAPHED = 20  # runs in one graph of a GPU
COMPUTED_S, MOST = 0.004, 10  # before each message, and so many messages a round, where ranks share cores
BESIDE_S = 1.0  # copies and updates beside each other
CROWDED = 1.25  # times longer than a core of its own would take: ranks share cores
SIZES = {  # by device: what is small and what is large there
    "cpu": {
        "memory": [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 100 << 20],
        "product": [16, 32, 64, 128, 256, 512, 768],
        "attention": [(2, 4, 32, 16), (2, 4, 128, 32), (4, 8, 128, 64)],
        "long_attention": [],
        "conv": [(2, 8, 16), (4, 32, 16), (4, 64, 28)],
        "conv_point": [(2, 24, 16), (4, 96, 16), (4, 192, 28)],
        "message": [(1 << 10, 20), (1 << 14, 20), (1 << 17, 10), (1 << 20, 6), (1 << 23, 2)],
    },
    "cuda": {
        "memory": [1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30],
        "product": [128, 256, 512, 1024, 2048, 4096, 8192],
        "attention": [
            *[(4, 12, 256, 64), (8, 16, 512, 64), (8, 16, 1024, 64), (8, 32, 2048, 64)],
            *[(4, 8, 256, 128), (4, 8, 1024, 128), (4, 16, 2048, 128), (4, 32, 4096, 128)],
        ],
        "long_attention": [(1, 16, 16384, 64), (1, 16, 16384, 128)],  # causal, in 16 bits
        "conv": [(32, 64, 56), (128, 128, 28), (128, 256, 28), (256, 256, 28)],
        "conv_point": [(32, 256, 14), (128, 256, 14), (128, 512, 14), (128, 1024, 14)],
        "message": [(1 << 12, 20), (1 << 16, 20), (1 << 20, 10), (1 << 24, 5), (1 << 27, 3)],
    },
}
BUCKET = 4  # tensors that travel together
UPDATED = {"update_bytes_s": torch.float32, "update_half_bytes_s": torch.bfloat16}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute_ranks")


def probe(device: str | torch.device = "auto", say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Everything, as plain data; on all ranks of this world at once.  `say` is told what is measured."""
    keep_freed_memory()  # as a step does
    mine = seat()
    local = ranks_on_a_host() or mine.world
    ranks = world(_mesh(mine.world, local), device)
    try:
        with torch.no_grad():
            measurements = Probe(ranks, say).run(local)
    except BaseException as error:
        ranks.close(error)
        raise
    ranks.close()
    return measurements


def _mesh(count: int, local: int) -> Mesh:
    """Hosts, and the ranks of one in pairs, if there are any."""
    pair = 2 if local % 2 == 0 else 1
    return Mesh(host=max(count // local, 1), others=local // pair, pair=pair)


class Probe:
    """The measuring of one rank."""

    def __init__(self, ranks: Processes, say: Callable[[str], None]) -> None:
        self.ranks, self.say = ranks, say
        self.device = ranks.device
        self.sizes: dict[str, Any] = SIZES["cuda" if self.device.type == "cuda" else "cpu"]
        self.launch_s = self.one_s = 0.0  # from one kernel of a step to the next, and to the same one again
        self.crowd = 1.0  # times longer than with a core of its own

    def run(self, local: int) -> dict[str, Any]:
        if self.device.type == "cpu" and self.ranks.mesh.world > 1:
            self.crowd = self._shared_cores()
        is_cuda = self.device.type == "cuda"
        self.say("starting a kernel")
        self.one_s, self.launch_s = self._launch()
        rates: dict[str, list[list[float]]] = {"memory": list(self._memory())}
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            if name == "bf16" and not is_cuda:
                continue
            self.say(f"products, attention and convolutions in {name}")
            rates[f"product.{name}"] = list(self._products(dtype))
            rates.update((f"{kind}.{name}", curve) for kind, curve in self._attention(dtype).items())
            rates[f"conv.{name}"] = list(self._convolutions(dtype, 3))
            rates[f"conv_point.{name}"] = list(self._convolutions(dtype, 1))
        gpu = torch.cuda.get_device_properties(self.device) if is_cuda else None
        measurements = {
            "device": gpu.name if gpu is not None else "CPU",
            **({"memory": gpu.total_memory} if gpu is not None else {}),
            "processes": self.ranks.mesh.world,
            "threads": torch.get_num_threads(),
            "launch_s": _short(self.launch_s),
            "host_bytes_s": _short(self._host()),
            **self._host_updates(),
            **({"unaligned": [_short(x) for x in self._unaligned()]} if is_cuda else {}),
            "rates": {name: sorted([_short(x), _short(y)] for x, y in curve) for name, curve in rates.items()},
        }
        levels = list(self._levels(local))
        return {**measurements, "levels": levels} if levels else measurements

    # -- one device --------------------------------------------------------------------------------------------------

    @property
    def is_crowded(self) -> bool:
        return self.crowd > CROWDED

    def _shared_cores(self) -> float:
        """How many times longer a rank computes while all do than its thread is on a core."""
        self._together()
        began, used = time.perf_counter(), time.thread_time()
        self._compute(ROUNDS * CROWDED_S / 2)
        return self._mean((time.perf_counter() - began) / (time.thread_time() - used))

    def _compute(self, seconds: float) -> float:
        """For at least so long on a core; how long it was."""
        began = time.thread_time()
        x = self._rand(*[self.sizes["product"][-3]] * 2)
        while time.thread_time() - began < seconds:
            F.linear(x, x)
        return time.thread_time() - began

    def seconds(self, fn: Callable[[], Any]) -> float:
        """One run, at best, while the other ranks do the same; the mean of all ranks."""
        fn()
        self._wait()
        started = time.perf_counter()
        fn()
        self._wait()
        once = time.perf_counter() - started
        often = max(1, math.ceil((CROWDED_S if self.is_crowded else LEAST_S) / max(once, 1e-6)))
        self._together()
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(often):
                fn()
            self._wait()
            times.append((time.perf_counter() - started) / often)
        return self._mean(self._typical(times))

    def _typical(self, times: Sequence[float]) -> float:
        """At best; where ranks share cores, the best is what one takes while others are kept waiting."""
        return statistics.median(times) if self.is_crowded else min(times)

    def work(self, fn: Callable[[], Any]) -> float:
        """Without the start of its kernel."""
        if self.device.type == "cuda":
            return self._on_device(fn)
        whole = self.seconds(fn)
        return max(whole - self.one_s, 0.1 * whole)

    def _on_device(self, fn: Callable[[], Any]) -> float:
        """Of one run among many that a graph of the device starts by itself; the mean of all ranks.  A device is slower
        when it is hot; in a step, with other kernels between, it is neither: the mean of both."""
        fn()
        self._wait()
        started = time.perf_counter()
        fn()
        self._wait()
        often = min(max(math.ceil(LEAST_S / (time.perf_counter() - started)), 1), GRAPHED)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(often):
                fn()
        graph.replay()
        cold = min(self._replayed(graph))
        began = time.perf_counter()
        while time.perf_counter() - began < HOT_S:
            graph.replay()
            self._wait()
        hot = sorted(self._replayed(graph))[ROUNDS // 2]
        return self._mean((cold + hot) / 2 / often)

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        """Seconds of each of some replays, while other ranks do the same."""
        self._wait()
        self._together()
        times = []
        for _ in range(ROUNDS):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            graph.replay()
            ended.record()
            self._wait()
            times.append(started.elapsed_time(ended) * 1e-3)
        return times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _together(self) -> None:
        self._mean(0.0)

    def _mean(self, x: float) -> float:
        """Over all ranks."""
        total = self.ranks.all_reduce(torch.tensor([x], dtype=torch.float64, device=self.device), self.ranks.mesh.axes)
        return float(total) / self.ranks.mesh.world

    def _rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, device=self.device, dtype=dtype)

    def _launch(self) -> tuple[float, float]:
        x = self._rand(16)
        one_s = self.seconds(lambda: torch.add(x, x))
        return one_s, one_s if self.device.type == "cuda" else self.seconds(small_operators()) / KERNELS

    def _memory(self) -> Iterator[list[float]]:
        """Two read, one written, the result new each time, as in a step."""
        self.say("memory")
        for size in self.sizes["memory"]:
            x, y = self._rand(size // 12), self._rand(size // 12)
            yield [size, size / self.work(lambda x=x, y=y: torch.add(x, y))]  # type: ignore[misc]

    def _products(self, dtype: torch.dtype) -> Iterator[list[float]]:
        """Rows by width by width, and as many by four times the width: what layers do."""
        for n in self.sizes["product"]:
            for inner in (n, 4 * n):
                x, w = self._rand(n, inner, dtype=dtype), self._rand(n, inner, dtype=dtype)
                flops = 2 * n * n * inner
                yield [flops, flops / self.work(lambda x=x, w=w: F.linear(x, w))]  # type: ignore[misc]

    def _unaligned(self) -> Iterator[float]:
        """What is left of a product in 16 bits when the length of its rows is divisible by no more than 1, 2, 4."""
        n = 4096
        x = self._rand(n, n, dtype=torch.bfloat16)

        def rate(columns: int) -> float:
            w = self._rand(columns, n, dtype=torch.bfloat16)
            g = F.linear(x, w)
            return columns / self.work(lambda: (F.linear(x, w), g @ w, g.t() @ x))

        aligned = rate(n)
        for more in (1, 2, 4):
            yield rate(n + more) / aligned

    def _attention(self, dtype: torch.dtype) -> dict[str, list[list[float]]]:
        """Forward and backward, by kind (`Op.rate_of`), in the operations that the operators count: all pairs, seen
        or not; those of a window alone."""
        curves: dict[str, list[list[float]]] = {}
        attend, gradient, of_mask = OPS["attention"], OPS["attention_grad"], OPS["attention_mask_grad"]
        long = self.sizes["long_attention"] if dtype.itemsize == 2 else []
        for shape in self.sizes["attention"] + long:
            q, k, v = (self._rand(*shape, dtype=dtype) for _ in range(3))
            is_small = shape[2] <= LONGEST_MASK
            bias = self._rand(1, shape[1], shape[2], shape[2], dtype=dtype) if is_small else None
            kinds: list[tuple[torch.Tensor | None, dict[str, Any]]] = [(None, {"causal": True})]
            if shape not in long:
                kinds += [(None, {}), (None, {"window": (shape[2] // 4, 0)}), (None, {"causal": True, "dropout": 0.1})]
            counts = counted(q, k, torch.zeros((), dtype=torch.int64, device=self.device), 0)
            kinds += [(bias, {})] if bias is not None else []
            for mask, how in kinds:
                draws = (counts,) if "dropout" in how else ()
                y, lse = attend.kernel(q, k, v, mask, *draws, **how)
                runs = {attend: (q, k, v, mask, *draws), gradient: (y, q, k, v, mask, y, lse, *draws)}
                if mask is not None:
                    runs[of_mask] = (y, q, k, v, mask, y, lse, *draws)
                for op, operands in runs.items():
                    types = [type_of(x) if isinstance(x, torch.Tensor) else x for x in operands]
                    flops = op.cost(types, how).flops
                    seconds = self.work(partial(op.kernel, *operands, **how))
                    curves.setdefault(op.rate_of(types, how), []).append([flops, flops / seconds])
        return curves

    def _convolutions(self, dtype: torch.dtype, side: int) -> Iterator[list[float]]:
        """With kernels of side x side, forward and both gradients together; operands lie as steps have them."""
        for batch, channels, size in self.sizes["conv" if side > 1 else "conv_point"]:
            x, w = (
                channels_last(self._rand(*shape, dtype=dtype))
                for shape in ((batch, channels, size, size), (channels, channels, side, side))
            )
            flops = 2 * batch * size * size * channels * channels * side * side

            def both(x: torch.Tensor = x, w: torch.Tensor = w) -> None:
                y = F.conv2d(x, w, padding=side // 2)
                how = [1, 1], [side // 2, side // 2], [1, 1], False, [0, 0], 1, [True, True, False]
                torch.ops.aten.convolution_backward(y, x, w, None, *how)

            yield [flops, 3 * flops / self.work(both)]

    def _host(self) -> float:
        """Bytes a second between host and device, each way while the other is as busy; on the CPU those of a copy."""
        return float(self.sizes["memory"][-1] / self.seconds(self._copies()[0]))

    def _copies(self) -> tuple[Callable[[], object], Sequence[torch.cuda.Stream]]:
        """A copy of the largest size each way, and the streams they are on; on the CPU there is one way."""
        size, is_cuda = self.sizes["memory"][-1], self.device.type == "cuda"
        here, back = (torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2))
        there, other = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        if not is_cuda:
            return lambda: there.copy_(here), ()
        up, down = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

        def both() -> None:
            with torch.cuda.stream(up):
                there.copy_(here, non_blocking=True)
            with torch.cuda.stream(down):
                back.copy_(other, non_blocking=True)

        return both, (up, down)

    def _host_updates(self) -> dict[str, float]:
        """Bytes of the host's memory that updates of parameters there read and write in a second; on a GPU beside
        copies both ways, which share that memory, and what those reach beside them."""
        alone = {name: self._update(dtype) for name, dtype in UPDATED.items()}
        if self.device.type != "cuda":
            return {name: _short(size / self.seconds(update)) for name, (update, size) in alone.items()}
        beside = {name: self._beside_copies(*each) for name, each in alone.items()}
        rates = {"busy_host_bytes_s": min(copied for _, copied in beside.values())}
        return {name: _short(x) for name, x in (rates | {name: x for name, (x, _) in beside.items()}).items()}

    def _update(self, dtype: torch.dtype) -> tuple[Callable[[], None], int]:
        """AdamW on the host, and the bytes that it reads and writes."""
        size = self.sizes["memory"][-1] // (dtype.itemsize if self.device.type == "cuda" else 16)
        p, g, first, second = (torch.zeros(size, dtype=dtype) for _ in range(4))
        step = torch.ones(())

        def update() -> None:
            torch._fused_adamw_(
                [p], [g], [first], [second], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip

        return update, 7 * p.nbytes

    def _beside_copies(self, update: Callable[[], None], size: int) -> tuple[float, float]:
        """Bytes a second of updates and of copies each way, beside each other."""
        copies, streams = self._copies()
        often = math.ceil(BESIDE_S / self.seconds(copies))
        update()
        self._together()
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in streams]
        for (started, _), stream in zip(events, streams, strict=True):
            started.record(stream)
        for _ in range(often):
            copies()
        for (_, ended), stream in zip(events, streams, strict=True):
            ended.record(stream)
        is_over = threading.Event()
        updating = update_thread().submit(_repeated, update, is_over)
        while not all(ended.query() for _, ended in events):  # a core is busy, as in a step
            pass
        is_over.set()
        updates, updated_s = updating.result()
        copied_s = max(started.elapsed_time(ended) for started, ended in events) * 1e-3
        return self._mean(updates * size / updated_s), self._mean(often * self.sizes["memory"][-1] / copied_s)

    # -- links -------------------------------------------------------------------------------------------------------

    def _levels(self, local: int) -> Iterator[dict[str, Any]]:
        """Innermost first: the ranks of a host, then all."""
        mesh = self.ranks.mesh
        inside: list[tuple[str, ...]] = [axes for axes in (("pair",), ("others", "pair")) if mesh.count(axes) > 1]
        if inside:
            yield self._level("host", local, list({mesh.count(axes): axes for axes in inside}.values()))
        if mesh["host"] > 1:
            across = {mesh.count(axes): axes for axes in (("host",), mesh.axes)}
            yield self._level("network", mesh.world, list(across.values()))

    def _level(self, name: str, ranks: int, groups: Sequence[tuple[str, ...]]) -> dict[str, Any]:
        messages: dict[str, list[list[float]]] = {}
        for op in COLLECTIVES:
            self.say(f"{op} over {name}")
            messages[op] = [
                [self.ranks.mesh.count(axes), size, _short(self._message(op, axes, size, often))]
                for axes in groups
                for size, often in self.sizes["message"]
            ]
        return {"name": name, "ranks": ranks, "busy": _short(self._busy(groups[-1])), "messages": messages}

    def _message(self, op: str, axes: tuple[str, ...], size: int, often: int) -> float:
        """Seconds of one; as often on all ranks.  Where those share cores each computes before it, as in a step: one
        waits for the turns of another, and what some wait others compute.  0 where nothing is left to see."""
        send = self._sender(op, axes, size)
        self._together()
        started = time.perf_counter()
        send()
        self._wait()
        is_long = self._mean(time.perf_counter() - started) > LONG_S  # on a slow link, once says enough
        often = 1 if is_long else min(often, MOST) if self.is_crowded else often
        times = []
        for _ in range(1 if is_long else ROUNDS):
            self._together()
            started, computed = time.perf_counter(), 0.0
            for _ in range(often):
                computed += self._compute(COMPUTED_S) if self.is_crowded else 0.0
                send()
            self._wait()
            times.append((time.perf_counter() - started - self.crowd * computed) / often)
        return max(self._mean(self._typical(times)), 0.0)

    def _sender(self, op: str, axes: tuple[str, ...], size: int) -> Callable[[], Any]:
        """Sends a bucket, as steps do: what packing and unpacking it takes is part of the message."""
        count = self.ranks.mesh.count(axes)
        tensors = 1 if op in ("all_to_all", "permute_ranks") else BUCKET
        xs = [self._rand(count, max(size // 4 // count // tensors, 1)) for _ in range(tensors)]
        how: dict[str, dict[str, Any]] = {
            "all_gather": {"dim": 0}, "reduce_scatter": {"dim": 0}, "all_to_all": {"split": 0, "join": 1},
            "permute_ranks": {"to": tuple((i + 1) % count for i in range(count))},
        }  # fmt: skip
        name = "permute" if op == "permute_ranks" else op
        return lambda: self.ranks.wait(self.ranks.start(name, xs, axes=axes, **how.get(op, {})))

    def _busy(self, axes: tuple[str, ...]) -> float:
        """The share of a message's seconds that are lost to computing beside it: 0 if none are."""
        self.say("messages beside products")
        size = self.sizes["message"][-2][0]
        n = self.sizes["product"][-3]
        x = self._rand(n, n)
        sent = self._rand(size // 4)
        alone = self._message("all_reduce", axes, size, 4)
        if not alone:
            return 0.0
        product = self.seconds(lambda: F.linear(x, x))
        often = max(1, round(2 * alone / product))  # so that the message could be hidden

        def work() -> None:
            for _ in range(often):
                F.linear(x, x)

        def both() -> None:
            pending = self.ranks.start("all_reduce", [sent], axes=axes)
            work()
            self.ranks.wait(pending)

        computing, together = (self._rounds(fn) for fn in (work, both))
        return min(max((together - computing) / alone, 0.0), 1.0)

    def _rounds(self, fn: Callable[[], None]) -> float:
        """The same number of runs on all ranks."""
        times = []
        for _ in range(2 * ROUNDS):
            self._together()
            started = time.perf_counter()
            fn()
            self._wait()
            times.append(time.perf_counter() - started)
        return self._mean(self._typical(times))


def _repeated(fn: Callable[[], None], is_over: threading.Event) -> tuple[int, float]:
    """How often it ran until then, and the seconds that took."""
    began, count = time.perf_counter(), 0
    while not is_over.is_set():
        fn()
        count += 1
    return count, time.perf_counter() - began


def _short(x: float) -> float:
    """Four digits: no more are known."""
    return float(f"{x:.3e}")
