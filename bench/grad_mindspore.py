"""bench/grad.py's cases in MindSpore's graph mode, for a Python that has it; prints one JSON line of seconds a call."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time

import mindspore as ms
import numpy as np
from mindspore import nn, ops

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")


def relax(x, target):
    while (x - target).abs().max() > 1e-3:
        x = x + 0.034 * ops.tanh(target - x)
    return (x * x).sum()


def seconds(fn, rounds, calls):
    fn()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def value_and_grad_of(net, loss):
    def forward(x, y):
        return loss(net(x), y)

    return ms.value_and_grad(forward, None, net.trainable_params())


os.chdir(tempfile.mkdtemp())  # it leaves files where it runs
by_case = {}
for size in (8, 512):
    net = nn.SequentialCell(nn.Dense(64, 64), nn.ReLU(), nn.Dense(64, 64), nn.ReLU(), nn.Dense(64, 10))
    x, y = ms.Tensor(np.random.randn(size, 64), ms.float32), ms.Tensor(np.random.randint(0, 10, size), ms.int32)
    loss = nn.CrossEntropyLoss()
    step = ms.jit(value_and_grad_of(net, loss))
    by_case[f"3-layer MLP, batch {size}"] = seconds(lambda step=step, x=x, y=y: step(x, y)[0].asnumpy(), 21, 10)
step = ms.jit(ms.value_and_grad(relax))
x, target = ms.Tensor(np.zeros((2, 2)), ms.float32), ms.Tensor([[1.0, 0.5], [-0.3, 0.9]], ms.float32)
by_case["while, about 200 turns"] = seconds(lambda: step(x, target)[1].asnumpy(), 11, 1)
print(json.dumps(by_case))
