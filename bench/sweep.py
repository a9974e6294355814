"""Does any PyTorch program train?  Many models and programs, each in a process of its own, against torch in f64.

    python bench/sweep.py                     all of them
    python bench/sweep.py --only bert,lstm    those whose names contain one of these
    python bench/sweep.py --kind hand         one kind: causal, text, vision, nn, hand

For each: outputs in train and eval mode, gradients of the loss, and two AdamW steps (dropout set to zero).  It passes,
passes with an island, is refused, is wrong, or fails with an exception that is none of Mycel's.  Families of Hugging
Face come from their own configurations, made small by the names of their fields; one that torch itself cannot run that
way is left out.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import mycel

SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "embedding_size": 32, "emb_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "n_inner": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "d_kv": 8,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 99, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_target_positions": 64,
    "image_size": 32, "patch_size": 8, "num_labels": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4,
}  # fmt: skip
QUIET = [
    "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout", "hidden_dropout", "layerdrop", "drop_path_rate",
    "encoder_layerdrop", "decoder_layerdrop", "dropout_rate", "embedding_dropout", "summary_first_dropout",
    "router_jitter_noise", "mlp_dropout", "attn_dropout", "emb_dropout", "ff_dropout",
]  # fmt: skip
CAUSAL = [
    "bloom",
    "codegen",
    "cohere2",
    "ctrl",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "granite",
    "helium",
    "llama",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
    "xglm",
    "biogpt",
]
TEXT = [
    "albert",
    "bert",
    "big_bird",
    "camembert",
    "convbert",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "flaubert",
    "fnet",
    "funnel",
    "ibert",
    "layoutlm",
    "longformer",
    "mobilebert",
    "mpnet",
    "mra",
    "nezha",
    "nystromformer",
    "roberta",
    "roformer",
    "squeezebert",
    "xlm",
    "xlm-roberta",
    "xmod",
    "yoso",
    "rembert",
    "roc_bert",
]
VISION = [
    "beit",
    "convnextv2",
    "cvt",
    "deit",
    "dinov2",
    "efficientnet",
    "focalnet",
    "levit",
    "mobilenet_v1",
    "mobilevit",
    "poolformer",
    "pvt",
    "regnet",
    "resnet",
    "swin",
    "swinv2",
    "vit",
    "van",
    "bit",
    "hiera",
]


def small(name: str, config: Any) -> Any:
    """A configuration with small sizes wherever it has a field of that name."""
    for key, value in {**SMALL, **dict.fromkeys(QUIET, 0.0)}.items():
        if isinstance(getattr(config, key, None), (int, float)) and not isinstance(getattr(config, key), bool):
            setattr(config, key, value)
    return config


def families(kind: str, names: list[str]) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]]:
    for name in names:
        yield f"{kind}/{name}", lambda name=name: family(kind, name)


def family(kind: str, name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    auto = {"causal": hf.AutoModelForCausalLM, "text": hf.AutoModelForSequenceClassification}
    maker = auto.get(kind, hf.AutoModelForImageClassification)
    config = small(name, hf.AutoConfig.for_model(name))
    config._attn_implementation = "eager"
    model = maker.from_config(config)
    if kind == "vision":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])}
    ids = torch.randint(3, 90, (2, 12))
    labels = ids if kind == "causal" else torch.tensor([0, 1])
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class Regression(nn.Module):
    """Any module, its first result against zeros."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        out = self.inner(*args)
        out = out[0] if isinstance(out, tuple) else out
        return (out * torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)).square().mean()


