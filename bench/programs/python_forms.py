"""Python as people write it around a model: records, match, generators, dispatch, caches, hooks, lists."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import operator
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from programs.entry import program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Einops(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.p = nn.Linear(3 * 4, 8)

    def forward(self, img):
        from einops import einsum, rearrange, reduce, repeat

        x = self.p(rearrange(img, "b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=2, p2=2))
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=2) for t in self.qkv(x).chunk(3, -1))
        a = einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        o = rearrange(a @ v, "b h n d -> b n (h d)")
        return (
            reduce(o, "b n d -> b d", "mean").square().mean()
            + reduce(o, "b (n two) d -> b n d", "max", two=2).mean()
            + repeat(o.mean(1), "b d -> b k d", k=2).sum() * 0.01
        )


@program
def einops_vit():
    return Einops(), (torch.randn(2, 3, 4, 4),)


@dataclass
class Stats:
    mean: Tensor
    std: Tensor | None = None


@dataclass
class Output:
    loss: Tensor
    stats: Stats
    hidden: list = field(default_factory=list)
    meta: dict = field(default_factory=dict)


class Mode(enum.Enum):
    A = "a"
    B = "b"


class KwargsNet(nn.Module):
    def __init__(self, **cfg):
        super().__init__()
        self.cfg = cfg
        self.blocks = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("text", "image", "shared")})
        self.mode = Mode.A

    def block(self, x, *args, name="shared", act=None, residual=True, **kw):
        y = self.blocks[name](x)
        y = y if act is None else getattr(F, act)(y)
        return x + y * kw.get("scale", 1.0) if residual else y

    def forward(self, x, *, labels=None, return_hidden=True, **kwargs):
        hid = []
        for name, opts in self.cfg.items():
            x = self.block(x, name=name, **opts)
            hid.append(x)
        if self.mode is Mode.A:
            x = x * 2
        match kwargs:
            case {"scale": s}:
                x = x * s
            case _:
                pass
        loss = F.mse_loss(x, labels) if labels is not None else x.square().mean()
        return Output(
            loss,
            Stats(x.mean(), None if not self.training else x.std()),
            hid if return_hidden else [],
            {"n": len(hid), "norms": {f"l{i}": h.norm().item() for i, h in enumerate(hid)}},
        )


@program
def kwargs_dataclass():
    return KwargsNet(text={"act": "relu"}, image={"act": "gelu", "scale": 0.5}, shared={"residual": False}), {
        "x": torch.randn(3, 4),
        "labels": torch.randn(3, 4),
        "scale": torch.tensor(0.7),
    }


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(5, 4)})
        self.heads = nn.ModuleDict(OrderedDict(cls=nn.Linear(4, 3), reg=nn.Linear(4, 1)))

    def forward(self, batch, tasks):
        losses = defaultdict(float)
        feats = {k: self.enc[k](v) for k, v in batch.items() if k in self.enc}
        for task, (mod, y) in tasks.items():
            out = self.heads[task](feats[mod])
            losses[task] += F.cross_entropy(out, y) if task == "cls" else F.mse_loss(out.squeeze(-1), y)
        return {"loss": sum(losses.values()), **{f"{k}_loss": v.detach() for k, v in losses.items()}}


class RouterFlat(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = Router()

    def forward(self, a, b, c, d):
        return self.r({"a": a, "b": b}, {"cls": ("a", c), "reg": ("b", d)})


@program
def moduledict_tasks():
    return RouterFlat(), (torch.randn(3, 3), torch.randn(3, 5), torch.tensor([0, 2, 1]), torch.randn(3))


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.att = nn.MultiheadAttention(4, 2, batch_first=True)
        self.o = nn.Linear(4, 2)

    def forward(self, seqs, labels):
        pads = nn.utils.rnn.pad_sequence(seqs, batch_first=True)
        lens = torch.tensor([len(s) for s in seqs])
        packed = nn.utils.rnn.pack_padded_sequence(pads, lens, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        m = torch.arange(h.shape[1])[None] >= lens[:, None]
        a, _ = self.att(h, h, h, key_padding_mask=m)
        pooled = torch.stack([a[i, :n].mean(0) for i, n in enumerate(lens)])
        return F.cross_entropy(self.o(pooled), labels)


class RaggedFlat(Ragged):
    def forward(self, a, b, c, y):
        return super().forward([a, b, c], y)


@program
def ragged_lists():
    return RaggedFlat(), (torch.randn(4, 3), torch.randn(2, 3), torch.randn(3, 3), torch.tensor([0, 1, 1]))


@dataclass(frozen=True)
class Out:
    loss: torch.Tensor
    logits: torch.Tensor
    aux: dict = field(default_factory=dict)


class Heads(NamedTuple):
    cls: torch.Tensor
    reg: torch.Tensor


Pair = namedtuple("Pair", "loss extra")


class Matcher(nn.Module):
    """match on configurations, on tuples of shapes and on class patterns."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(self.build(s) for s in spec)

    @staticmethod
    def build(s):
        match s:
            case ("linear", int(i), int(o)):
                return nn.Linear(i, o)
            case {"kind": "norm", "dim": d, **rest}:
                return nn.LayerNorm(d, **rest)
            case "relu" | "gelu" as name:
                return {"relu": nn.ReLU, "gelu": nn.GELU}[name]()
            case _:
                raise ValueError(s)

    def forward(self, x):
        for s, layer in zip(self.spec, self.layers):
            match layer:
                case nn.Linear(in_features=i) if x.shape[-1] != i:
                    x = F.pad(x, (0, i - x.shape[-1]))
                case nn.LayerNorm():
                    x = x + 0.1
            match (y := layer(x)).shape:
                case [_, d] if d == x.shape[-1]:
                    x = x + y
                case _:
                    x = y
        return Out(x.square().mean(), x, {"n": len(self.layers)})


