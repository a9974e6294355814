"""bench/grad.py's cases in JAX, for a Python that has it; prints one JSON line of seconds a call.  (JAX has no reverse
mode for its while loop.)"""

from __future__ import annotations

import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np


def mlp(parameters, x, y):
    for i, (w, b) in enumerate(parameters):
        x = x @ w.T + b
        if i < 2:
            x = jax.nn.relu(x)
    return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()


def seconds(fn, rounds, calls):
    for _ in range(calls):
        jax.block_until_ready(fn())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(fn())
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


by_case = {}
rng = np.random.default_rng(0)
for size in (8, 512):
    parameters = [(jnp.array(rng.standard_normal((n, 64)) * 0.1, jnp.float32), jnp.zeros(n)) for n in (64, 64, 10)]
    x, y = jnp.array(rng.standard_normal((size, 64)), jnp.float32), jnp.array(rng.integers(0, 10, size))
    step = jax.jit(jax.value_and_grad(mlp))
    by_case[f"3-layer MLP, batch {size}"] = seconds(lambda step=step, p=parameters, x=x, y=y: step(p, x, y), 51, 30)
print(json.dumps(by_case))
