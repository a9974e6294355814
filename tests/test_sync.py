"""Replicas (`sync` of a plan): the messages of each policy on simulated ranks, whole runs in processes against plain
torch, and going on after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import mycel
from mycel import Mesh, Plan
from mycel.errors import PlanError
from mycel.ir import Program, Role, Type, call
from mycel.launch import launch
from mycel.lower import OuterMessage, outer_message, rounds, sent
from mycel.ops import o
from mycel.ops.codecs import Compression
from mycel.plan.synchronising import read_policy
from mycel.planning import planned
from mycel.run import simulate
from mycel.run.checkpoint import load_latest
from mycel.run.simulate import put_together, spread_out

POLICIES = {
    "local": "local(H=3)",
    "local late": "local(H=3, overlap=2)",
    "diloco": "diloco(H=3, lr=0.5, momentum=0.8)",
    "diloco late": "diloco(H=3, overlap=2, lr=0.5, momentum=0.8)",
    "diloco always late": "diloco(H=2, overlap=2, lr=1.3, momentum=0)",
    "streaming": "streaming(H=4, fragments=2, overlap=1, mixing=0.25, lr=0.5, momentum=0.8)",
    "streaming late": "streaming(H=3, fragments=3, overlap=3, mixing=0.5)",
    "gossip": "gossip(H=1, overlap=1)",
    "gossip at once": "gossip(H=2, overlap=0)",
    "sma": "sma(alpha=0.3, H=2)",
}
STEPS = 8


def f32(*shape: int) -> Type:
    return Type(torch.float32, shape)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 67), nn.Linear(67, 5)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


def batch(i):
    gen = torch.Generator().manual_seed(i)
    return {"x": torch.randn(24, 40, generator=gen), "y": torch.randint(0, 5, (24,), generator=gen)}


def reference(text: str, count: int):
    """Replicas that torch trains one after the other, and what the policy does to their parameters."""
    policy = read_policy("dp", text)
    models, optimizers = [], []
    for _ in range(count):
        torch.manual_seed(0)
        models.append(Small())
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), lr=0.02))
    names = [name for name, _ in models[0].named_parameters()]
    sizes = {name: p.numel() for name, p in models[0].named_parameters()}
    total, done, fragment = sum(sizes.values()), 0, {}
    for name in names:
        fragment[name] = min(done * policy.fragments // total, policy.fragments - 1)
        done += sizes[name]
    kept = sorted(set(fragment.values()))
    anchors = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momenta = {name: torch.zeros_like(x) for name, x in anchors.items()}
    sent: dict[tuple[str, int], list[torch.Tensor]] = {}
    losses: list[list[float]] = [[] for _ in range(count)]
    option = policy.options.get

    def receive(name: str, steps: int) -> None:
        then = sent.pop((name, steps))
        now = [dict(model.named_parameters())[name].data for model in models]
        mean = torch.stack(then).mean(0)
        if policy.has_outer_step:
            delta = anchors[name] - mean
            momenta[name] = option("momentum") * momenta[name] + delta
            anchors[name] = anchors[name] - option("lr") * (delta + option("momentum") * momenta[name])
            for w, x in zip(now, then, strict=True):
                own = option("mixing")
                w.copy_(w + (anchors[name] - x) if own is None else own * w + (1 - own) * anchors[name])
        elif policy.kind == "gossip":
            partner = rounds(count)[steps // policy.every % len(rounds(count))]
            for i, w in enumerate(now):
                w.copy_(w + (then[partner[i]] - then[i]) / 2)
        else:
            for w, x in zip(now, then, strict=True):
                w.copy_(w + option("alpha", 1.0) * (mean - x))

    for step in range(STEPS):
        whole = batch(step)
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = slice(i * 24 // count, (i + 1) * 24 // count)
            loss = model(whole["x"][rows], whole["y"][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[i].append(loss.item())
        with torch.no_grad():
            for name in names:
                at = kept.index(fragment[name])
                if policy.overlap and policy.is_sent(at, step + 1 - policy.overlap):
                    receive(name, step + 1 - policy.overlap)
                if policy.is_sent(at, step + 1):
                    sent[name, step + 1] = [dict(m.named_parameters())[name].detach().clone() for m in models]
                    if not policy.overlap:
                        receive(name, step + 1)
    return [{name: p.detach() for name, p in model.named_parameters()} for model in models], losses


# -- messages on simulated ranks

MESH = Mesh(dp=3)
TENSORS = {Role("parameter", "w"): f32(5, 8), Role("parameter", "v"): f32(7), Role("buffer", "b"): f32(3)}


def values(program: Program, seed: int) -> dict[Role, list[torch.Tensor]]:
    """Of each input, one tensor a rank: what replicas share is the same on all."""
    by_role = {}
    for i, v in enumerate(program.inputs):
        role, gen = program.role(v), torch.Generator().manual_seed(100 * seed + i)
        each = [torch.randn(v.shape, generator=gen) for _ in range(MESH.world)]
        shared = role.kind == "outer" and role.name != "sent"
        by_role[role] = each[:1] * MESH.world if shared else each
        if role.kind == "counter":
            by_role[role] = [torch.tensor(seed)] * MESH.world
    return by_role


def exchanged(program: Program, given: dict[Role, list[torch.Tensor]], passed=None) -> dict[Role, list[torch.Tensor]]:
    """What of it is new after a message; and what the program returns."""
    inputs = [(passed or {}).get(v.name) or given[program.role(v)] for v in program.inputs]
    outs = simulate(program, MESH, inputs)
    n, by_name = len(outs) - len(program.updates), {v.name: program.role(v) for v in program.inputs}
    return {"returned": outs[:n], **{by_name[k]: x for k, x in zip(program.updates, outs[n:], strict=True)}}


def message(text: str, codecs=None, to=()) -> OuterMessage:
    return outer_message(read_policy("dp", text), TENSORS, MESH.world, codecs or {}, to)


def test_diloco_is_an_outer_step_of_torchs_sgd_and_replicas_are_the_same_to_the_bit():
    whole = message("diloco(H=3, lr=0.5, momentum=0.8)").whole
    given = values(whole, 0)
    after = exchanged(whole, given)
    for name in ("w", "v"):
        anchor, momentum = (given[Role("outer", slot, of=name)][0] for slot in ("anchor", "momentum"))
        p = nn.Parameter(anchor.clone())
        outer = torch.optim.SGD([p], lr=0.5, momentum=0.8, nesterov=True)
        outer.state[p]["momentum_buffer"] = momentum.clone()
        p.grad = anchor - torch.stack(given[Role("parameter", name)]).mean(0)
        outer.step()
        for x in (*after[Role("parameter", name)], *after[Role("outer", "anchor", of=name)]):
            torch.testing.assert_close(x, p.detach())
            assert torch.equal(x, after[Role("parameter", name)][0])
    mean = torch.stack(given[Role("buffer", "b")]).mean(0)
    assert all(torch.allclose(x, mean) for x in after[Role("buffer", "b")])


def test_an_outer_step_without_momentum_keeps_none_and_is_the_mean():
    whole = message("diloco(H=3, lr=1, momentum=0)").whole
    given = values(whole, 0)
    assert {role.name for role in given if role.kind == "outer"} == {"anchor"}
    after = exchanged(whole, given)
    for name in ("w", "v"):
        mean = torch.stack(given[Role("parameter", name)]).mean(0)
        for x in (*after[Role("parameter", name)], *after[Role("outer", "anchor", of=name)]):
            torch.testing.assert_close(x, mean)


@pytest.mark.parametrize("codec", ["int8+ef", "int4+stochastic+ef", "topk(0.2)+ef", "powersgd(2)+ef"])
def test_of_an_encoded_outer_step_what_is_lost_is_kept(codec):
    """Σ (differences + old errors) = n · received + Σ new errors; all replicas receive the same."""
    whole = message("diloco(H=2, lr=1, momentum=0)", {"w": Compression.parse(codec)}).whole
    given = values(whole, 1)
    after = exchanged(whole, given)
    w, anchor, error = Role("parameter", "w"), Role("outer", "anchor", of="w"), Role("error", of="w", over="dp")
    received = given[anchor][0] - after[anchor][0]
    there = sum(given[anchor][0] - x for x in given[w]) + sum(given[error])
    torch.testing.assert_close(MESH.world * received + sum(after[error]), there, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(x, after[w][0]) for x in after[w])
    assert any(x.abs().max() > 0 for x in after[error])


LATER = ["streaming(H=4, overlap=1, mixing=0.25)", "gossip(H=1, overlap=1)", "diloco(H=3, overlap=1)"]


@pytest.mark.parametrize("text", [*LATER, "local(H=3, overlap=3)", "diloco(H=3, overlap=2)", "diloco(H=4, overlap=4)"])
@pytest.mark.parametrize("codec", [{}, {"w": Compression.parse("int8+ef")}])
def test_a_message_that_is_begun_and_waited_for_later_brings_the_same(text, codec):
    """It is cut where it waits, once for each step between at most: an encoded sum waits twice."""
    m = message(text, codec, rounds(3)[0] if text.startswith("gossip") else ())
    policy, is_encoded = read_policy("dp", text), codec and not text.startswith(("gossip", "local"))
    assert len(m.parts) == 1 + min(policy.overlap, 2 if is_encoded else 1)
    assert policy.delay(len(m.parts) - 1, len(m.parts)) == policy.overlap
    given, passed = values(m.whole, 2), dict[str, list[torch.Tensor]]()
    for part in m.parts[:-1]:
        assert not any(part.role(v).kind == "parameter" for v in part.inputs)
        returned = exchanged(part, given, passed)["returned"]
        assert returned
        passed |= {v.name: x for v, x in zip(part.main.outputs, returned, strict=True)}
    at_once, later = exchanged(m.whole, given), exchanged(m.parts[-1], given, passed)
    assert at_once.keys() == later.keys()
    for role in at_once.keys() - {"returned"}:
        assert all(torch.equal(x, y) for x, y in zip(at_once[role], later[role], strict=True)), role


@pytest.mark.parametrize("count", range(1, 9))
def test_of_gossip_each_meets_each_once(count):
    met = [(i, j) for partner in rounds(count) for i, j in enumerate(partner) if i != j]
    assert sorted(met) == [(i, j) for i in range(count) for j in range(count) if i != j]
    assert all(partner[j] == i for partner in rounds(count) for i, j in enumerate(partner))


@pytest.mark.parametrize("text", POLICIES.values())
def test_in_h_steps_each_fragment_is_sent_once(text):
    policy = read_policy("dp", text)
    for steps in range(policy.every, 3 * policy.every):
        for i in range(policy.fragments):
            sent = [n for n in range(steps, steps + policy.every) if policy.is_sent(i, n)]
            assert len(sent) == 1
    assert read_policy("dp", str(policy)) == policy


# -- gradients one step late


LATE = {
    "momentum": (lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.8), {"lr": 0.05, "momentum": 0.8}),
    "adam": (lambda params: torch.optim.AdamW(params, lr=0.02, betas=(0.7, 0.9)),
             {"lr": 0.02, "beta1": 0.7, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.01}),
    "fast adam": (lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0),
                  {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    "none": (lambda params: torch.optim.SGD(params, lr=0.5), {"lr": 0.5}),
}  # fmt: skip


def late(model: nn.Module, plan: dict, kind: str, batches: list) -> dict[str, list[torch.Tensor]]:
    """What a step keeps, by role, after some steps on simulated ranks."""
    make, hyper = LATE[kind]
    given = Plan.read({"batch": ["dp"], **plan})
    step = mycel.train_step(model, make(model.parameters()), plan=given, compile=False)
    unsharded = step.unsharded(**batches[0])
    program, (_, lowered) = unsharded.program, planned(step._task(unsharded), given)
    held, state = dict(model.named_parameters()), {}
    layouts = dict(zip((v.name for v in program.inputs), lowered.spread.inputs, strict=True))
    for v in program.inputs:
        role = program.role(v)
        known = hyper.get(role.name, 0) if role.kind == "hyper" else 0
        value = held[role.name].detach() if role.kind == "parameter" else torch.full(v.shape, known)
        state[v.name] = spread_out(value.to(v.dtype), layouts[v.name], given.mesh)
    for batch in batches:
        for v in program.inputs_of("batch"):
            state[v.name] = spread_out(batch[program.role(v).name], layouts[v.name], given.mesh)
        outs = simulate(lowered.program, given.mesh, list(state.values()))
        state |= dict(zip(program.updates, outs[len(outs) - len(program.updates) :], strict=True))
    return {
        str(program.role(v)): put_together(state[v.name], layouts[v.name], v.type, given.mesh) for v in program.inputs
    }


@pytest.mark.parametrize("kind", ["momentum", "adam", "none"])
@pytest.mark.parametrize("plan", [
    {"mesh": {"dp": 3}}, {"mesh": {"dp": 2}, "zero": "2 over dp", "microbatches": 2},
    {"mesh": {"dp": 2, "near": 2}, "batch": ["dp.near"], "zero": "3 over near"},
    {"mesh": {"dp": 2}, "compress": {"dp": {"*.weight": "fp32+ef"}}},
    {"mesh": {"dp": 3}, "compress": {"dp": {"*.weight": "fp32+ef"}}},
])  # fmt: skip
def test_gradients_one_step_late_are_taken_ahead_by_momentum(plan, kind):
    """By torch's optimiser, of the parameters behind those that are held."""
    torch.manual_seed(0)
    held, behind = Small(), Small()
    behind.load_state_dict(held.state_dict())
    start = {name: p.detach().clone() for name, p in held.named_parameters()}
    optimizer = LATE[kind][0](behind.parameters())
    options = optimizer.defaults
    share = 0.5 * (options["betas"][0] if "betas" in options else options["momentum"])
    gradients = {name: torch.zeros_like(p) for name, p in behind.named_parameters()}
    for i in range(4):
        held.zero_grad()
        held(**batch(i)).backward()
        before = {name: p.detach().clone() for name, p in behind.named_parameters()}
        for name, p in behind.named_parameters():
            p.grad, gradients[name] = gradients[name], held.get_parameter(name).grad.clone()
        optimizer.step()
        with torch.no_grad():
            for name, p in behind.named_parameters():
                held.get_parameter(name).copy_(p + share * (p - before[name]))
    model = Small()
    model.load_state_dict(start)
    after = late(model, {**plan, "sync": {"dp": "delayed(ahead=0.5)"}}, kind, [batch(i) for i in range(4)])
    for name, p in held.named_parameters():
        torch.testing.assert_close(after[f"parameter {name}"], p.detach(), rtol=1e-4, atol=1e-5)
    assert any("ahead" in role for role in after) == (kind != "none")