@program
def match_statements():
    spec = [("linear", 6, 8), "gelu", {"kind": "norm", "dim": 8, "eps": 1e-4}, ("linear", 10, 4), "relu"]
    return Matcher(spec), (torch.randn(4, 6),)


class Dispatch(nn.Module):
    """singledispatch on what comes, lru_cache on tables, partials of losses."""

    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.losses = [functools.partial(F.huber_loss, delta=0.5), functools.partial(F.smooth_l1_loss, beta=2.0)]

    @functools.singledispatchmethod
    def embed(self, x):
        raise TypeError(type(x))

    @embed.register
    def _(self, x: torch.Tensor):
        return self.emb(x) if x.dtype == torch.long else x

    @embed.register(list)
    def _(self, xs):
        return torch.stack([self.embed(x) for x in xs]).mean(0)

    @staticmethod
    @functools.cache
    def table(n, dtype):
        pos = torch.arange(n)[:, None] / 10 ** torch.arange(3)[None]
        return torch.cat([pos.sin(), pos.cos()], -1).to(dtype)

    def forward(self, ids, feats):
        h = self.embed([ids, feats])
        h = h + self.table(h.size(-2), h.dtype)
        y = self.lin(h)
        return functools.reduce(operator.add, (f(y, torch.zeros_like(y)) for f in self.losses))


@program
def dispatch_and_caches():
    return Dispatch(), (torch.tensor([[1, 2, 3], [4, 5, 8]]), torch.randn(2, 3, 6))


class Hooked(nn.Module):
    """Features collected by forward hooks in a context, and a perceptual loss over them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(4, 3)

    @contextlib.contextmanager
    def features(self, *layers):
        seen, handles = {}, []
        for i in layers:
            handles.append(self.net[i].register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(i, out)))
        try:
            yield seen
        finally:
            for h in handles:
                h.remove()

    def forward(self, x, ref):
        with self.features(1, 3) as a:
            y = self.net(x)
        with torch.no_grad(), self.features(1, 3) as b:
            self.net(ref)
        style = sum(F.l1_loss(self.gram(a[k]), self.gram(b[k])) for k in a)
        return style + self.head(y.mean((2, 3))).logsumexp(-1).mean()

    @staticmethod
    def gram(f):
        f = f.flatten(2)
        return f @ f.mT / f.size(-1)


@program
def features_by_hooks():
    return Hooked(), (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8))


class Tied(nn.Module):
    """Weights tied by a property, a parametrized layer, checkpointed blocks with keyword arguments."""

    def __init__(self, vocab=11, d=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(d, d), "n": nn.LayerNorm(d)}) for _ in range(3))
        self.sym = nn.Linear(d, d, bias=False)
        parametrize.register_parametrization(self.sym, "weight", Symmetric())
        parametrize.register_parametrization(self.blocks[0]["a"], "weight", nn.utils.parametrizations._WeightNorm(0))

    @property
    def lm_head(self):
        return self.emb.weight

    def block(self, m, x, *, scale=1.0):
        return x + scale * F.silu(m["a"](m["n"](x)))

    def forward(self, ids):
        x = self.emb(ids)
        for i, m in enumerate(self.blocks):
            x = checkpoint(self.block, m, x, use_reentrant=False, scale=0.5 + i)
        x = checkpoint_sequential(nn.Sequential(self.sym, nn.Tanh()), 2, x, use_reentrant=False)
        with parametrize.cached():
            x = x + self.sym(x)
        logits = F.linear(x[:, :-1], self.lm_head)
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], label_smoothing=0.1)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


@program
def tied_parametrized_checkpointed():
    return Tied(), (torch.randint(0, 11, (2, 5)),)


class Gated(torch.autograd.Function):
    """Its backward looks at needs_input_grad, marks what is not differentiable and takes None."""

    @staticmethod
    def forward(ctx, x, w, bias=None, k=2):
        keep = x.abs().topk(k, -1).indices
        hard = torch.zeros_like(x).scatter_(-1, keep, 1.0)
        ctx.save_for_backward(x, w, hard)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(keep)
        ctx.set_materialize_grads(False)
        y = (x * hard) @ w.t()
        return (y if bias is None else y + bias), keep

    @staticmethod
    def backward(ctx, g, _):
        if g is None:
            return None, None, None, None
        x, w, hard = ctx.saved_tensors
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = g @ w * (hard + 0.1 * (1 - hard))
        if ctx.needs_input_grad[1]:
            gw = g.t() @ (x * hard)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            gb = g.sum(0)
        return gx, gw, gb, None


class TopGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.w = nn.Linear(6, 5), nn.Parameter(torch.randn(4, 5) * 0.3)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        y, keep = Gated.apply(self.inp(x), self.w, self.bias)
        z, _ = Gated.apply(x[:, :5], self.w)
        return Pair(y.square().mean() + z.sin().mean(), keep)


@program
def function_needs_input_grad():
    return TopGate(), (torch.randn(4, 6),)


class Streams(nn.Module):
    """Generators, itertools, zip_longest, star targets, chained comparisons, nested comprehensions and defaults."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({k: nn.Linear(4, 4) for k in "abc"})

    def windows(self, x, size=3):
        start = 0
        while (end := start + size) <= x.size(1):
            yield (w := x[:, start:end]).mean(1), w.size(1)
            start += 1

    def outputs(self, x):
        for name, (w, n) in zip(itertools.cycle(self.net), self.windows(x)):
            yield from ((name, self.net[name](w) / n),)

    def forward(self, x):
        by_name: dict[str, list[torch.Tensor]] = {}
        for name, y in self.outputs(x):
            by_name.setdefault(name, []).append(y)
        first, *rest, last = itertools.chain.from_iterable(by_name.values())
        both = [a * b for a, b in itertools.pairwise([first, *rest, last])]
        total = torch.stack(both).sum() if 0 < len(both) <= 10 else first.sum()
        try:
            extra = by_name["zzz"][0]
        except KeyError as e:
            extra = last * len(e.args[0])
        finally:
            total = total * 0.5
        return {"loss": total.tanh() + extra.square().mean(), "n": {k: len(v) for k, v in by_name.items()}}


