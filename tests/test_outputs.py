"""What a step returns besides its loss: the same as plain PyTorch has after the forward pass, in parts of a batch and
on ranks too."""

from __future__ import annotations

import copy

import pytest
import torch
from distributing import OneDevice, step_equals
from golden import golden
from stepping import both, cross_entropy, mlp, rows, sgd
from torch import nn
from torch.nn import functional as F

import mycel
from mycel.errors import TrainError
from mycel.ir import Mesh
from mycel.plan import Plan


def measured(out: torch.Tensor, y: torch.Tensor):
    """Outputs of every kind: rows, a mean over a count, a mean over rows, a sum, a number of hits, a plain number, a
    constant."""
    loud = y != -100
    hits = (out.argmax(-1) == y) & loud
    loss = cross_entropy(out, y)
    return loss, {
        "loss": loss,
        "accuracy": hits.float().sum() / loud.sum(),
        "size": out.square().mean(),
        "total": out.abs().sum(),
        "hits": hits.sum(),
        "by_class": F.one_hot(out.argmax(-1), 5).sum(0),
        "rows": (out, out.argmax(-1)),
        "count": len(y),
        "name": "measured",
    }


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_outputs_are_those_of_plain_torch(accumulate):
    pair = both(mlp, sgd(), measured, outputs=True, accumulate=accumulate)
    for i in range(3):
        x, y = rows(i)
        y[:4] = torch.tensor([-100, -100, 1, -100])  # parts count unequally
        with torch.no_grad():
            wanted_loss, wanted = measured(pair.model(x), y)
        loss, outputs = pair.step(x, y)
        torch.testing.assert_close(loss, wanted_loss)
        torch.testing.assert_close(
            {k: v for k, v in outputs.items() if k != "name"}, {k: v for k, v in wanted.items() if k != "name"}
        )
        assert outputs["name"] == "measured" and not loss.requires_grad and not outputs["rows"][0].requires_grad


class NanoGPT(nn.Module):
    """As nanoGPT's: forward(idx, targets) is (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, idx, targets=None):
        logits = self.lm_head(torch.tanh(self.wte(idx)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def text(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(i))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def test_a_model_that_returns_logits_and_loss():
    pair = both(NanoGPT, sgd(), outputs=True)
    with torch.no_grad():
        logits, loss = pair.model(*text(0))
    got, outputs = pair.step(*text(0))
    torch.testing.assert_close((got, outputs), (loss, (logits, loss)))


def test_the_loss_of_a_pair_is_its_one_scalar():
    """nanoGPT's (logits, loss), without a word; in evaluation too."""
    pair = both(NanoGPT, sgd())
    for i in range(3):
        wanted = pair.twin(*text(i))[1]
        torch.testing.assert_close(pair.step.evaluate(*text(i)), wanted.detach())
        torch.testing.assert_close(pair.step(*text(i)), wanted.detach())
        pair.plain.zero_grad()
        wanted.backward()
        pair.plain.step()
    torch.testing.assert_close(dict(pair.model.state_dict()), dict(pair.twin.state_dict()))


def test_a_loss_alone_leaves_the_output_of_the_model():
    pair = both(mlp, sgd(), cross_entropy, outputs=True)
    x, y = rows(0)
    with torch.no_grad():
        wanted = pair.model(x)
    torch.testing.assert_close(pair.step(x, y)[1], wanted)


def test_an_output_object_without_its_cache():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, use_cache=True))
    ids = torch.arange(12).reshape(2, 6)
    wanted = copy.deepcopy(model)(input_ids=ids, labels=ids)
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters()), outputs=True, compile=False)
    loss, out = step(input_ids=ids, labels=ids)
    assert type(out) is type(wanted)
    torch.testing.assert_close((loss, out.loss, out.logits), (wanted.loss, wanted.loss, wanted.logits))
    assert out.past_key_values is None and step.forward()(input_ids=ids, labels=ids).shape == ()