class Curved(nn.Module):
    """Steeper in some directions than in others."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return 0.5 * (x @ (self.w - 1)).square().mean()


def test_held_ahead_adam_is_stable_where_late_gradients_alone_make_it_swing():
    def away(ahead: int) -> float:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 1, 8)
        plan = {"mesh": {"dp": 2}, "sync": {"dp": f"delayed(ahead={ahead})"}}
        return float((late(Curved(), plan, "fast adam", [{"x": x}] * 150)["parameter w"] - 1).abs().max())

    assert away(1) < 0.02 and away(0) > 0.1


def test_a_step_that_is_skipped_leaves_parameters_where_they_are_held():
    torch.manual_seed(0)
    model, plan = Small(), {"mesh": {"dp": 2}, "sync": {"dp": "delayed"}}
    batches = [batch(i) for i in range(5)]
    batches[2]["x"] = batches[2]["x"] * torch.nan
    one, two = (late(model, plan, "adam", batches[:k]) for k in (3, 2))
    assert int(one["counter skipped"]) == 1
    held = [role for role in one if role.startswith(("parameter", "outer ahead"))]
    assert all(torch.equal(one[role], two[role]) and two[role].any() for role in held) and len(held) == 8


class Wide(nn.Module):
    """Two layers, large enough for their sums to be worth doing in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(256, 1024) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(1024, 256) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


