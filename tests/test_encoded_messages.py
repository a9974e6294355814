"""Parameters and activations on encoded bytes: what is gathered, told and sent between stages; what has come is
verified before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressing import COMPRESSED, MESHES, Compressed, Wire

import mycel
from mycel.errors import RunError
from mycel.ir import Role
from mycel.ops import o
from mycel.ops.collective import COMMUNICATORS
from mycel.plan import Plan
from mycel.plan.links import message


@pytest.mark.parametrize("more", [{}, {"stages": ["up", "down"], "microbatches": 2}], ids=["whole", "stages"])
def test_parameters_of_zero3_are_gathered_on_encoded_bytes(more):
    """Exact codec: the step of one device.  int8: fewer bytes, and all compute with what these say."""
    zero3 = {"mesh": {"dp": 2}, "zero": "3 over dp", "codec": "exact", **more}
    exact = Compressed({**zero3, "gather": {"dp": {"*.weight": "fp32"}}})
    values = exact.values()
    wanted, got = exact.serial(values), exact.ranks(values)
    for name, want in wanted.items():
        torch.testing.assert_close(exact.whole(name, got[name], want), want, rtol=1e-4, atol=1e-5)
    plain, int8 = (Compressed({**zero3, "gather": how}) for how in ({}, {"dp": {"up.*": "int8"}}))
    kinds = [{message(e)[0] for p in case.programs for e in p.main.eqns} for case in (plain, int8)]
    assert "gather_chunks" in kinds[1] - kinds[0]
    sent = [sum(mycel.lower.sent(program)["dp",] for program in case.programs) for case in (plain, int8)]
    assert sent[1] < sent[0]
    after = int8.ranks(values)
    for name, want in wanted.items():
        if name.startswith("parameter"):
            close = int8.whole(name, after[name], want)
            assert torch.allclose(close, want, atol=2e-2) and (
                name != "parameter up.weight" or not torch.equal(close, want)
            )


TOLD = {
    "zero 1": {"mesh": {"dp": 3}, "zero": "1 over dp"},  # parts that do not divide
    "zero 2": {"mesh": {"dp": 2}, "zero": "2 over dp", "microbatches": 2},
    "tp": {**MESHES["dp and tp"], "zero": "1 over dp"},
    "stages": MESHES["stages"],
}


def telling(kind: str, codec: str, gradients: str = "exact", **settings: Any) -> Compressed:
    """Adam, whose new parameters are told so."""
    case = {**TOLD[kind], "codec": gradients, "gather": {"dp": dict.fromkeys(COMPRESSED, codec)}}
    return Compressed(case, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1.0), **settings)


@pytest.mark.parametrize("kind", TOLD)
def test_told_differences_and_what_is_left_of_them_are_all_there_was(kind):
    """fp32: the step of one device.  int4: what all have then and what is left are what the update made of it, and the
    ranks have the same to the bit."""
    exact, coarse = telling(kind, "fp32+ef"), telling(kind, "int4+ef")
    values = exact.values()
    wanted, got = exact.serial(values), exact.ranks(values)
    for name, want in wanted.items():
        torch.testing.assert_close(exact.whole(name, got[name], want), want, rtol=1e-4, atol=1e-5)
    after = coarse.ranks(values)
    for name in COMPRESSED:
        parameter, unsent = f"parameter {name}", f"outer unsent of {name}"
        now, left = (coarse.whole(n, after[n], wanted[n]) for n in (parameter, unsent))
        torch.testing.assert_close(now + left, wanted[parameter], rtol=1e-4, atol=1e-5)
        assert left.abs().max() > 0
        own, alike = after[parameter], 1 if kind != "tp" else 2
        assert all(torch.equal(x, own[i % alike]) for i, x in enumerate(own))


def test_what_is_gathered_follows_the_level_of_zero_of_each_parameter():
    """One that every rank updates is told of by none; one that is held whole is not gathered for use."""
    shapes, common = {"up.weight": (67, 40), "down.weight": (40, 67)}, {"mesh": {"dp": 2}, "batch": ["dp"]}
    for_updates = {"gather": {"dp": dict.fromkeys(COMPRESSED, "int4+ef")}, "zero": {"up.weight": 0, "*": "2 over dp"}}
    plan = Plan.read({**common, **for_updates})
    assert plan.told_codecs(shapes) == {"down.weight": "int4"} and not plan.gathered_codecs(shapes)
    used = {"gather": {"dp": dict.fromkeys(COMPRESSED, "int8")}, "zero": {"up.weight": 1, "*": "3 over dp"}}
    plan = Plan.read({**common, **used})
    assert plan.gathered_codecs(shapes) == {"down.weight": "int8"} and not plan.told_codecs(shapes)


def test_differences_are_kept_by_a_skipped_step_and_cost_the_bytes_of_their_codec():
    case, exact = (telling("zero 1", codec) for codec in ("int4+ef", "exact"))
    values = case.values(poison=True)
    got = case.ranks(values)
    assert int(got["counter skipped"][0]) == 1
    for name, parts in got.items():
        if name.startswith(("outer", "parameter")):
            assert torch.equal(case.whole(name, parts, values[name]), values[name]), name
    part = 40 * -(-67 // 3)
    sent = [mycel.lower.sent(x.lowered.program)["dp",] for x in (case, exact)]
    assert sent[1] - sent[0] == 2 * 2 * (4 * part - -(-part // 128) * 68)  # of two matrices, to two others
    begun = [e for e in case.lowered.program.main.eqns if message(e)[0] == "gather_chunks"]
    assert len([e for e in begun if e.op is not o.finish]) == 1  # in one message


def test_what_stages_send_is_encoded_token_by_token():
    """Exact codec: the step of one device.  int8: a quarter of the bytes, of what the loop sends, and near to it."""
    stages = {"mesh": {"dp": 2}, "microbatches": 2, "stages": ["up", "down", "head"], "codec": "exact"}
    cases = {codec: Compressed({**stages, "send": {"stages": codec}}) for codec in ("exact", "fp32", "int8", "fp8")}
    values = cases["exact"].values()
    wanted = cases["exact"].serial(values)
    sent = {}
    for codec, case in cases.items():
        got = case.ranks(values)
        near = {"int8": 2e-3, "fp8": 1e-2}.get(codec, 1e-5)
        for name, want in wanted.items():
            torch.testing.assert_close(case.whole(name, got[name], want), want, rtol=1e-4, atol=near)
        programs = case.lowered.pipeline.programs
        begun = [e for p in programs for e in p.main.eqns if e.op is o.begin_send and e.phase != "update"]
        sent[codec] = sum(v.type.bytes for e in begun for v in e.vars)
        same = torch.equal(got["parameter up.weight"][0], cases["exact"].ranks(values)["parameter up.weight"][0])
        assert same == (codec in ("exact", "fp32"))
    tokens = 2 * 6  # of two microbatches a rank's rows; between the last two stages activations and their gradients
    assert sent["exact"] == sent["fp32"] - 4 * tokens * (13 + 2 * 8) == tokens * 4 * (67 + 2 * 40)
    assert sent["int8"] == sent["fp8"] == tokens * (80 + 4 + 2 * (48 + 4))


ENCODED = {
    **{kind: {**mesh, "codec": "int8+ef"} for kind, mesh in MESHES.items()},
    "told": {**TOLD["zero 1"], "codec": "exact", "gather": {"dp": dict.fromkeys(COMPRESSED, "int4+ef")}},
    "told in stages": {**TOLD["stages"], "codec": "exact", "gather": {"dp": dict.fromkeys(COMPRESSED, "int4+ef")}},
    "gathered": {**MESHES["zero 3"], "codec": "exact", "gather": {"dp": dict.fromkeys(COMPRESSED, "int8")}},
    "gathered in stages": {
        **MESHES["stages"],
        "zero": "3 over dp",
        "codec": "exact",
        "gather": {"dp": {"up.w*": "int8"}},
    },
}


@pytest.mark.parametrize("written", ENCODED.values(), ids=ENCODED)
def test_what_comes_encoded_is_verified_before_it_is_used(written):
    """And a mismatch would name the parameter; once in so many steps, which the step counts."""
    case, seen = Compressed(dict(written)), set()
    for program in case.programs:
        kinds = [(e.params.get("op", e.op.name), e) for e in program.main.eqns if e.op is not o.begin]
        come = [v for kind, e in kinds if kind in ("exchange_chunks", "gather_chunks") for v in e.outputs]
        users = {v: [e for e in program.main.eqns if v in e.vars] for v in come}
        for v, using in users.items():
            assert [(e.op, e.inputs[0]) for e in using] == [(o.verified, v)]
            count = using[0].inputs[2]
            assert program.role(count) == Role("counter", "draws") and count.name in program.updates
            seen.add(using[0].params["of"])
    assert seen == ({"up.weight"} if "up.w*" in str(written) else COMPRESSED)


@pytest.mark.parametrize("rows", [1, 2])
def test_bytes_that_change_on_their_way_are_told_with_the_parameter_and_where_they_are_from(rows):
    sent = torch.arange(40, dtype=torch.uint8).view(2, 20)
    come = sent.clone()
    come[1, 7] ^= 4
    how = {"axes": ("dp",), "every": 10, "of": "up.weight"}
    COMMUNICATORS.append(Wire(sent))
    try:
        assert o.verified(sent, sent[:rows], torch.tensor(20), **how) is sent
        assert o.verified(come, sent[:rows], torch.tensor(21), **how) is come  # not looked at
        with pytest.raises(RunError, match=r"up.weight: encoded bytes have changed .* over dp: from place 1 to 0"):
            o.verified(come, sent[:rows], torch.tensor(20), **how)
    finally:
        COMMUNICATORS.pop()