class Told(nn.Module):
    """Returns a dict with whatever it has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, y):
        logits = self.head(x)
        named = {"none": None, "count": 3, "rate": 0.5, "pair": [logits, (None, {"sum": logits.sum()})], 7: "seven"}
        return {"loss": F.cross_entropy(logits, y), **named, "cache": nn.Identity()}


def test_a_dict_keeps_what_is_no_tensor():
    """All but objects that may hold tensors, as caches do."""
    model = Told()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), outputs=True, compile=False)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    wanted = model(x, y)
    _, outputs = step(x, y)
    assert list(outputs) == ["loss", "none", "count", "rate", "pair", 7]
    assert (outputs["none"], outputs["count"], outputs["rate"], outputs[7]) == (None, 3, 0.5, "seven")
    torch.testing.assert_close(outputs["pair"][0], wanted["pair"][0].detach())
    assert outputs["pair"][1][0] is None and outputs["pair"][1][1]["sum"].shape == ()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "written",
    [Plan(Mesh(dp=2), batch=["dp"]), Plan(Mesh(tp=2), {"wte.weight": ["tp", "-"], "lm_head.weight": ["tp", "-"]})],
    ids=lambda p: str(p.mesh),
)
def test_outputs_of_ranks_are_whole(written, accumulate):
    idx, targets = text(0)
    torch.manual_seed(0)
    one = OneDevice.of(NanoGPT().double(), {"idx": idx, "targets": targets}, outputs=True, accumulate=accumulate)
    laid = step_equals(one, written)
    assert [x.type for x in one.unsharded.program.results[1:2]] == [laid.whole.results[1].type]
    assert laid.outputs[1].is_whole and laid.whole.results[1].shape == (4, 5, 11)


def test_messages():
    model = mlp()

    def refused(loss, batch=None, named=(), **settings):
        with pytest.raises(TrainError) as e:
            step = mycel.train_step(model, torch.optim.SGD(model.parameters()), loss, compile=False, **settings)
            step(*(batch or rows(0)), **dict(named))
        return str(e.value)

    texts = [
        refused(measured),
        refused(lambda out, y: (cross_entropy(out, y), out.T), outputs=True, accumulate=2),
        refused(lambda out, y: (cross_entropy(out, y), (out > 0).any()), outputs=True, accumulate=2),
        refused(lambda out, y: (out, cross_entropy(out, y)), outputs=True),
        refused(None, rows(0)[:1]),
        refused(measured, named={"outputs": True}),
        refused(nn.CrossEntropyLoss),
    ]
    model = NanoGPT()
    texts += [refused(None, text(0)[:1]), refused(None, text(0)[:1], outputs=True)]
    golden("refusal_outputs", "\n\n".join(texts))


@pytest.mark.parametrize("whole", [False, True], ids=["of the output", "of the model"])
def test_decisions_and_numbers_of_a_loss_are_part_of_the_program(whole):
    """Without an island, which strict refuses; numbers stay tensors, and are those of each step."""

    def judged(out, y):
        value, large = (out - y).square().mean(), bool(out.max() > 0)
        if value > 1:
            value = value * 2
        return value, {"large": large, "sum": float(out.sum())}

    def of_model(model, x, y):
        return judged(model(x), y)

    net, x = torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0]])
    loss = of_model if whole else judged
    step = mycel.train_step(net, torch.optim.SGD(net.parameters(), lr=0.0), loss, outputs=True, strict=True)
    for bias in (5.0, -5.0):
        with torch.no_grad():
            net.bias.fill_(bias)
        eager, expected = judged(net(x), torch.zeros(1, 1))
        value, outputs = step(x, torch.zeros(1, 1))
        assert torch.allclose(value, eager) and bool(outputs["large"]) == expected["large"] == (bias > 0)
        assert float(outputs["sum"]) == pytest.approx(expected["sum"])
