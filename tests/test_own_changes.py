"""What a model changes itself at every call: counters, flags and logs in Python, and parameters behind autograd's back.

Each `forward` is compared with torch over several calls and training steps: losses, parameters and Python state."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mycel

X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.head = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 2)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.register_buffer("average", torch.zeros(4))
        self.count, self.ready, self.mean, self.phase, self.history = 0, False, 0.0, "warm", []
        self.how = forward

    def out(self, x):
        return self.head(x @ self.w.T)

    def loss(self, x):
        return self.out(x).square().mean()

    def forward(self, x):
        return self.how(self, x)

    def python_state(self):
        numbers = [self.mean, *self.history, *getattr(self, "log", {}).values()]
        kinds = [*map(type, (self.count, self.ready, *numbers))]
        return self.count, self.ready, self.phase, kinds, [round(x, 9) for x in numbers]


def warm_up(m, x):
    m.count += 1
    return m.loss(x) * min(1.0, m.count / 4)


def cosine(m, x):
    m.count += 1
    return m.loss(x) * (1 + math.cos(math.pi * m.count / 10)) * math.exp(-m.count / 10) + m.count**0.5


def every_third(m, x):
    m.count += 1
    if m.count % 3 == 0:
        with torch.no_grad():
            m.average.mul_(0.5).add_((x @ m.w.T).mean(0))
    return m.loss(x) + m.average.sum().square()


def lazy_penalty(m, x):
    m.count += 1
    x = x.detach().requires_grad_()
    loss = m.loss(x)
    if m.count % 2 == 0:
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + g.square().sum()
    return loss


def two_phases(m, x):
    m.count = (m.count + 1) % 2
    return m.out(x).abs().mean() if m.count == 0 else m.loss(x)


def first_call(m, x):
    if not m.ready:
        with torch.no_grad():
            m.w.copy_(F.normalize(m.w, dim=1))
        m.ready = True
    return m.loss(x)


def named_phase(m, x):
    m.count += 1
    if m.count > 2:
        m.phase = "hot"
    return m.loss(x) * (2 if m.phase == "hot" else 1)


def index_of_layer(m, x):
    m.count += 1
    return m.loss(m.layers[m.count % 2](x))


def running_mean(m, x):
    loss = m.loss(x)
    m.mean = 0.9 * m.mean + 0.1 * loss.item()
    return loss / (1 + m.mean)


def log_of_numbers(m, x):
    m.count += 1
    loss = m.loss(x)
    m.log = {"loss": loss.item(), "calls": m.count}
    return loss


def made_once(m, x):
    if not hasattr(m, "smooth"):
        m.smooth = m.out(x).detach().mean(0)
    else:
        m.smooth = 0.9 * m.smooth + 0.1 * m.out(x).detach().mean(0)
    return (m.out(x) - m.smooth).square().mean()


def growing_list(m, x):
    loss = m.loss(x)
    m.history.append(loss.item())
    return loss * len(m.history)


def normalised_data(m, x):
    m.w.data = F.normalize(m.w.data, dim=1)
    return m.loss(x)


def weights_swapped_for_a_while(m, x):
    """What shares the memory that a parameter had keeps it."""
    kept, row = m.w.data, m.w.detach()[0]
    m.w.data = torch.full_like(kept, 0.1)
    smooth = m.out(x).detach()
    row.mul_(0.9)  # of what is kept
    m.w.data.add_(1.0)  # of the other
    m.w.data = kept
    return m.loss(x) + (m.out(x) - smooth).square().mean() + row.sum() * m.w.sum()


def weights_swapped_in_a_branch(m, x):
    kept = m.w.data
    if x.sum() > 100:
        m.w.data = kept * 2
    else:
        m.w.data = kept * 0.5
    smooth = m.out(x).detach()
    m.w.data = kept
    return (m.out(x) - smooth).square().mean()


def normalised_copy(m, x):
    with torch.no_grad():
        m.w.data.copy_(F.normalize(m.w.data.clone(), dim=1))
    return m.loss(x)


def part_of_a_parameter(m, x):
    with torch.no_grad():
        m.w[0].mul_(0.5)
        m.w.T[1:, 2].clamp_(-0.1, 0.1)
    return m.loss(x)


def frozen_for_a_while(m, x):
    loss = m.loss(x)
    for p in m.head.parameters():
        p.requires_grad_(False)
    m.w.requires_grad = False
    loss = loss + m.out(m.layers[0](x)).abs().mean()
    m.requires_grad_(True)
    return loss


def frozen_for_good(m, x):
    m.head.requires_grad_(False)
    return m.loss(x)


PROGRAMS = [
    warm_up, cosine, every_third, lazy_penalty, two_phases, first_call, named_phase, index_of_layer, running_mean,
    log_of_numbers, made_once, growing_list, normalised_data, normalised_copy, part_of_a_parameter,
    frozen_for_a_while, weights_swapped_for_a_while, weights_swapped_in_a_branch,
    frozen_for_good,
]  # fmt: skip


@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
def test_training_is_that_of_torch(forward):
    model = Net(forward).double()
    twin = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), compile=False)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(4):
        plain.zero_grad()
        want = twin(X)
        want.backward()
        plain.step()
        torch.testing.assert_close(step(X), want.detach())
        for (name, p), q in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")
        assert model.python_state() == twin.python_state()
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in twin.parameters()]


@pytest.mark.parametrize("forward", [warm_up, every_third, first_call, running_mean], ids=lambda f: f.__name__)
def test_what_counts_is_captured_twice_at_most(forward):
    model = Net(forward).double()
    twin, fast = copy.deepcopy(model), mycel.jit(model, strict=True)
    for _ in range(5):
        torch.testing.assert_close(fast(X), twin(X))
    assert len(fast.entries) <= 2
    assert (model.count, model.mean) == pytest.approx((twin.count, twin.mean))


def teacher(m, x):
    """A moving average of weights, changed before it is used."""
    with torch.no_grad():
        m.layers[1].weight.mul_(0.5).add_(m.layers[0].weight, alpha=0.5)
        wanted = m.layers[1](x)
    return F.mse_loss(m.layers[0](x), wanted) + m.loss(x)


def power_iteration(m, x):
    """The norm of a weight, by a vector that comes nearer at every call."""
    with torch.no_grad():
        m.average.add_(1.0).copy_(F.normalize(m.w @ (m.w.T @ m.average), dim=0))
    return m.loss(x) / (m.average @ m.w @ (m.w.T @ m.average)).sqrt()


CHANGED_BY_PARTS = [warm_up, cosine, every_third, first_call, teacher, power_iteration]


@pytest.mark.parametrize("forward", CHANGED_BY_PARTS, ids=lambda f: f.__name__)
def test_parts_of_a_batch_are_calls(forward):
    """As in a loop over the parts that calls backward for each: what the model changes it changes with each."""
    model, x = Net(forward).double(), X[:4]
    twin = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, accumulate=2)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            plain.zero_grad()
            losses = []
            for part in (x[:2], x[2:]):
                losses.append(twin(part) / 2)
                losses[-1].backward()
            plain.step()
            torch.testing.assert_close(step(x), sum(losses).detach())
            torch.testing.assert_close(model.state_dict(), twin.state_dict())
            assert model.python_state() == twin.python_state()
    assert any("each part of the batch is a call of the model" in str(w.message) for w in said)


def set_by_its_first_call(m, x):
    if not hasattr(m, "started"):
        with torch.no_grad():
            m.w.div_(2)
        m.started = True
    return m.loss(x)


def test_a_flag_that_the_first_part_sets_is_set_for_the_batch():
    """The next part is another program: the first batch is computed at once, the others in parts."""
    model, x = Net(set_by_its_first_call).double(), X[:4]
    twin = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, accumulate=2)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            plain.zero_grad()
            wanted = sum(twin(part) / 2 for part in (x[:2], x[2:]))
            wanted.backward()
            plain.step()
            torch.testing.assert_close(step(x), wanted.detach())
    (text,) = (str(w.message) for w in said)
    assert "the code sets model.started" in text and "the batch is computed at once" in text
    assert len(step.entries) == 2


def contrast(m, x):
    with torch.no_grad():
        m.average.mul_(0.9).add_((x @ m.w.T).mean(0))
    z = F.normalize(m.out(x) + m.average.sum(), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))


@pytest.mark.parametrize("forward", [contrast, running_mean], ids=lambda f: f.__name__)
def test_where_the_loss_is_that_of_the_batch_it_is_one_call(forward):
    """And so is what the model changes."""
    model, x = Net(forward).double(), X[:4]
    twin = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, accumulate=2)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        plain.zero_grad()
        wanted = twin(x)
        wanted.backward()
        plain.step()
        torch.testing.assert_close(step(x), wanted.detach())
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
        assert model.python_state() == twin.python_state()


def test_an_island_does_not_train_what_it_does_not_use():
    """A parameter that torch gives no gradient keeps its value, whatever the weight decay."""
    model = Net(growing_list).double()
    before = model.layers[0].weight.detach().clone()
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), compile=False)
    with pytest.warns(UserWarning, match="a list that the code adds to"):
        step(X)
    assert torch.equal(model.layers[0].weight, before)


def test_a_failed_capture_leaves_parameters_as_they_were():
    def broken(m, x):
        m.w.requires_grad_(False)
        m.count += 1
        raise ValueError("no")

    model = Net(broken)
    with pytest.raises(ValueError, match="no"):
        mycel.jit(model)(X)
    assert model.w.requires_grad
    assert model.count == 0


def test_annotated_names_in_branches():
    def fn(x):
        if x.sum() > 0:
            y: torch.Tensor = x * 2
        else:
            y: torch.Tensor = x - 1
        return y

    fast = mycel.jit(fn, strict=True)
    for x in (X, X.abs(), -X.abs()):
        torch.testing.assert_close(fast(x), fn(x))


def test_what_is_set_once_and_changes_nothing_is_not_captured_again():
    """A setting that was None, as transformers' problem_type is; a flag that decides is another program."""

    class Setting(nn.Linear):
        def __init__(self):
            super().__init__(3, 2, dtype=torch.float64)
            self.kind = self.branch = None

        def forward(self, x):
            self.kind = self.kind or "one"
            return super().forward(x).square().mean()

    class Branch(Setting):
        def forward(self, x):
            first, self.branch = self.branch is None, "taken"
            return super().forward(x) * (3.0 if first else 1.0)

    for model, entries in ((Setting(), 1), (Branch(), 2)):
        step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), compile=False)
        losses = [float(step(X)) for _ in range(3)]
        assert len(step.entries) == entries and model.kind == "one"
        assert losses[0] == pytest.approx(losses[2] * (1 if entries == 1 else 3)) and losses[1] == losses[2]