def wide_step(plan: dict, **settings) -> Program:
    """What ranks run of a step with AdamW."""
    model, given = Wide(), Plan.read({"mesh": {"dp": 4}, "batch": ["dp"], **plan})
    step = mycel.train_step(
        model, torch.optim.AdamW(model.parameters()), plan=given, compile=False, clip_norm=1.0, **settings
    )
    return planned(step._task(step.unsharded(x=torch.randn(1024, 256))), given)[1].program


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 2}])
@pytest.mark.parametrize("plan", [
    {}, {"zero": "2 over dp"},
    *({"compress": {"dp": codec}} for codec in ("int4+ef", "int8+ef21", "int4+loco", "powersgd(2)+ef")),
    {"zero": "2 over dp", "compress": {"dp": "int4+ef"}},
])  # fmt: skip
def test_gradients_one_step_late_send_no_more_than_others(plan, settings):
    at_once, late = (
        sum(sent(wide_step({**plan, **sync}, **settings)).values()) for sync in ({}, {"sync": {"dp": "delayed"}})
    )
    assert late <= 1.001 * at_once  # ZeRO 2 adds up what each microbatch brings
    assert late >= 0.999 * at_once or ("zero" in plan and "accumulate" in settings)


@pytest.mark.parametrize("plan, halves", [({}, 1), ({"compress": {"dp": "int4+ef"}}, 2)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sums_of_late_gradients_travel_during_forward_and_backward(plan, halves, precision):
    """But for small ones: each message is beside a product of forward or of backward, and all of them beside both."""
    eqns = wide_step({**plan, "sync": {"dp": "delayed"}}, precision=precision).main.eqns
    products = [(i, e.phase) for i, e in enumerate(eqns) if e.op.product or e.op is call]
    begun = {e.outputs[0]: i for i, e in enumerate(eqns) if e.op is o.begin}
    spans = [(begun[e.inputs[0]], i, sum(v.type.bytes for v in e.vars)) for i, e in enumerate(eqns) if e.op is o.finish]
    large = [(start, end) for start, end, size in spans if size > 50_000]
    beside = [{phase for i, phase in products if start < i < end} for start, end in large]
    assert len(large) == halves and all(beside) and set.union(*beside) == {"forward", "backward"}


# -- plans


def replica_plan(**given) -> Plan:
    return Plan.read({"mesh": {"dp": 2, "tp": 2}, "batch": ["dp"], **given})


def test_an_replica_is_a_plan_without_the_axis_and_a_plan_is_written_with_it():
    plan = replica_plan(sync={"dp": "diloco(H=50)"}, parameters={"up.weight": ["tp", "-"]}, zero="1 over tp")
    assert plan.replica.mesh.sizes() == {"tp": 2} and plan.replica.synced() is None
    assert not plan.replica.batch_axes() and plan.together.batch_axes() == ["dp"]
    assert Plan.read(yaml.safe_load(str(plan))) == plan
    assert replica_plan(sync={"dp": "every step"}).synced() is None


def predicted(policy: str, ranks: int = 2, **more) -> tuple[float, float]:
    """Seconds and bytes of a step that a policy costs."""
    plan = Plan.read({"mesh": {"dp": ranks}, "batch": ["dp"], "sync": {"dp": policy}, **more})
    model = Small()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters()), plan=plan, compile=False)
    return step._planned((), batch(0), ((), batch(0)))[1].predicted.sync


