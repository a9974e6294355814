"""Calls of jitted functions that are recorded: what they are given and return is the caller's, and what cannot be
recorded runs as it is.  Recordings are stand-ins (test_replay.py): they run the code on the memory it had then."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from test_decode import FAMILIES, model_of
from test_replay import Rerun

import mycel
from mycel import api
from mycel.run import replayed_calls
from mycel.run.replay import MOST, WORTH
from mycel.run.replayed_calls import ReplayedCall, is_transformed, refusal
from mycel.train import decode
from mycel.train.generate import Sampling, stream


class Calls:
    """The recorded calls of a test, and the context they run in."""

    def __init__(self):
        self.all, self.refused, self.context = [], [], "a stream"

    def __call__(self, code, program, device):
        self.refused.append(refusal(program))
        if self.refused[-1]:
            return code
        record = lambda context, *how: Rerun(*how)
        context = lambda: None if is_transformed() else self.context
        self.all.append(ReplayedCall(code, program, device, record, context))
        return self.all[-1]

    @property
    def why(self):
        return [replayed.why for recorded in self.all for replayed in recorded.by_context.values()]


@pytest.fixture
def calls(monkeypatch):
    Rerun.count = 0
    recorded = Calls()
    monkeypatch.setattr(api, "replayed_call", recorded)
    with torch.no_grad():
        yield recorded


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))


def test_results_are_those_of_each_call_and_stay(calls):
    model = net().eval()
    fast, xs = mycel.jit(model), [torch.randn(2, 4) for _ in range(5)]
    results = [fast(x) for x in xs]
    for x, y in zip(xs, results, strict=True):
        torch.testing.assert_close(y, model(x))
    assert Rerun.count == 1 and calls.why == [""]
    with torch.enable_grad():  # autograd records: not replayed
        assert fast(xs[0]).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(fast(xs[1]), results[1])
    torch.testing.assert_close(fast(xs[2].t().contiguous().t()), results[2])
    assert Rerun.count == 1


def test_random_numbers_are_drawn_anew(calls):
    model = net().train()
    fast, x = mycel.jit(model), torch.randn(2, 4)
    torch.manual_seed(1)
    first = [fast(x) for _ in range(4)]
    torch.manual_seed(1)
    again = [fast(x) for _ in range(4)]
    assert Rerun.count == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2], first[3])


def test_weights_that_moved_are_recorded_anew(calls):
    """Loaded elsewhere, or turned in the memory they had; never copied in at each call."""
    model = net().eval()
    fast, x = mycel.jit(model), torch.randn(2, 4)
    kept = []

    def again(recordings, times=1):
        for _ in range(times):
            torch.testing.assert_close(fast(x), model(x))
        assert Rerun.count == recordings

    again(1, 2)
    for p in model.parameters():
        kept.append(p.data)
        p.data = 2 * p.data
    again(2)
    model[0].weight.data = model[0].weight.data.t()  # a square
    again(3)
    model[0].weight.mul_(3)  # where it lies
    again(3)
    (replayed,) = calls.all[0].by_context.values()
    assert not replayed.why and len(replayed.copies) == 1


def test_what_pays_is_recorded_as_often_as_needed(calls):
    model = net().eval()
    fast, x, kept = mycel.jit(model), torch.randn(2, 4), []
    fast(x)
    for _ in range(MOST + 2):
        kept.append(model[0].weight.data)
        model[0].weight.data = kept[-1] + 1
        for _ in range(WORTH):
            torch.testing.assert_close(fast(x), model(x))
    assert Rerun.count == MOST + 2 and calls.why == [""]
    for _ in range(MOST + 2):
        kept.append(model[0].weight.data)
        model[0].weight.data = kept[-1] + 1
        torch.testing.assert_close(fast(x), model(x))
    assert "elsewhere" in calls.why[0]


def test_a_cache_is_written_where_it_lies(calls, monkeypatch):
    """Text by recorded code, prompt after prompt: each recorded once for each size of the cache, with guesses and
    without."""
    monkeypatch.setattr(decode, "LEAST_IN_C", 16)
    model = model_of("llama", **FAMILIES["llama"])
    prompts = [[5, 7, 11, 2, 5, 7], [3, 1, 4], [5, 7, 11, 2, 5, 7]]
    wanted = [
        model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    for guess in (False, True):
        Rerun.count, decoder = 0, decode.Decoder(model, 256, guess=guess)
        texts = [[*stream(model, ids, Sampling(20, 0.0), [], decoder)] for ids in prompts]
        assert texts == wanted
        assert Rerun.count == len(decoder.fast.entries) and not any(calls.why)
    assert Rerun.count > 2 and len(decoder.caches) == 2


def test_an_argument_that_is_written_is_the_callers(calls):
    def push(box, x):
        box.index_copy_(0, torch.tensor([1]), x)
        return box.sum(0)

    fast, boxes = mycel.jit(push), [torch.zeros(3, 4) for _ in range(2)]
    for box in (boxes[0], boxes[0], boxes[0], boxes[1], boxes[1]):
        x = torch.randn(1, 4)
        torch.testing.assert_close(fast(box, x), x[0])
        torch.testing.assert_close(box[1], x[0])
    assert Rerun.count == 2 and calls.why == [""]


def test_each_context_has_its_own(calls):
    fast, x = mycel.jit(lambda x: 2 * x.sin()), torch.randn(3)
    for context in ("a stream", "another", "a stream", "another", None, None):
        calls.context = context
        assert torch.equal(fast(x), 2 * x.sin())
    assert Rerun.count == 2 and list(calls.all[0].by_context) == ["a stream", "another"]
    for i in range(2 * MOST):
        calls.context = i // 2
        assert torch.equal(fast(x), 2 * x.sin())
    assert len(calls.all[0].by_context) == MOST


def test_what_stands_around_a_call_sees_its_operators(calls):
    from torch.utils.flop_counter import FlopCounterMode

    weight = torch.randn(4, 3)
    fast, xs = mycel.jit(lambda x: x @ weight + 1), torch.randn(5, 2, 4)
    for x in xs:
        torch.testing.assert_close(fast(x), x @ weight + 1)
    torch.testing.assert_close(torch.func.vmap(fast)(xs), xs @ weight + 1)
    with FlopCounterMode(display=False) as counted:
        fast(xs[0])
    assert counted.get_total_flops() == 2 * 2 * 4 * 3 and Rerun.count == 1


def test_so_many_are_recorded_at_once(monkeypatch):
    class Pool:
        recordings = []

        def record(self, *how):
            self.recordings.append(Rerun(*how))
            return self.recordings[-1]

    monkeypatch.setattr(replayed_calls, "_pool", lambda device, stream: Pool())
    monkeypatch.setattr(replayed_calls, "AT_ONCE", 2)
    replays = []
    for _ in range(4):
        program = mycel.capture(lambda x: x + 1, torch.ones(3))
        record = functools.partial(replayed_calls._recorded, torch.device("cpu"))
        call = ReplayedCall(lambda x: (x + 1,), program, torch.device("cpu"), record, lambda: ("a stream",))
        for i in range(3):
            assert call(torch.full((3,), float(i)))[0].tolist() == [i + 1.0] * 3
        replays += call.by_context.values()
    assert [replayed.why for replayed in replays] == ["", "", "2 others are recorded", "2 others are recorded"]


def test_one_thread_at_a_time(calls, monkeypatch):
    replay = Rerun.replay
    monkeypatch.setattr(Rerun, "replay", lambda self: time.sleep(0.002) or replay(self))
    fast, wrong = mycel.jit(lambda x: 2 * x + 1), []

    def work(i):
        with torch.no_grad():
            wrong.extend(y for k in range(10) for y in [fast(torch.tensor([i + k])).item()] if y != 2 * (i + k) + 1)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and Rerun.count == 1


def test_threads_that_begin_together_capture_once():
    """Whoever comes second waits, and what runs beside a capture is not part of it."""
    module, start, wrong = net().eval(), threading.Barrier(4), []
    fast, other = mycel.jit(module), mycel.jit(lambda x: x.tanh() + 1)
    other(torch.ones(3))

    def work(i):
        x = torch.full((2, 4), float(i))
        start.wait()
        for _ in range(20):
            wrong.extend([i] * (not torch.equal(other(x[0, :3]), x[0, :3].tanh() + 1)))
            wrong.extend([i] * (not torch.allclose(fast(x), module(x))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(fast.entries) == len(other.entries) == 1


def decides(x):
    return x * 2 if x.sum() > 0 else x - 1


REFUSED = {
    "decides what runs next": decides,
    "may wait for the device": lambda x: torch.linalg.matrix_exp(x) + 1,
    "in the memory of an argument": lambda x: (x + 1, x.reshape(-1)),
    "makes": lambda x: torch.outer(x.flatten(), x.flatten()).sin().sum(0),
    "a call makes": lambda x: x.expand(1000, 4, 4) + 1,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_recorded_runs_as_it_is(why, calls, monkeypatch):
    monkeypatch.setattr(replayed_calls, "SMALL", 1000)
    fn, x = REFUSED[why], torch.rand(4, 4)
    fast = mycel.jit(fn)
    for _ in range(3):
        torch.testing.assert_close(fast(x), fn(x))
    assert Rerun.count == 0 and why in calls.refused[0]
