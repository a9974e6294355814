"""A walk through Mycel: one small model, every stage it goes through, and what it became at each.

    python docs/tour.py

Read it from top to bottom; the asserts are the claims, and the test suite runs them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mycel
from mycel.ir import OPS, chains, lifetimes, walk


def say(title: str, text: object = "") -> None:
    print(f"\n== {title}\n\n{text}")


# 1. Ordinary PyTorch.  Nothing here knows Mycel.


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rows = torch.arange(length, device=x.device)
        mask = rows[:, None] >= rows[None, :]  # a causal mask, materialised: many models do this
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T  # the embedding is used twice: one input of the program


torch.manual_seed(0)
model = Model().eval()
ids = torch.randint(0, 100, (2, 16))


# 2. Capture: the code runs once, on tensors without data, and what it did is a program.

program = mycel.capture(model, ids)
say("captured: the layer is one block, called three times; each line shows where it comes from", program)
assert str(program).count("def block(") == 1 and str(program).count("block=@block") == 3
assert [v.name for v in program.inputs].count("embed.weight") == 1


# 3. A program is data.  It prints, parses back, saves, loads; it can be asked things.

assert mycel.Program.parse(str(program)) == program
with tempfile.TemporaryDirectory() as folder:
    program.save(Path(folder) / "model.mycel")
    assert mycel.Program.load(Path(folder) / "model.mycel") == program

layer = program.blocks["block"]
longest = max(lifetimes(layer).items(), key=lambda item: item[1][1] - item[1][0])
say("questions", f"{len(list(walk(program)))} distinct equations; the longest-lived value of a layer is {longest[0]}")
assert all(chain.defined < min(chain.uses, default=99) for chain in chains(layer).values())


# 4. An operator is one paragraph: kernel, shape and sharding rule, gradient, cost.

linear = OPS["linear"]
eqn = next(e for e in layer.eqns if e.op is linear)
cost = linear.cost(eqn.input_types, eqn.params)
say("one operator", f"{linear.name}: dims {linear.dims!r}; here {cost.flops:,} flops over {cost.bytes:,} bytes")
assert cost.flops == 2 * (2 * 16) * 32 * 96


# 5. Passes: Program -> Program.  The mask is gone; attention knows it is causal.

fast = mycel.jit(model)
say("simplified: no mask is built, attention is causal", fast.program(ids))
assert "causal=True" in str(fast.program(ids)) and "ge(" not in str(fast.program(ids))


# 6. Code: readable Python, each value deleted after its last use.

say("generated", fast.source(ids))
torch.testing.assert_close(fast(ids), model(ids))


# 7. The same program equation by equation; the model's weights are read anew at every call.

slow = mycel.jit(model, mode="eager")
with torch.no_grad():
    model.embed.weight *= 0.5
torch.testing.assert_close(fast(ids), model(ids))
torch.testing.assert_close(slow(ids), model(ids))


# 8. What cannot be captured is refused early, with the line and a way out.


weight = torch.nn.Parameter(torch.randn(3))


def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x * weight > 0]  # of x > 0 alone, the number would be a fact of the batch: another one, another capture


try:
    mycel.capture(positive, torch.randn(3))
except mycel.CaptureError as error:
    say("refused", error)


# 9. Control flow on tensors becomes control flow of the program; its gradient is again Python with a loop in it.


def root(a: torch.Tensor) -> torch.Tensor:
    x = a
    while torch.abs(x * x - a) > 1e-9:
        x = (x + a / x) / 2
    return x


two = torch.tensor(2.0, dtype=torch.float64)
say("a loop whose number of turns depends on the data", mycel.capture(root, two))
slope = mycel.grad(root)
say("its gradient", slope.source(two))
torch.testing.assert_close(slope(two), 0.5 / two.sqrt())
torch.testing.assert_close(mycel.grad(slope)(two), -0.25 * two**-1.5)


# 10. With respect to a module: a gradient for each parameter, by name; the repeated layer is differentiated once.

vg = mycel.value_and_grad(lambda ids: model(ids).square().mean(), wrt=model)
value, grads = vg(ids)
model(ids).square().mean().backward()
for name, parameter in model.named_parameters():
    torch.testing.assert_close(grads[name], parameter.grad)
assert str(vg.program(ids)).count("def block_backward(") == 1