def test_the_clock_counts_a_message_once_in_h_steps():
    (every, sent), (seldom, fewer) = predicted("diloco(H=1)"), predicted("diloco(H=10)")
    assert sent == pytest.approx(4 * sum(p.numel() for p in Small().parameters()))  # two ranks: once there and back
    assert every / 10 == pytest.approx(seldom) and sent / 10 == pytest.approx(fewer)


def test_the_clock_counts_what_is_not_begun_before_it_is_waited_for():
    """Of an encoded sum among four ranks, which waits twice: all, half of it, nothing."""
    compress = {"dp": {"*.weight": "int8+ef"}}
    (all_s, sent), *later = (predicted(f"diloco(H=4, overlap={k})", 4, compress=compress) for k in range(3))
    assert all(size == sent for _, size in later)
    half, nothing = (all_s - seconds for seconds, _ in later)
    assert 0 < half < nothing < all_s and half == pytest.approx(nothing / 2, rel=0.2)


@pytest.mark.parametrize("given, why", [
    ({"sync": "diloco"}, "an axis and a policy"),
    ({"sync": {"pp": "local(H=2)"}}, "there is no axis 'pp'"),
    ({"sync": {"tp": "local(H=2)"}}, "tp does not split the batch"),
    ({"sync": {"dp": "dilocco(H=2)"}}, r"no policy 'dilocco'\n  known     every step.*\n  try       diloco"),
    ({"sync": {"dp": "diloco"}}, r"H is not said\n  try       diloco\(H=50\)"),
    ({"sync": {"dp": "diloco(H=0)"}}, "H is 0"),
    ({"sync": {"dp": "diloco(H=2, beta=1)"}}, "diloco has no option 'beta'"),
    ({"sync": {"dp": "streaming(H=2, overlap=3, fragments=1)"}}, "sent again after 2"),
    ({"sync": {"dp": "streaming(H=2, fragments=3)"}}, "3 fragments, but H is 2"),
    ({"sync": {"dp": "local(H=2)"}, "zero": "1 over dp"}, "zero 1 is over dp"),
    ({"sync": {"dp": "local(H=2)"}, "parameters": {"up.weight": ["dp", "-"]}}, r"dp splits parameters \(up.weight"),
    ({"sync": {"dp": "local(H=2)"}, "batch": ["tp.dp"]}, "dp first"),
    ({"sync": {"dp": "local(H=2)"}, "compress": {"dp": "int8"}}, "averages models, not what has changed"),
    ({"sync": {"dp": "diloco(H=2)"}, "compress": {"dp": "auto"}}, "as said"),
    ({"sync": {"dp": "diloco(H=2)"}, "compress": {"dp": "int8+ef", "when": "noise > 2"}}, "encoded in one way"),
])  # fmt: skip
def test_refusals(given, why):
    with pytest.raises(PlanError, match=why):
        replica_plan(**given)


