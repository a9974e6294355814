"""A layer of experts alone, told by its batch where tokens go."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import mycel
from mycel.ir import Program, walk

SPLIT = {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}  # of a Layer, over ranks


def operators(program: Program) -> set[str]:
    return {e.op.name for _, e in walk(program)}


class Layer(nn.Module):
    """A layer of experts that is told where tokens go; its loss is the square of what it gives."""

    def __init__(self, experts: int, width: int = 4, hidden: int = 6, capacity: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.capacity = capacity
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, width, hidden, dtype=torch.float64))

    @staticmethod
    def gate(h: torch.Tensor) -> torch.Tensor:
        a, b = h.chunk(2, dim=-1)
        return F.silu(a) * b

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = mycel.experts(x, ids, weights, self.up, self.down, gate=self.gate, capacity=self.capacity)
        return (x + y).square().mean()


class Routed(Layer):
    """A layer that chooses by itself, the first experts more often than the last."""

    def __init__(self, experts: int, width: int = 4, chosen: int = 2, hidden: int = 6) -> None:
        super().__init__(experts, width, hidden)
        self.router = nn.Linear(width, experts, dtype=torch.float64)
        self.router.bias.data = torch.linspace(2, -2, experts, dtype=torch.float64)
        self.scale, self.chosen = nn.Parameter(torch.ones(width, dtype=torch.float64)), chosen

    def choices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(self.router(x * self.scale).softmax(-1), self.chosen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choices(x)
        return super().forward(x * self.scale, ids, weights)


class Residual(Routed):
    """A layer of a model that adds to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choices(x)
        return x + mycel.experts(x, ids, weights, self.up, self.down, gate=self.gate)


class Stack(nn.Sequential):
    """Layers with more and more experts; its loss is the square of what they give."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(*(Residual(3 + i) for i in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Mixed(Routed):
    """A layer with a product before it, and experts that are larger than their tokens: the rows travel."""

    def __init__(self) -> None:
        super().__init__(7, 16, chosen=1, hidden=256)
        self.before = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(self.before(x)))


class Shared(Mixed):
    """The same with an expert that all tokens go to, as DeepSeek has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((16, 64), (64, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        weights, ids = self.choices(x)
        y = mycel.experts(x * self.scale, ids, weights, self.up, self.down, gate=self.gate)
        return (x + y + self.second(F.gelu(self.first(x)))).square().mean()


def routed(how: str, experts: int, tokens: int = 8, chosen: int = 2, width: int = 4) -> dict[str, torch.Tensor]:
    """A batch for a Layer: tokens by chance, to one expert alone, or to the last two, so that others have none."""
    g = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(experts, generator=g)[:chosen] for _ in range(tokens)])
    ids = {"random": ids, "one": torch.zeros_like(ids), "few": experts - 1 - ids % 2}[how]
    x, weights = (torch.randn(tokens, n, generator=g, dtype=torch.float64) for n in (width, chosen))
    return {"x": x, "ids": ids, "weights": weights}


class Expert(nn.Module):
    """As most have it: gated, or with biases and one product up."""

    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=not gated), nn.Linear(hidden, width, bias=not gated)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(h)