class OfClass(nn.Linear):
    """What is set on the class, by its name or by that of the object's type."""

    kind, gain, calls, kept = None, None, 0, None

    def __init__(self):
        super().__init__(3, 2, dtype=torch.float64)


class SetOnce(OfClass):
    kind = None

    def forward(self, x):
        SetOnce.kind = SetOnce.kind or "one"
        return super().forward(x) * (3.0 if SetOnce.kind == "other" else 1.0)


class Scaled(OfClass):
    gain = None

    def forward(self, x):
        if self.gain is None:
            type(self).gain = 2.0
            return super().forward(x)
        return super().forward(x) * self.gain


class Counted(OfClass):
    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x) * Counted.calls


class Inherited(OfClass):
    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) * self.calls


class Kept(OfClass):
    kept = None

    def forward(self, x):
        y = super().forward(x)
        if Kept.kept is not None:
            y = y + Kept.kept
        Kept.kept = y.detach().mean(0)
        return y


def held_by(cls):
    return cls.kind, cls.gain, cls.calls, cls.kept


def same(these, those):
    """Equal values of equal types."""
    return all(
        torch.allclose(x, y) if isinstance(x, torch.Tensor) else (type(x), x) == (type(y), y)
        for x, y in zip(these, those, strict=True)
    )


