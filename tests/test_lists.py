"""Lists whose length depends on values: grown in branches, in loops with a break and in scans, then used as lists are.

Each function of a parameter and the batch gives torch's values and gradients for several weights, with one program and
no island.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mycel

ROWS = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Of(nn.Module):
    """A function of a parameter and the batch."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.w = fn, nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return self.fn(self.w, x)


CASES = []


def case(fn):
    CASES.append(fn)
    return fn


@case
def kept_where_positive(w, x):
    kept = []
    for row in x[:6]:
        y = (row * w).sum()
        if y > 0:
            kept.append(y)
    if not kept:
        return w.sum()
    if len(kept) > 2:
        return torch.stack(kept).mean() * len(kept) + kept[-1] * kept[1] * kept[2]
    return sum(kept) + max(kept) - min(kept) * kept[0]


@case
def either_branch_adds(w, x):
    small, large = [], [w.sum()]
    for row in x[:5]:
        y = (row * w).sum()
        if y > 0.5:
            large.append(y)
            large = large + [y * 2]
        else:
            small.insert(0, y)
    return torch.stack(large).square().mean() + len(small) + sum(s * s for s in large[:1]) + large[0]


@case
def history_until_a_break(w, x):
    history, values = [], []
    for i in range(6):
        y = (x[i] * w).sum()
        history.append(y.item())
        values.append(y.tanh())
        if y > 0.5:
            break
    mean = sum(history) / len(history)
    return sum(values) * mean + max(history) * values[0] + history[-1] + values[-1]


@case
def returns_of_an_episode(w, x):
    logs, rewards = [], []
    for i in range(6):
        logs.append((w * x[i]).tanh().sum())
        rewards.append((w * x[i]).sum())
        if rewards[-1] > 0.7:
            break
    total, returns = 0.0, []
    for r in reversed(rewards):
        total = r + 0.9 * total
        returns.insert(0, total)
    returns = torch.stack(returns).detach()
    weighted = 0.0
    for i, (log, r) in enumerate(zip(logs, rewards, strict=True)):
        weighted = weighted + i * log * r
    return (torch.stack(logs) * (returns - returns.mean())).sum() + weighted


@case
def parts_joined(w, x):
    parts = [torch.stack([w, w * 2])]
    for row in x[:4]:
        if (row * w).sum() > 0:
            parts.append(torch.stack([row * w, row + w]))
    counts = [1.5]
    if len(parts) > 1:
        counts.append(w.sum().item())
    return (
        torch.cat(parts).square().mean(0).sum()
        + torch.cat(parts, 1).sum()
        + torch.tensor(counts, dtype=torch.float64).sum()
    )


@case
def long_loop_with_a_break(w, x):
    history, values = [], []
    for i in range(50):
        y = (x[i] * w).sum()
        history.append(y.item())
        values.append(y.tanh())
        if len(history) > 3 and history[-1] + history[-2] > 2.5:
            break
    spread = torch.stack(values).var() + torch.tensor(history, dtype=torch.float64).mean()
    return sum(values) * (sum(history) / len(history)) + max(history) * values[0] + history[-1] + values[2] + spread


@case
def some_turns_of_a_long_loop(w, x):
    values, turns = [w.sum()], []
    for i in range(50):
        y = (x[i] * w).sum()
        if y > 0:
            values.append(y.tanh())
        if y > 2.0:
            break
        turns.append(i)
    return torch.stack(values).mean() * len(turns) + values[-1] + sum(values)


@case
def two_lists_of_one_loop(w, x):
    a, b = [], []
    for i in range(40):
        a.append((x[i] * w).sum())
        b.append((x[i] * w).sin().sum())
        if a[-1] > 2.5:
            break
    total = 0.0
    for y in a:
        total = total * 0.5 + y
    return (torch.stack(a) * torch.stack(b)).sum() + total


@case
def rows_of_a_scan(w, x):
    h, states, sums, positive = w, [], [], []
    for row in x:
        h = torch.tanh(h * row + w)
        states.append(h)
        sums.append(h.sum().item())
        if h[0] > 0:
            positive.append(h[1])
    return (
        torch.stack(states).square().mean()
        + sum(sums) / len(sums) * w.sum()
        + states[-1].sum()
        + sums[3]
        + sum(positive)
    )


@case
def clone_written_in_a_loop(w, x):
    y = x[0] * w
    while y.square().sum() < 50:
        z = y.clone()
        z[0] = z[0] * 2 + 1
        y = z
    return y.sum()