def layer(module: Callable[[], nn.Module], *args: torch.Tensor) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (Regression(module()), args)


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
SEQ = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
IMG = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
MODULES: dict[str, Callable[[], Any]] = {
    "lstm": layer(lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), SEQ),
    "gru": layer(lambda: nn.GRU(8, 6, batch_first=True), SEQ),
    "rnn": layer(lambda: nn.RNN(8, 6), SEQ),
    "lstm_cell": layer(lambda: nn.LSTMCell(6, 5), X),
    "encoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2), SEQ
    ),
    "transformer": layer(lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), SEQ, SEQ[:, :4]),
    "attention": layer(lambda: nn.MultiheadAttention(8, 2, batch_first=True), SEQ, SEQ, SEQ),
    "batch_norm_cumulative": layer(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)), X),
    "spectral_norm": layer(lambda: nn.utils.spectral_norm(nn.Linear(6, 4)), X),
    "spectral_norm_parametrization": layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), X),
    "weight_norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), X),
    "orthogonal": layer(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), X),
    "instance_norm": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)), IMG),
    "group_norm": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMG),
    "conv_transpose": layer(lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), IMG),
    "adaptive_pool": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(3)), IMG),
    "max_unpool": layer(lambda: Unpool(), IMG),
    "embedding_bag": layer(lambda: nn.EmbeddingBag(10, 6, mode="sum"), torch.tensor([[1, 2], [3, 4]])),
    "bilinear": layer(lambda: nn.Bilinear(6, 6, 3), X, X),
    "prelu": layer(lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), X),
    "fake_quant": layer(lambda: nn.Sequential(nn.Linear(6, 6), torch.ao.quantization.FakeQuantize()), X),
    "scripted": layer(lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), X),
    "compiled": layer(lambda: torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), X),
    "lazy": layer(lambda: warmed(nn.LazyLinear(3), X), X),
}


class Unpool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, at = nn.functional.max_pool2d(self.conv(x), 2, return_indices=True)
        return nn.functional.max_unpool2d(y, at, 2)


def warmed(module: nn.Module, x: torch.Tensor) -> nn.Module:
    module(x)
    return module