@pytest.fixture
def fresh_classes():
    """The classes are as they were written again after the test."""
    written = {cls: dict(vars(cls)) for cls in (OfClass, *OfClass.__subclasses__())}

    def renew():
        for cls, attributes in written.items():
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name in ("kind", "gain", "calls", "kept"):
                if name in attributes:
                    setattr(cls, name, attributes[name])

    yield renew
    renew()


@pytest.mark.parametrize("kind, entries", [(SetOnce, 1), (Scaled, 2), (Counted, 2), (Inherited, 3), (Kept, 2)])
def test_attributes_of_classes_are_as_in_torch(fresh_classes, kind, entries):
    model = kind()
    plain = [(model(X), *held_by(kind)) for _ in range(5)]
    fresh_classes()
    fast = mycel.jit(model, strict=True)
    assert all(same((fast(X), *held_by(kind)), call) for call in plain)
    assert len(fast.entries) <= entries


def test_a_setting_of_a_class_is_guarded_once_it_is_set(fresh_classes):
    model = SetOnce()
    fast = mycel.jit(model, strict=True)
    first = fast(X)
    SetOnce.kind = "other"
    torch.testing.assert_close(fast(X), first * 3)


def test_a_failed_capture_leaves_classes_as_they_were(fresh_classes):
    class Broken(OfClass):
        def forward(self, x):
            OfClass.calls, Broken.calls = 5, 6
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        mycel.jit(Broken())(X)
    assert OfClass.calls == 0 and "calls" not in vars(Broken)


class Welford:
    """A running deviation, in slots."""

    __slots__ = ("mean", "n", "squares")

    def __init__(self):
        self.n, self.mean, self.squares = 0, 0.0, 0.0

    def push(self, x):
        self.n += 1
        d = x - self.mean
        self.mean += d / self.n
        self.squares += d * (x - self.mean)