def test_replicas_have_equal_parts():
    model = Small()
    plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "sync": {"dp": "local(H=2)"}})
    step = mycel.train_step(model, torch.optim.SGD(model.parameters()), plan=plan, compile=False)
    with pytest.raises(PlanError, match=r"2 replicas cannot have equal parts of x \[5, 40\]\n  try       6 rows, or 4"):
        step.prepare(x=torch.randn(5, 40), y=torch.zeros(5, dtype=torch.int64))


# -- in processes


def run(kind: str, folder: Path) -> int:
    child = str(Path(__file__).parent / "sync_child.py")
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    return launch([str(folder), kind], 2, program=[child], env=env, logs=folder / "logs")


def test_replicas_do_what_torch_does_and_go_on_to_the_bit_after_a_kill(tmp_path):
    assert run("first", tmp_path) != 0
    assert {f"{name}-{rank}.pt" for name in ("diloco", "diloco late", "streaming", "gossip") for rank in range(2)} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert run("again", tmp_path) == 0
    loaded, _ = load_latest(tmp_path / "streaming")  # in one process it is the mean of the replicas
    assert loaded.tensors["model.up.weight"].shape == (67, 40)


@pytest.mark.parametrize("codec", ["int4+ef", "powersgd(4)+ef"])
def test_late_gradients_that_came_compressed_do_not_travel_again(codec):
    """Their correction is computed where they have come: gathering it would send weights exactly."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = {"mesh": {"dp": 2}, "batch": ["dp"], "compress": {"dp": {"*.weight": codec}}, "sync": {"dp": "delayed"}}
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 64), torch.randn(8, 64))
    step = mycel.train_step(model, optimizer, nn.functional.mse_loss, plan=Plan.read(plan), compile=False)
    program = step._planned(batch, {}, (batch, {}))[2].program
    sent = [v.type for e in program.main.eqns if e.op.collective is not None or e.op.name == "begin" for v in e.vars]
    assert sent and not [t for t in sent if t.dtype == torch.float32 and t.bytes > 64 * 64]
