"""Layouts of a graph in which nodes that cannot be told apart are one: as good as those of the whole graph, and no more
work for a deeper model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributing import OneDevice
from models import llama

from mycel.ir import Mesh
from mycel.plan import KnownLayouts, Plan, bound, layouts, pairs
from mycel.plan.alike import Alike
from mycel.plan.layouts import Solver


def solved(layers: int, plan: str, monkeypatch: pytest.MonkeyPatch) -> Solver:
    seen: list[Solver] = []
    solve = Solver.solve
    with monkeypatch.context() as patch:
        patch.setattr(Solver, "solve", lambda self: (seen.append(self), solve(self))[1])
        ids = torch.randint(3, 90, (4, 8))
        one = OneDevice.of(llama(num_hidden_layers=layers), {"input_ids": ids, "labels": ids}, clip_norm=1.0)
        one.under(Plan.read(plan, Mesh(dp=2, tp=2)))
    return seen[0]


@pytest.mark.parametrize("plan", ["dp+tp", "zero3+tp"])
def test_as_good_as_the_whole_graph(plan, monkeypatch):
    monkeypatch.setattr(layouts, "FEW", 0)  # axis by axis
    small = solved(3, plan, monkeypatch)
    monkeypatch.setattr(Alike, "of", lambda setting: Alike.none(setting.graph))
    whole = solved(3, plan, monkeypatch)
    assert small.value == pytest.approx(whole.value, rel=1e-6)


def all_nodes(graph):
    return [*graph.ports, *graph.options]


def test_a_deeper_model_has_no_larger_graph(monkeypatch):
    """Counters, numbers of which there is nothing to decide, aside."""
    sizes = []
    for layers in (3, 5):
        alike = Alike.of(solved(layers, "zero3+tp", monkeypatch))
        small = alike.graph
        sizes.append(len(small.options) + sum(t.ndim > 0 for t in small.ports.values()))
        assert set(alike.first) == set(all_nodes(alike.whole))
        assert set(alike.first.values()) == set(all_nodes(small))
    assert sizes[0] == sizes[1]


def test_what_was_solved_for_fewer_layers_holds_for_more(monkeypatch):
    """As good as if they were solved for, with nothing left to decide in layers."""
    monkeypatch.setattr(layouts, "FEW", 0)  # axis by axis
    known, least = KnownLayouts(), pairs.least
    few, more = (solved(layers, "zero3+tp", monkeypatch) for layers in (3, 4))
    replace(few, known=known).solve()
    free: list[str] = []
    decided = lambda s: (free.extend(n[1] for n, k in s.sizes.items() if k > 1 and n[0] != "hub"), least(s))[1]
    monkeypatch.setattr(pairs, "least", decided)
    with_known = replace(more, known=known)
    with_known.solve()
    assert free and set(free) <= {more.graph.program.entry}
    waits = [bound.moving_seconds(more, ("dp", "tp"), each.solution) for each in (with_known, more)]
    assert waits[0] == pytest.approx(waits[1], rel=1e-3)