def test_numbers_in_slots_are_numbers_of_the_program():
    def by_deviation(m, x):
        loss = m.loss(x)
        m.seen.push(loss.item())
        return loss / (1 + m.seen.squares) + m.seen.mean

    def made():
        model = Net(by_deviation).double()
        model.seen = Welford()
        return model

    model, twin = made(), made()
    run = mycel.jit(model)
    for k in (1.0, 2.0, -1.0, 0.5):
        assert torch.allclose(run(X * k), twin(X * k))
        assert model.seen.n == twin.seen.n
        assert math.isclose(model.seen.squares, twin.seen.squares, abs_tol=1e-12)
    assert len(run.entries) <= 3


def once(m):
    """A hook that takes itself away."""
    handle = m.register_forward_hook(lambda module, given, out: (handle.remove(), out * 10)[1])
    return m, lambda: [*m._forward_hooks]


def taken(m):
    """A dict that calls take a tensor and a number from, and whose order stays."""
    held = {"a": 1, "x": torch.full((3,), 5.0), "n": 2.0, "z": 0}
    return lambda x: m(x) * held.pop("x", 1.0) * held.pop("n", 3.0), lambda: [*held]


def deleted(m):
    """An attribute that is there at the first call alone."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.is_first = m, True

        def forward(self, x):
            if hasattr(self, "is_first"):
                del self.is_first
                return self.layer(x) * 7
            return self.layer(x)

    model = First()
    return model, lambda: "is_first" in vars(model)


def newest(m):
    """A dict of which calls keep the last two items."""
    held = {}

    def f(x):
        held[len(held) + sum(held)] = 1
        if len(held) > 2:
            held.pop(min(held))
        return m(x) * sum(held)

    return f, lambda: held


@pytest.mark.parametrize("make", [once, taken, deleted, newest])
def test_what_code_takes_out_is_taken_out_by_calls_alone(make):
    m, x = nn.Linear(3, 3), torch.ones(1, 3)
    (theirs, then), (ours, now) = make(copy.deepcopy(m)), make(m)
    fast = mycel.jit(ours)
    fast.program(x)
    for _ in range(4):
        torch.testing.assert_close(fast(x), theirs(x))
        assert len(now()) == len(then()) if make is once else now() == then()


class Rebuilds(nn.Module):
    """Puts another list, dict, set or function in a slot at every call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(3, 3)
        self.order, self.numbers, self.seen, self.later = [2, 0, 1], {"k": 1, "text": "a"}, {0}, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        match self.kind:
            case "list":
                for k in self.order:
                    h = torch.sin(h) * (k + 1)
                self.order = self.order[1:] + self.order[:1]
            case "dict":
                h = h * self.numbers["k"] + len(self.numbers["text"])
                self.numbers = {**self.numbers, "k": self.numbers["k"] + 1, "text": self.numbers["text"] + "b"}
            case "set":
                h = h * len(self.seen)
                self.seen = self.seen | {len(self.seen)}
            case "from nothing":
                h = h * (1 if self.later is None else self.later[0])
                self.later = [2] if self.later is None else [self.later[0] + 1]
            case "function":
                self.act = torch.relu if getattr(self, "act", None) is torch.tanh else torch.tanh
                h = self.act(h)
            case "first function":
                if not hasattr(self, "act"):
                    self.act = torch.tanh
                else:
                    h = self.act(h)
        return h.square().mean()


@pytest.mark.parametrize("kind", ["list", "dict", "set", "from nothing", "function", "first function"])
def test_what_the_code_puts_in_a_slot_anew(kind):
    """The next call finds what is in it."""
    torch.manual_seed(0)
    model = Rebuilds(kind)
    twin, trained, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(4, 3)
    fast = mycel.jit(model)
    step = mycel.train_step(trained, torch.optim.SGD(trained.parameters(), 0.0), compile=False)
    for _ in range(4):
        wanted = twin(x).detach()
        torch.testing.assert_close((fast(x).detach(), step(x)), (wanted, wanted))
    for name in ("order", "numbers", "seen", "later"):
        assert getattr(model, name) == getattr(trained, name) == getattr(twin, name)


def test_a_list_that_is_another_at_every_call_stays_python():
    """After so many programs, it is one equation that Python computes."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.widths = nn.Linear(3, 3), [0.5]

        def forward(self, x):
            h = self.linear(x) * sum(self.widths)
            self.widths = [w / 2 + 0.1 for w in self.widths]
            return h.square().mean()

    torch.manual_seed(0)
    model = Grows()
    twin, x = copy.deepcopy(model), torch.randn(4, 3)
    fast = mycel.jit(model)
    with pytest.warns(UserWarning, match="widths, a list that the code makes anew at every call, has other items"):
        for _ in range(20):
            torch.testing.assert_close(fast(x), twin(x))
    assert model.widths == twin.widths