class Written(nn.Module):
    """A program as one writes it by hand: f(x, layers of its own)."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.linspace(-1, 1, 6))
        self.how, self.seen, self.history = forward, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def adaptive_steps(m: Written, x: torch.Tensor) -> torch.Tensor:
    h, step = m.a(x), 0
    while h.abs().max() > 0.2 and step < 20:
        h, step = h - 0.1 * torch.tanh(m.b(h)), step + 1
    return h.square().mean()


def numpy_inside(m: Written, x: torch.Tensor) -> torch.Tensor:
    order = torch.from_numpy(m.a(x).detach().numpy().argsort(axis=1).copy())
    return m.b(m.a(x).gather(1, order)).square().mean()


def scipy_inside(m: Written, x: torch.Tensor) -> torch.Tensor:
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(m.a(x), m.b(x))
    rows, cols = linear_sum_assignment(cost.detach().numpy())
    return cost[torch.from_numpy(rows), torch.from_numpy(cols)].mean()


def by_item(m: Written, x: torch.Tensor) -> torch.Tensor:
    return m.b(x).square().mean() * (2.0 if m.w.sum().item() > -1 else 3.0)


def masked_assignment(m: Written, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).clone()
    y[y > 0] = torch.sin(y[y > 0])
    return m.b(y).square().mean()


def masked_mean(m: Written, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    return h[h > 0].mean() + m.b(h).square().mean()


def mask_of_batch(m: Written, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x)[x > 0]).square().mean() if False else m.a(x)[x[:, 0] > -9].square().mean()


def gradient_penalty(m: Written, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = m.b(torch.tanh(m.a(x))).sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()


def pinn(m: Written, x: torch.Tensor) -> torch.Tensor:
    t = x[:, :1].clone().requires_grad_()
    u = torch.tanh(m.a(t.expand(-1, 6))).sum(1, keepdim=True)
    (du,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
    (ddu,) = torch.autograd.grad(du, t, torch.ones_like(du), create_graph=True)
    return (ddu + u).square().mean()


def per_sample_gradients(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torch.func import functional_call, grad, vmap

    params = dict(m.a.named_parameters())
    g = vmap(grad(lambda p, r: functional_call(m.a, p, (r,)).square().sum()), (None, 0))(params, x)
    return sum(v.square().mean() for v in g.values())


def loop_of_lists(m: Written, x: torch.Tensor) -> torch.Tensor:
    outs, h = [], x
    for i in range(5):
        h = torch.tanh(m.a(h)) if i % 2 else m.b(h)
        outs.append(h)
    return torch.stack(outs).square().mean()


def topk_routing(m: Written, x: torch.Tensor) -> torch.Tensor:
    score, at = m.a(x).softmax(-1).topk(2)
    y = torch.zeros_like(x)
    for e in range(6):
        rows, place = torch.where(at == e)
        y = y.index_add(0, rows, m.b(x[rows]) * score[rows, place, None])
    return y.square().mean()


def unique_values(m: Written, x: torch.Tensor) -> torch.Tensor:
    labels = (x[:, 0] > 0).long()
    values, inverse = torch.unique(labels, return_inverse=True)
    sums = torch.zeros(len(values), 6, dtype=x.dtype).index_add(0, inverse, m.a(x))
    return sums.square().mean()


def sparse_product(m: Written, x: torch.Tensor) -> torch.Tensor:
    adjacency = torch.eye(4, dtype=x.dtype).to_sparse()
    return torch.sparse.mm(adjacency, m.a(x)).square().mean()


def packed(m: Written, x: torch.Tensor) -> torch.Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(m.a(x)[:, :, None], torch.tensor([6, 3, 2, 1]), batch_first=True)
    return rows.data.square().mean()


def nested(m: Written, x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([m.a(x)[0, :3], m.a(x)[1, :5]])
    return torch.nested.to_padded_tensor(rows, 0.0).square().mean()


def fft(m: Written, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(m.a(x)) * torch.fft.rfft(m.w), n=6).square().mean()


def solver(m: Written, x: torch.Tensor) -> torch.Tensor:
    a = m.a.weight @ m.a.weight.T + 6 * torch.eye(6, dtype=x.dtype)
    y = torch.zeros_like(x)
    for _ in range(100):
        r = x - y @ a
        if r.norm() < 1e-6:
            break
        y = y + 0.1 * r
    return m.b(y).square().mean()


def try_views(m: Written, x: torch.Tensor) -> torch.Tensor:
    try:
        y = m.a(x).view(5, 5)
    except RuntimeError:
        y = m.a(x).view(8, 3)
    return y.square().mean()


def counts(m: Written, x: torch.Tensor) -> torch.Tensor:
    m.seen += 1
    m.history = m.a(x).detach()
    return m.b(m.a(x)).square().mean()


def dopri5(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torchdiffeq import odeint

    times = torch.tensor([0.0, 0.5, 1.0], dtype=x.dtype)
    return odeint(lambda t, y: torch.tanh(m.a(y)), x, times, method="dopri5", rtol=1e-5).square().mean()


def rk4(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torchdiffeq import odeint

    times = torch.tensor([0.0, 0.5, 1.0], dtype=x.dtype)
    return odeint(lambda t, y: torch.tanh(m.a(y)), x, times, method="rk4").square().mean()


def string_formatting(m: Written, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    m.history = f"{h.mean():.3f}"
    return h.square().mean()


def clamp_by_item(m: Written, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    return (h / max(float(h.norm()), 1.0)).square().mean()


def checkpointed(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: torch.tanh(m.a(y)), x, use_reentrant=False).square().mean()


def sinkhorn(m: Written, x: torch.Tensor) -> torch.Tensor:
    k = torch.exp(-torch.cdist(m.a(x), m.b(x)))
    u = torch.ones(4, dtype=x.dtype)
    for _ in range(50):
        before, u = u, 1 / (k @ (1 / (k.T @ u)))
        if (u - before).abs().sum().item() < 1e-3:
            break
    return (u[:, None] * k).sum()


def sorted_by_python(m: Written, x: torch.Tensor) -> torch.Tensor:
    rows = sorted(m.a(x), key=lambda r: float(r.sum()))
    return sum((i + 1) * r.square().mean() for i, r in enumerate(rows))


HAND = [
    adaptive_steps, numpy_inside, scipy_inside, by_item, masked_assignment, masked_mean, mask_of_batch,
    gradient_penalty, pinn, per_sample_gradients, loop_of_lists, topk_routing, unique_values, sparse_product, packed,
    nested, fft, solver, try_views, counts, dopri5, rk4, string_formatting, clamp_by_item, checkpointed, sinkhorn,
    sorted_by_python,
]  # fmt: skip


def peft_model() -> tuple[nn.Module, dict[str, Any]]:
    import peft

    model, batch = family("causal", "llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config), batch


def cases() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    made.update(families("causal", CAUSAL))
    made.update(families("text", TEXT))
    made.update(families("vision", VISION))
    made.update({f"nn/{name}": make for name, make in MODULES.items()})
    made.update({f"hand/{fn.__name__}": lambda fn=fn: (Written(fn), (X,)) for fn in HAND})
    made["hand/peft_lora"] = peft_model
    return made


# -- one case


def called(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def loss_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out["loss"]


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def judge(make: Callable[[], Any]) -> str:
    """What becomes of one model."""
    torch.manual_seed(0)
    try:
        model, batch = make()
        model = model.double()
        batch = {k: wide(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(wide, batch))
        for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0
        twin = copy.deepcopy(model)
        wanted = {mode: called(copy.deepcopy(twin).train(mode), batch) for mode in (True, False)}
        loss_of(wanted[True]).backward()
        torch.optim.AdamW(twin.parameters())
    except Exception as e:
        return f"left out: torch itself: {type(e).__name__}: {str(e).splitlines()[0][:90]}"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            wrong = compare(model, twin, batch)
        except mycel.errors.MycelError as e:
            return f"refused: {' '.join(str(e).split())[:200]}"
        except Exception as e:
            return f"foreign: {type(e).__name__}: {str(e).splitlines()[0][:150] if str(e) else ''}"
    if wrong:
        return f"wrong: {wrong}"
    island = next((str(w.message) for w in told if "runs as plain Python" in str(w.message)), None)
    return "pass" if island is None else f"island: {' '.join(island.split())[:160]}"


def compare(model: nn.Module, twin: nn.Module, batch: Any) -> str:
    """The first thing that differs from torch."""
    for mode in (False, True):
        mine, plain = copy.deepcopy(model).train(mode), copy.deepcopy(twin).train(mode)
        got, want = called(mycel.jit(mine), batch), called(plain, batch)
        if not close(loss_of(got), loss_of(want)):
            return f"loss in {'train' if mode else 'eval'} mode: {loss_of(got).item()} for {loss_of(want).item()}"
    model.train()
    twin.train()
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), compile=False, grads=True)
    for turn in range(2):
        got = step(**batch) if isinstance(batch, dict) else step(*batch)
        plain.zero_grad()
        want = loss_of(called(twin, batch))
        want.backward()
        plain.step()
        if not close(got, want.detach()):
            return f"loss of step {turn}: {got.item()} for {want.item()}"
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if q.grad is not None and p.grad is not None and not close(p.grad, q.grad):
                return f"gradient of {name} in step {turn}: off by {(p.grad - q.grad).abs().max():.2g}"
    for (name, x), y in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        if isinstance(x, torch.Tensor) and not torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-5):
            return f"{name} after two steps: off by {(x.double() - y.double()).abs().max():.2g}"
    return ""


def apart(make: Callable[[], Any], seconds: int) -> str:
    """The verdict of a process of its own, which starts with what is imported here."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: there.send(judge(make)))
    process.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(seconds) else "timeout"
    except EOFError:
        return "foreign: the process ended"
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain one of these, by commas")
    parser.add_argument("--kind", default="")
    parser.add_argument("--seconds", type=int, default=240, help="for each")
    args = parser.parse_args()
    known = cases()
    wanted = [n for n in known if n.startswith(args.kind) and any(part in n for part in args.only.split(","))]
    tally: Counter[str] = Counter()
    for name in wanted:
        start = time.perf_counter()
        verdict = apart(known[name], args.seconds)
        tally[verdict.partition(":")[0]] += 1
        print(f"{name:<34} {time.perf_counter() - start:5.0f} s  {verdict}", flush=True)
    judged = sum(n for kind, n in tally.items() if kind != "left out")
    passed = tally["pass"] + tally["island"]
    print(f"{passed} of {judged} pass, {tally['island']} with an island; {dict(tally)}")


if __name__ == "__main__":
    main()
