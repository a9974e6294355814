"""Plain values of a batch that are others at every call: each is a program, which is said once, by name."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn

import mycel


class Scheduled(nn.Module):
    """Computes with a count of steps, and is given an id."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, index=0, name="", info=None):
        scale = 1.0 / (1 + index)
        if info is not None:
            scale = scale * (info.rate if isinstance(info, Info) else info["rate"])
        return (self.linear(x) * scale).square().sum()


@dataclasses.dataclass
class Info:
    x: torch.Tensor
    rate: float


def steps_on(batches):
    """Losses of steps, those of eager torch, what was warned of, and the step."""
    torch.manual_seed(0)
    plain = Scheduled()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.01), compile=False)
    losses, eager = [], []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for args, kwargs in batches:
            losses.append(float(step(*args, **kwargs)))
            optimizer.zero_grad()
            loss = plain(*args, **kwargs)
            loss.backward()
            optimizer.step()
            eager.append(float(loss))
    return losses, eager, [w for w in seen if "was compiled for" in str(w.message)], step


X = torch.ones(3, 2)
CHANGING = {
    "by name": (lambda i: ((X,), {"index": i}), "'index'", ["0", "1", "2", "3", "4"]),
    "by position": (lambda i: ((X, i), {}), "argument 1", ["0", "1", "2", "3", "4"]),
    "text": (lambda i: ((X,), {"name": f"id{i}"}), "'name'", ["'id0'", "'id1'", "'id2'", "'id3'", "'id4'"]),
    "in a dict": (lambda i: ((X,), {"info": {"rate": i / 2}}), "'info.rate'", ["0.0", "0.5", "1.0", "1.5", "2.0"]),
    "in an object": (lambda i: ((X,), {"info": Info(X, i / 2)}), "'info.rate'", ["0.0", "0.5", "1.0", "1.5", "2.0"]),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_value_that_changes_at_every_call_is_named_once(name):
    batch, place, values = CHANGING[name]
    losses, eager, seen, step = steps_on([batch(i) for i in range(7)])
    assert losses == eager and len(step.entries) == 7
    assert len(seen) == 1 and seen[0].filename == __file__
    what, *lines = str(seen[0].message).split("\n")
    assert f"the step was compiled for 5 values of {place}," in what
    assert lines[0].split() == [*place.split(), *(v + "," for v in values[:-1]), values[-1]]
    assert lines[-1].startswith("  try ") and "torch.tensor(value)" in lines[-1]


@pytest.mark.parametrize("name", CHANGING)
def test_a_value_that_changes_is_named_by_jit_and_evaluation(name):
    batch, place, values = CHANGING[name]
    torch.manual_seed(0)
    model = Scheduled().eval()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.01), compile=False)
    for call, subject in ((mycel.jit(model), "Scheduled"), (step.evaluate, "the evaluation")):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for args, kwargs in [batch(i) for i in range(7)] * 2:
                assert float(call(*args, **kwargs)) == pytest.approx(float(model(*args, **kwargs)))
        (warning,) = [w for w in seen if "was compiled for" in str(w.message)]
        assert warning.filename == __file__
        what, line, advice = str(warning.message).split("\n")
        assert what.startswith(f"{subject} was compiled for 5 values of {place},")
        assert line.split() == [*place.split(), *(v + "," for v in values[:-1]), values[-1]]
        assert advice.startswith("  try ")


def test_what_is_tried_instead_is_one_program():
    losses, eager, seen, step = steps_on([((X,), {"index": torch.tensor(i)}) for i in range(7)])
    assert losses == pytest.approx(eager, rel=1e-6) and not seen and len(step.entries) == 1


def test_few_values_and_values_of_other_shapes_are_not_named():
    few = [((X,), {"index": i % 4, "name": f"id{i % 3}"}) for i in range(14)]
    assert not steps_on(few)[2]
    assert not steps_on([((torch.ones(i + 1, 2),), {"index": i}) for i in range(6)])[2]


def test_long_values_are_cut_and_all_that_change_are_named():
    long = [((X,), {"index": i, "name": f"{i}" * 100}) for i in range(6)]
    (warning,) = steps_on(long)[2]
    text = str(warning.message)
    assert "values of 'index', 'name'," in text and max(map(len, text.split("\n")[1:3])) < 240