class Loop(nn.Module):
    """A layer that goes through its experts, in one of the ways that people write it; its loss is the square of what it
    gives."""

    def __init__(self, how: str, experts: int = 3, width: int = 4, gated: bool = True, hidden: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.router = how, nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, hidden, gated) for _ in range(experts))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        return (x + getattr(self, self.how)(x, weights / weights.sum(-1, keepdim=True), ids)).square().mean()

    def added(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y

    def in_place(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y[token] += weights[token, place, None] * expert(x[token])
        return y

    def in_place_behind(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y[token] = expert(x[token]) * weights[token, place, None] + y[token]
        return y

    def put(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_put_((token,), expert(x[token]) * weights[token, place, None], accumulate=True)
        return y

    def scattered(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            rows = expert(x[token]) * weights[token, place, None]
            y.scatter_add_(0, token[:, None].expand_as(rows), rows)
        return y

    def scattered_repeated(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            rows = expert(x[token]) * weights[token, place, None]
            y = y.scatter_add(0, token.view(-1, 1).repeat(1, x.shape[1]), rows)
        return y

    def scattered_backwards(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The last element of a row is added to the first: no layer of experts."""
        y, width = torch.zeros_like(x), torch.arange(x.shape[1])
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            rows = expert(x[token]) * weights[token, place, None]
            y.scatter_add_(0, (token[:, None] + width) % len(x), rows)
        return y

    def copied(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_copy_(0, token, y[token] + expert(x[token]) * weights[token, place, None])
        return y

    def mixtral(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As transformers had it before its experts were one tensor."""
        y, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for i in range(len(self.experts)):
            place, token = torch.where(mask[i])
            rows = x[None, token].reshape(-1, x.shape[-1])
            y.index_add_(0, token, (self.experts[i](rows) * weights[token, place, None]).to(x.dtype))
        return y

    def first(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """One expert for a token, of tokens in two dims."""
        x, weights, ids = (v.unflatten(0, (2, -1)) for v in (x, weights, ids))
        y = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids[..., 0] == i
            y[mask] = expert(x[mask]) * weights[..., 0][mask].unsqueeze(-1)
        return y.flatten(0, 1)

    def columns(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        for i, expert in enumerate(self.experts):
            for j in range(2):
                mask = ids[:, j] == i
                if mask.any():
                    y[mask] += weights[mask, j, None] * expert(x[mask])
        return y

    def whichever(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As tutorials have it, with the weights of all experts."""
        y, gates = torch.zeros_like(x), torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            if mask.any():
                y[mask] += expert(x[mask]) * gates[mask, i].unsqueeze(1)
        return y

    def repeated(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As DeepSeek's first models have it."""
        rows, flat = x.repeat_interleave(2, dim=0), ids.view(-1)
        y = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(rows[flat == i])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def continued(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Experts without tokens are passed over."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y

    def length_asked(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = (ids == i).nonzero(as_tuple=True)
            if len(token) > 0:
                y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y

    def counted(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As DeepSeek's own code for its third model has it."""
        y, counts = torch.zeros_like(x), torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
        for i in range(len(self.experts)):
            if counts[i] == 0:
                continue
            token, place = torch.where(ids == i)
            y[token] += self.experts[i](x[token]) * weights[token, place, None]
        return y

    def hit(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As transformers had it later: through the experts that were hit."""
        y, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for i in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, token = torch.where(mask[i].squeeze(0))
            rows = x[None, token].reshape(-1, x.shape[-1])
            y.index_add_(0, token, (self.experts[i](rows) * weights[token, place, None]).to(x.dtype))
        return y

    def hit_numbers(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for i in torch.nonzero(mask.sum(dim=(-1, -2)) > 0, as_tuple=True)[0].tolist():
            place, token = torch.where(mask[i])
            y.index_add_(0, token, self.experts[i](x[token]) * weights[token, place, None])
        return y

    def unique(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i in torch.unique(ids):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, self.experts[i](x[token]) * weights[token, place, None])
        return y

    def tutorial(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As a well-known tutorial has it: tokens in two dims, picked in one, written in two."""
        x, weights, ids = (v.unflatten(0, (2, -1)) for v in (x, weights, ids))
        gates = torch.zeros(*x.shape[:2], len(self.experts), dtype=x.dtype).scatter(-1, ids, weights)
        y, flat, flat_gates = torch.zeros_like(x), x.view(-1, x.size(-1)), gates.view(-1, gates.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            if mask.view(-1).any():
                rows = expert(flat[mask.view(-1)])
                y[mask] += (rows * flat_gates[mask.view(-1), i].unsqueeze(1)).squeeze(1)
        return y.flatten(0, 1)

    def unweighted(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, _ = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]))
        return y

    def overwritten(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """One expert for a token, as in tutorials on Switch Transformers."""
        gates = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
        best, first = gates.max(dim=-1)
        places = [torch.eq(first, i).nonzero(as_tuple=True)[0] for i in range(len(self.experts))]
        y = x.clone()
        for i, expert in enumerate(self.experts):
            y[places[i], :] = expert(x[places[i], :])
        return y * best.view(-1, 1)

    def half(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """With numbers beside the weights: one that is given, one that is trained, one for each token."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            rows = self.router.bias[0] * expert(x[token]) / weights.norm(dim=-1)[token, None]
            y.index_add_(0, token, rows * weights[token, place, None], alpha=0.5)
        return y

    def half_masked(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids[:, 0] == i
            y[mask] += 0.5 * expert(x[mask]) * weights[mask, 0, None]
        return y

    def both_masks(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Tokens by one mask, weights by another that holds once for each of them."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(-1)
            if mask.any():
                y[mask] += expert(x[mask]) * weights[ids == i].unsqueeze(-1)
        return y

    def weights_added(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask, weight = (ids == i).any(-1), (weights * (ids == i)).sum(-1)
            y[mask] += expert(x[mask]) * weight[mask].unsqueeze(-1)
        return y

    def both_masks_places(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same at places."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token = (ids == i).any(-1).nonzero().squeeze(-1)
            y.index_add_(0, token, expert(x[token]) * weights[ids == i][:, None])
        return y

    def stretched(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A weight for each column: for two tokens, as many as there are rows."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, _ = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * self.router.weight[0])
        return y

    def stretched_masked(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same for four tokens."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids[:, 0] == i
            y[mask] = expert(x[mask]) * self.router.weight[0]
        return y

    def weighed_before(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What an expert gets is weighed, not what it gives."""
        y, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            place, token = torch.where(mask[i])
            y.index_add_(0, token, expert(x[token] * weights[token, place, None]))
        return y

    def if_many_places(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Experts that few tokens choose are left out."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            if token.shape[0] > 1:
                y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y

    def if_many_inside(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same, asked in a branch that asks for less."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            if token.shape[0] > 0:  # noqa: SIM102
                if token.shape[0] > 1:
                    y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y

    def sorted_rows(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As DeepSeek's first models have it where they are not trained."""
        order, ends = ids.view(-1).argsort(), ids.view(-1).bincount(minlength=len(self.experts)).cumsum(0)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            here = order[0 if i == 0 else ends[i - 1] : ends[i]]
            y.index_add_(0, here // 2, expert(x[here // 2]) * weights.view(-1, 1)[here])
        return y

    def counted_rows(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As DeepSeek's models have it where they are not trained."""
        order, counts = ids.view(-1).argsort(), F.one_hot(ids, len(self.experts)).sum((0, 1))
        rows, done = [], 0
        for expert, n in zip(self.experts, counts.cpu().numpy(), strict=True):
            rows.append(expert(x[order // 2][done : done + n]))
            done += n
        return torch.zeros_like(x).index_add(0, order // 2, torch.cat(rows) * weights.view(-1, 1)[order])

    def full_experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """An expert takes two tokens."""
        first = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights).max(dim=-1)[1]
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token = (first == i).nonzero()[:, 0][:2]
            y[token] = expert(x[token])
        return y

    def both_overwritten(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of two experts of a token the second overwrites what the first gave."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y[token] = expert(x[token]) * weights[token, place, None]
        return y

    def last_wins(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of two experts of a token the second overwrites what the first gave."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            y[mask] = expert(x[mask])
        return y

    def if_many(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Experts that few tokens choose are left out."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids[:, 0] == i
            if mask.sum() > 1:
                y[mask] += weights[mask, 0, None] * expert(x[mask])
        return y

    def listed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Experts in any order."""
        y = torch.zeros_like(x)
        for i in [2, 0, 1]:
            token, place = torch.where(ids == i)
            if token.numel():
                y[token] += self.experts[i](x[token]) * weights[token, place, None]
        return y

    def dims_put(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Tokens in two dims, from the last expert to the first."""
        x, weights, ids = (v.unflatten(0, (2, -1)) for v in (x, weights, ids))
        y = torch.zeros_like(x)
        for i in reversed(range(len(self.experts))):
            row, token, place = torch.where(ids == i)
            y[row, token] += weights[row, token, place, None] * self.experts[i](x[row, token])
        return y.flatten(0, 1)

    def dims_added(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, weights, ids = (v.unflatten(0, (2, -1)) for v in (x, weights, ids))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, token, place = (ids == i).nonzero().unbind(1)
            rows = expert(x[row, token]) * weights[row, token, place].unsqueeze(-1)
            y.index_put_((row, token), rows, accumulate=True)
        return y.flatten(0, 1)

    def dims_columns(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, weights, ids = (v.unflatten(0, (2, -1)) for v in (x, weights, ids))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            for j in range(2):
                row, token = torch.where(ids[..., j] == i)
                if len(row):
                    y[row, token] += weights[row, token, j, None] * expert(x[row, token])
        return y.flatten(0, 1)

    def flat_ids(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Tokens follow from the places of choices."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            place = torch.where(ids.flatten() == i)[0]
            token = place // ids.shape[1]
            y.index_add_(0, token, expert(x[token]) * weights.flatten()[place, None])
        return y

    def own_sums(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What each expert gives is put into zeros of its own, which are added."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            mine = torch.zeros_like(x)
            mine[token] = expert(x[token]) * weights[token, place, None]
            y += mine
        return y

    def own_stacked(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mines = []
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            mines.append(torch.zeros_like(x).index_add(0, token, expert(x[token]) * weights[token, place, None]))
        return torch.stack(mines).sum(0)

    def own_weighed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weighed where they are tokens again."""
        mines = []
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(-1)
            mine = torch.zeros_like(x)
            mine[mask] = expert(x[mask])
            mines.append(mine * (weights * (ids == i)).sum(-1, keepdim=True))
        return sum(mines)

    def gates_asked(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The experts of a token are those with a weight."""
        gates = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token = gates[:, i].nonzero(as_tuple=True)[0]
            y.index_add_(0, token, expert(x[token]) * gates[token, i, None])
        return y

    def gates_asked_first(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same with masks, of experts that have a token."""
        gates = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = gates[:, i] > 0
            if mask.any():
                y[mask] += gates[mask, i].unsqueeze(-1) * expert(x[mask])
        return y

    def all_tokens(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Every expert gets every token, most of which have no weight."""
        gates, y = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights), 0
        for i, expert in enumerate(self.experts):
            y = y + gates[:, i : i + 1] * expert(x)
        return y

    def all_tokens_masked(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, weights, ids = (v.unflatten(0, (2, -1)) for v in (x, weights, ids))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            for j in range(2):
                y += (ids[..., j] == i).to(x.dtype).unsqueeze(-1) * weights[..., j, None] * expert(x)
        return y.flatten(0, 1)

    def two_choices(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The best, and the best of the others."""
        gates = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
        first = gates.max(-1)
        second, y = gates.scatter(1, first.indices[:, None], 0.0).max(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            for weight, chosen in (first, second):
                token = torch.where(chosen == i)[0]
                y[token] += weight[token, None] * expert(x[token])
        return y

    def full_kept(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Tokens for which their expert has no room stay as they are, as in tutorials on Switch Transformers."""
        y, hot = x.clone(), F.one_hot(ids[:, 0], len(self.experts))
        is_kept = ((hot.cumsum(0) * hot).sum(-1) - 1) < 2
        for i, expert in enumerate(self.experts):
            token = torch.where((ids[:, 0] == i) & is_kept)[0]
            y[token] = expert(x[token]) * weights[token, 0, None]
        return y

    def little(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Choices of little weight are left out."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where((ids == i) & (weights > 0.4))
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y

    def twice(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What the first experts gave goes to the next ones."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token] + y[token]) * weights[token, place, None])
        return y


class StackedLoop(nn.Module):
    """A loop over experts whose weights are rows of two tensors: gate and up in one product, or `transposed` with one
    product up."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed, self.router = transposed, nn.Linear(4, 3, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(*((3, 4, 6) if transposed else (3, 12, 4)), dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(*((3, 6, 4) if transposed else (3, 4, 6)), dtype=torch.float64))

    def expert(self, x: torch.Tensor, i: int) -> torch.Tensor:
        if self.transposed:
            return F.gelu(x @ self.up[i]) @ self.down[i]
        gate, up = F.linear(x, self.up[i]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[i])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        y = torch.zeros_like(x)
        for i in range(3):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, self.expert(x[token], i) * weights[token, place, None])
        return (x + y).square().mean()