@case
def taken_from_either_end(w, x):
    kept = [w * 0]
    for row in x[:6]:
        if (row * w).sum() > 0:
            kept.append(row * w)
    kept.append(w)
    first, last = kept.pop(0), kept.pop()
    between = kept.pop() if kept else w * 3
    return first.sum() + last.sum() * 3 + between.sum() * 5 + sum(k.square().sum() for k in kept)


@case
def a_queue(w, x):
    queue, total = [], w.sum() * 0
    for row in x[:6]:
        y = (row * w).sum()
        if y > 0:
            queue.append(y)
        if len(queue) > 2:
            total = total * 0.5 + queue.pop(0)
    return total + len(queue) * w.sum()


@case
def a_stack_machine(w, x):
    stack = []
    for row in x[:8]:
        y = (row * w).sum()
        if y > 0 or len(stack) < 2:
            stack.append(y)
        else:
            b = stack.pop()
            a = stack.pop()
            stack.append(a * b.tanh() + y)
    return sum(stack)


@case
def written_among_those_there(w, x):
    kept = [w * 1, w * 2]
    if (x[0] * w).sum() > 0:
        kept.append(w * 3)
    kept[-1] = w * 2
    kept[0] += w * 5
    del kept[1]
    return sum(k.sum() for k in kept)


@case
def places_that_weights_decide(w, x):
    xs = [w * i for i in range(5)]
    k = int((x[0] * w).abs().sum()) % 5
    xs[k] = w * 10
    xs[-k - 1] += 1
    xs.insert(k, w * 7)
    popped = xs.pop((k + 2) % 6)
    return sum(a.sum() * i for i, a in enumerate(xs)) + xs[k].sum() + popped.sum() * 2


@case
def best_first(w, x):
    todo, out = [(w * i, i) for i in range(4)], w.sum() * 0
    while todo:
        scores = torch.stack([t.sin().sum() for t, _ in todo])
        chosen, number = todo.pop(int(scores.argmax()))
        out = out * 0.5 + chosen.sum() * number
    return out


@case
def sorted_by_scores(w, x):
    beams = [((row * w).sum(), row) for row in x[:5]]
    beams.sort(key=lambda b: b[0], reverse=True)
    least = min(beams, key=lambda b: b[0])
    numbers = sorted([(row * w).sum().item() for row in x[:4]])
    return sum(score * i + (row * w).prod() for i, (score, row) in enumerate(beams)) + least[0] * numbers[1]


@case
def comprehensions_that_choose(w, x):
    kept = [row * w for row in x[:5] if (row * w).sum() > 0]
    total = sum((k * i).sum() for i, k in enumerate(kept))
    return total + len([k for k in kept if k[0] > 0]) * w.sum() + max([y.sum() for y in kept] + [w.sum()])


@case
def while_with_a_counter(w, x):
    history, y, i = [], w.abs().sum(), 0
    while y < 50 and i < 30:
        y = y * 1.3 + 1
        history.append(y)
        i += 1
    return torch.stack([*history, y]).sum() + len(history) * i


@case
def while_it_is_short(w, x):
    history = [w.abs().sum()]
    while history[-1] < 50 and len(history) < 30:
        history.append(history[-1] * 1.3 + 1)
    return torch.stack(history).sum() + len(history)


@case
def while_true(w, x):
    history, y, i = [], w.abs().sum(), 0
    while True:
        y = y * 1.3 + 1
        history.append(y)
        i += 1
        if y > 50 or i >= 25:
            break
    return sum(history) + history[-1] * history[0]


@case
def written_at_a_turn(w, x):
    xs, y, i = [w.sum() * 0] * 20, w.sum(), 0
    while y.abs() < 50 and i < 20:
        y = y * 1.3 + 1
        xs[i] = y
        i += 1
    return sum(xs)


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_lists_are_pythons(fn):
    model = Of(fn)
    derived = mycel.value_and_grad(model, wrt=model)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            model.w.copy_(torch.randn(3, dtype=torch.float64) * (0.3 + seed))
        model.w.grad = None
        wanted = model(ROWS)
        wanted.backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?s).*runs as plain Python")
            value, grads = derived(ROWS)
        torch.testing.assert_close(value, wanted.detach())
        torch.testing.assert_close(grads["w"], model.w.grad)


def test_a_long_loop_stays_one():
    text = str(mycel.capture(Of(rows_of_a_scan), ROWS))
    assert text.count("tanh(") == 1 and "scan(" in text
    assert "loop(" in str(mycel.capture(Of(two_lists_of_one_loop), ROWS))