@program
def generators_and_itertools():
    return Streams(), (torch.randn(2, 6, 4),)


@dataclass
class State:
    h: torch.Tensor
    c: torch.Tensor
    steps: int = 0

    def __add__(self, other):
        return replace(self, h=self.h + other.h, c=self.c + other.c, steps=max(self.steps, other.steps))


class Records(nn.Module):
    """A state kept in a dataclass with operators, results as NamedTuples in a dict."""

    def __init__(self):
        super().__init__()
        self.i, self.f = nn.Linear(8, 5), nn.Linear(8, 5)

    def step(self, s, x):
        u = torch.cat([x, s.h[:, :4]], -1) if s.steps else F.pad(x, (0, 4))
        c = s.c * torch.sigmoid(self.f(u)) + self.i(u)
        return replace(s, h=torch.tanh(c), c=c, steps=s.steps + 1)

    def forward(self, x):
        s = State(x.new_zeros(len(x), 5), x.new_zeros(len(x), 5))
        r = functools.reduce(self.step, x[..., :4].unbind(1), s)
        back = functools.reduce(self.step, reversed(x[..., 4:].unbind(1)), s)
        both = r + back
        out = {"fwd": Heads(r.h, r.c), "both": Heads(cls=both.h, reg=both.c)}
        return sum(h.cls.mean() * h.reg.square().mean() for h in out.values()), out


@program
def states_in_records():
    return Records(), (torch.randn(3, 5, 8),)


class Augment(nn.Module):
    """Byte-level augmentation in the model: uint8 images, flips and crops from a checksum of the data, lookup tables."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("gamma", ((torch.arange(256) / 255) ** 1.5 * 255).round().to(torch.uint8))

    def forward(self, img):
        sums = img.to(torch.int64).sum((1, 2, 3))
        flip = (sums % 2 == 1)[:, None, None, None]
        img = torch.where(flip, img.flip(-1), img)
        img = self.gamma[img.long()]
        img = img ^ ((sums & 0x0F).to(torch.uint8)[:, None, None, None] << 1)
        off = sums % 3
        rows = off[:, None] + torch.arange(8)
        img = img[torch.arange(len(img))[:, None], :, rows].permute(0, 2, 1, 3)
        x = img.to(self.conv.weight.dtype).div_(127.5).sub_(1.0)
        return self.conv(x).relu().mean((2, 3)).logsumexp(-1).mean()


@program
def bytes_augmented():
    return Augment(), (torch.randint(0, 256, (2, 3, 10, 10), dtype=torch.uint8),)


class History(nn.Module):
    """Numbers of weights kept in lists, averaged and given back."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        hist, norms = [], {}
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            loss = x.square().mean()
            hist.append(loss.item())
            norms[f"layer{i}"] = float(x.norm())
        mean = sum(hist) / len(hist)
        spread = max(hist) - min(hist)
        return {"loss": loss * (1 + 0.1 * mean), "mean": mean, "spread": spread, "norms": norms, "hist": hist}


@program
def history_of_items():
    return History(), (torch.randn(4, 6),)
