"""Manual regions: what cannot be is refused with the line that says it, and nothing is left open."""

from __future__ import annotations

import pytest
import torch

import mycel
from mycel import comm
from mycel.capture import meshed
from mycel.errors import CaptureError, PlanError
from mycel.hints import OPEN
from mycel.ir import Mesh


def captured(fn, *args):
    with meshed(Mesh(tp=2)):
        return mycel.capture(fn, *args)


def leaks(x):
    with mycel.manual("tp"):
        y = comm.part(x, "tp")
    return y * 2


def unknown(x):
    with mycel.manual("pp"):
        return x * 2


def outside(x):
    return comm.all_reduce(x, "tp")


def uneven(x):
    with mycel.manual("tp"):
        return comm.all_gather(comm.part(x, "tp", dim=1), "tp", dim=1)


def twice(x):
    with mycel.manual("tp"), mycel.manual("tp"):
        return x * 1


@mycel.manual("tp", ins=[("dp", None)])
def foreign(x):
    return x


@mycel.manual("tp", ins=[("tp",)])
def short(x):
    return x


@mycel.manual("tp", outs=[None, None])
def fewer(x):
    return x


def hint_inside(x):
    with mycel.manual("tp"):
        return mycel.shard(x * 1, "tp", None)


@mycel.manual("tp")
def astray(x):
    return comm.permute(x, "tp", to=[0, 0])


@pytest.mark.parametrize(
    "fn, message",
    [
        (leaks, "differs from rank to rank along tp was used outside of its manual region"),
        (unknown, r"mycel.manual: there is no axis 'pp'\n  the mesh  Mesh\(tp=2\)"),
        (outside, "comm.all_reduce over 'tp' outside of a manual region"),
        (uneven, "a dim of 3 does not divide into 2 equal parts"),
        (twice, "a manual region over tp inside of another"),
        (foreign, "a layout names 'dp'; the region is over tp"),
        (short, "1 entries for a tensor of 2 dims"),
        (fewer, "outs has 2 layouts for 1 results"),
        (hint_inside, "mycel.shard over 'tp' inside of a manual region over it"),
        (astray, r"to=\[0, 0\] for 2 ranks"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refusals_name_the_line(fn, message):
    x = torch.randn(4, 3)
    with pytest.raises((CaptureError, PlanError), match=message) as refusal:
        captured(fn, x)
    assert "test_manual_refusals.py:" in str(refusal.value)
    assert not OPEN


def test_a_refusal_leaves_nothing_open():
    x = torch.randn(4, 3)
    with pytest.raises(PlanError, match=r"comm\.index over 'tp' outside"):
        comm.index("tp")
    with pytest.raises(PlanError, match="ins and outs are for functions"), mycel.manual("tp", outs=(None,)):
        pass
    with pytest.raises(PlanError, match="takes names of axes"):
        mycel.manual()
    assert not OPEN and torch.equal(captured_sum(x), x)


def captured_sum(x):
    with mycel.manual("tp"):
        assert comm.size("tp") == 1 and int(comm.index("tp")) == 0
        return comm.permute(comm.reduce_scatter(comm.all_reduce(x, "tp"), "tp"), "tp")