def test_an_item_that_is_not_there_stops_the_program():
    def second(w, x):
        kept = []
        for row in x[:3]:
            if (row * w).sum() > 0:
                kept.append(row * w)
        return kept[1].sum()

    model = Of(second)
    run = mycel.jit(model, strict=True)
    with torch.no_grad():
        model.w.fill_(1.0)
    with pytest.raises(mycel.RunError, match="list index out of range"):
        with torch.no_grad():
            model.w.zero_()
        run(ROWS)


def given_away(w, x):
    kept = [w]
    if (x * w).sum() > 0:
        kept.append(w)
    return nn.utils.parameters_to_vector(kept).sum()


def zipped_with_others(w, x):
    kept, total = [], w * 0
    for row in x[:3]:
        if (row * w).sum() > 0:
            kept.append(row)
    for row, scale in zip(kept, [1.0, 2.0, 3.0], strict=False):
        total = total + row * scale
    return total


def without_an_end(w, x):
    history, y = [], w.abs().sum() + 0.1
    while y < 50:
        y = y * 1.3 + 1
        history.append(y)
    return sum(history)


def of_several_types(w, x):
    xs = [w, w.sum(), x]
    return xs[int((x[0] * w).abs().sum()) % 3].sum()


REFUSED = {
    without_an_end: "history has another number of items .* a counter in its test",
    of_several_types: "they are not of one type",
    given_away: "kept has other items .* given to code",
    zipped_with_others: "stands beside",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__)
def test_what_has_no_meaning_for_all_lengths_is_refused_or_an_island(fn):
    model = Of(fn)
    with torch.no_grad():
        model.w.fill_(1.0)
    with pytest.raises(mycel.CaptureError, match=f"(?s){REFUSED[fn]}"):
        mycel.jit(model, strict=True)(ROWS)
    with pytest.warns(UserWarning, match="runs as plain Python"):
        torch.testing.assert_close(mycel.jit(model)(ROWS), model(ROWS))


def kept_where_positive_itself(w, x):
    return [(row * w).sum() for row in x[:6] if (row * w).sum() > 0]


def in_a_dict_and_a_tuple(w, x):
    kept = {"all": [], "some": ([w], 3)}
    for i in range(40):
        kept["all"].append(x[i] * w)
        if kept["all"][-1].sum() > 2:
            kept["some"][0].append(w * 2)
            break
    return kept


@pytest.mark.parametrize("fn", [kept_where_positive_itself, in_a_dict_and_a_tuple], ids=lambda f: f.__name__)
def test_lists_that_are_returned_have_the_items_that_are_there(fn):
    model = Of(fn)
    run, lengths = mycel.jit(model, strict=True), set()
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            model.w.copy_(torch.randn(3, dtype=torch.float64) * (0.3 + seed))
        got, want = run(ROWS), model(ROWS)
        torch.testing.assert_close(got, want)
        lengths.add(len(want if isinstance(want, list) else want["all"]))
    assert len(lengths) > 1 and len(run.entries) == 1


def test_a_loop_that_outlives_its_counters_is_stopped():
    def deceived(w, x):
        history, y, i = [], w.sum(), 0
        while y < 50 and i < 20:
            y = y * 1.01
            history.append(y)
            i += 1 if i < 5 else 0
        return sum(history)

    model = Of(deceived)
    with torch.no_grad():
        model.w.fill_(1.0)
    with pytest.raises((mycel.RunError, mycel.CaptureError), match=r"more than|another number"):
        mycel.jit(model, strict=True)(ROWS)


def keys(w, x):
    kept = [i for i in range(3) if (x[i] * w).sum() > 0]
    return x.sum() * len({k: k + 1 for k in kept})


def items_of_a_set(w, x):
    kept = []
    for i in range(3):
        if (x[i] * w).sum() > 0:
            kept.append(i % 2)
    return x.sum() * len(set(kept))


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("fn", [keys, items_of_a_set], ids=lambda f: f.__name__)
def test_items_that_may_be_there_are_no_keys(fn):
    """A dict would have all of them: such code stays Python."""
    model = Of(fn)
    run = mycel.jit(model)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            model.w.copy_(torch.randn(3, dtype=torch.float64))
        torch.testing.assert_close(run(ROWS), model(ROWS))


def test_where_the_batch_decides_a_list_has_its_length():
    def kept(w, x):
        rows = []
        for row in x:
            if row.sum() > 0:
                rows.append(row * w)
        return rows

    model = Of(kept)
    with torch.no_grad():
        model.w.fill_(2.0)
    for x in (ROWS[:4], -ROWS[:4]):
        got, want = mycel.jit(model)(x), model(x)
        assert len(got) == len(want)
        torch.testing.assert_close(got, want)
