"""The search over places: sub-models that wait for none of the others are found, and put on ranks of their own where
the clock says that this is faster; what is given holds."""

from __future__ import annotations

import itertools

import pytest
import torch
import yaml
from placing import Tower, Towers
from test_places import clip
from test_search import TWO, of
from typer.testing import CliRunner

import mycel
from mycel import search_page, search_text
from mycel.cli import app
from mycel.errors import PlanError
from mycel.plan import Plan
from mycel.plan.towers import towers
from mycel.search_space import Shape, on_ranks_of_their_own, shares

pytestmark = pytest.mark.filterwarnings("ignore:accumulate")
THREE = {**TWO, "devices": 3, "levels": [{"bytes_s": 1e9, "start_s": 1e-6}]}
FAST = {**TWO, "levels": [{"bytes_s": 1e14, "start_s": 1e-12}]}


class Wide(Towers):
    """Towers whose gradients are more than their activations; the second is twice as deep."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__(1)
        self.vision, self.embed, self.text = Tower(64, 8, layers), torch.nn.Embedding(11, 64), Tower(64, 8, 2 * layers)


class Loss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def pictures(rows: int = 64, width: int = 6) -> dict[str, torch.Tensor]:
    pixels = torch.empty(rows, width, device="meta")
    return {"pixels": pixels, "ids": torch.empty(rows, 3, dtype=torch.int64, device="meta")}


def modules_of(model: torch.nn.Module, batch: dict) -> list[tuple[str, ...]]:
    return [t.modules for t in towers(of(model, batch, TWO).program)]


def test_what_waits_for_none_of_the_others():
    """Towers with what belongs to them alone, under the names that tell them apart; a chain has none."""
    assert modules_of(Towers(1), pictures()) == [("vision",), ("embed", "text")]
    assert sorted(modules_of(*clip())) == [("text_model", "text_projection"), ("vision_model", "visual_projection")]
    chain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert modules_of(Loss(chain), {"x": torch.empty(8, 4, device="meta")}) == []

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Towers(1)

        def forward(self, pixels, ids):
            return self.model(pixels, ids)

    assert modules_of(Wrapped(), pictures()) == [("model.vision",), ("model.embed", "model.text")]


def test_ranks_go_where_there_is_work():
    for work, ranks in itertools.product(([1.0, 1.0], [3.0, 1.0], [1.0, 5.0, 2.0]), (3, 4, 8)):
        counts = shares(work, ranks)
        best = min(
            (c for c in itertools.product(range(1, ranks), repeat=len(work)) if sum(c) == ranks),
            key=lambda c: max(w / n for w, n in zip(work, c, strict=True)),
        )
        slowest = [max(w / n for w, n in zip(work, c, strict=True)) for c in (counts, best)]
        assert sum(counts) == ranks and slowest[0] == pytest.approx(slowest[1])


@pytest.mark.parametrize("cluster", [THREE, FAST], ids=["slow", "fast"])
def test_towers_are_placed_where_that_is_faster(cluster):
    """On wires that gradients wait for, each tower on ranks of its own; on others never if that is slower: as every
    number of ranks says, priced one by one."""
    plan_search = of(Wide(1), pictures(48, 64), cluster)
    answer, world = plan_search.run(), plan_search.cluster.world
    every = [
        plan_search.price(Shape(place=on_ranks_of_their_own([("vision",), ("*",)], (n, world - n))))
        for n in range(1, world)
    ]
    placed = min(c.seconds for c in every)
    others = min(c.seconds for c in answer.candidates if not c.shape.place)
    assert bool(answer.best.shape.place) == (cluster is THREE) == (placed < others)
    assert answer.best.seconds == min(placed, others)
    if cluster is FAST:
        return
    read = Plan.read(yaml.safe_load(search_text.file_text(answer)))
    assert plan_search.priced(read).seconds == answer.best.seconds and read.mesh.world == world
    assert plan_search.checked(read).startswith("it fits")
    text, page = search_text.table(answer), search_page.page(answer, plan_search.detail(answer.best))
    assert str(answer.best.shape) in text and "Drawn is the place of vision" in page


def test_what_is_given_holds():
    cluster = {**TWO, "devices": 3}
    given = {"place": {"vision": [0], "*": [1, 2]}}
    answer = of(Towers(1), pictures(), cluster, given=given).run()
    assert {c.shape.zero for c in answer.candidates} == {0, 1, 3}
    assert all(c.plan.place and c.plan.places[1].ranks == (1, 2) for c in answer.candidates)
    tried = of(Towers(1), pictures(), FAST, given={"place": "auto", "zero": 0, "microbatches": 1}).run()
    kept = of(Towers(1), pictures(), TWO, given={"mesh": {"dp": 2}, "zero": 0, "microbatches": 1}).run()
    assert [any(c.shape.place for c in answer.candidates) for answer in (tried, kept)] == [True, False]
    for wrong, words in (
        ({"place": {"vision": [0], "*": [1]}}, "place: 2 ranks, the cluster has 3"),
        ({"place": {"vision": [0], "*": [1, 2]}, "stages": 2}, "and stages is 2"),
    ):
        with pytest.raises(PlanError, match=words):
            of(Towers(1), pictures(), cluster, given=wrong).run()


def test_mycel_plan_prices_places(tmp_path):
    """A configuration whose plan has them, and the plan in a file of its own."""
    config = {
        "model": {"config": {
            "model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2,
            "vocab_size": 258, "decoder_start_token_id": 0,
        }},
        "data": {"train": "none.txt", "tokenizer": "bytes", "length": 16}, "train": {"batch": 4},
        "parallel": {"plan": {"place": {"encoder": [0], "*": [1]}}},
    }  # fmt: skip
    (tmp_path / "t5.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(TWO))
    cluster = ["--cluster", str(tmp_path / "cluster.yaml")]
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "t5.yaml"), *cluster, "-o", str(tmp_path / "plan.yaml")])
    assert result.exit_code == 0 and "encoder on rank 0; * on rank 1" in result.output, result.output
    assert Plan.read(tmp_path / "plan.yaml").places[0].patterns == ("encoder",)
    again = ["plan", "check", str(tmp_path / "plan.yaml"), str(tmp_path / "t5.yaml"), *cluster]
    result = CliRunner().invoke(app, again)
    assert result.exit_code == 0 and "it fits: a step takes" in result.output, result.output


def test_a_step_finds_places_by_itself(monkeypatch):
    """`train_step(plan="auto")`, as one of two ranks, of which the other is not there to be asked."""
    monkeypatch.setattr("mycel.corrections.from_first", lambda make: make())
    monkeypatch.setattr("mycel.corrections.ranks_on_a_host", lambda: 2)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    model = Wide().to("meta")
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters()), plan="auto", compile=False)
    step._find_plan((), pictures(8, 64))
    assert step.written.data()["place"] == {"vision": [0], "*": [1]} and step.parts.place == 1
