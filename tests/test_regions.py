"""Which stretches of a program are compiled as one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.ir import Program, call, check
from mycel.placing import outlined
from mycel.plan import CPU, Clock
from mycel.run import interpret
from mycel.transform import outline


def test_a_stretch_counts_for_all_calls_of_its_block():
    """In one of many layers it saves too little of the step, in all of them as much as in one alone."""
    for layers in (1, 64):
        calls = "\n".join(f"  y{i + 1}: f32[4096,512] = call(y{i}, w, counts, block=@layer)" for i in range(layers))
        program = Program.parse(f"""
def layer(x: f32[4096,512], w: f32[2,512,512], counts: i64[2]):
  h: f32[4096,512] = grouped_matmul(x, w, counts)
  a: f32[4096,512] = gelu(h)
  y: f32[4096,512] = mul(a, 0.5)
  return y

def main(y0: f32[4096,512], w: f32[2,512,512], counts: i64[2]):
{calls}
  return y{layers}
""")
        _, compiled, regions = outlined(program, Clock(CPU, None), CPU)
        assert regions == {"layer": ("a",)} and len(compiled) == 1


def test_a_region_holds_back_no_earlier_phase():
    """What backward goes on with in one stretch, forward still reads: each phase has its own region, in one program
    that is well-formed.  Where nobody does, both are one."""
    for reads, counts in (("b", {"forward": 2, "backward": 2}), ("w", {"backward": 4})):
        program = Program.parse(f"""
def layer(x: f32[64,64], w: f32[64,64]):
  y: f32[64,64] = linear(x, w)
  return y

def main(x: f32[64,64], w: f32[64,64]):
  a: f32[64,64] = gelu(x)
  b: f32[64,64] = mul(a, 0.5)
  c: f32[64,64] = exp(b) [backward]
  d: f32[64,64] = mul(c, 2.0) [backward]
  e: f32[64,64] = call({reads}, w, block=@layer)
  f: f32[64,64] = call(d, w, block=@layer) [backward]
  return e, f
""")
        changed, names = outline(check(program), lambda block, run: True)
        calls = [e for e in check(changed).main.eqns if e.op is call and str(e.params["block"]) != "layer"]
        assert {e.phase: len(changed.blocks[e.params["block"]].eqns) for e in calls} == counts
        assert len(calls) == len(counts) and {"layer", *(str(e.params["block"]) for e in calls)} == names


def test_a_stretch_ends_where_a_new_microbatch_begins():
    """Backward of one and forward of the next are no region together, though they stand beside each other."""
    program = Program.parse("""
def main(x: f32[64,64]):
  a: f32[64,64] = exp(x) [backward]
  b: f32[64,64] = mul(a, 2.0) [backward]
  c: f32[64,64] = gelu(x)
  d: f32[64,64] = mul(c, 0.5)
  return b, d
""")
    changed, names = outline(program, lambda block, run: True)
    assert [e.phase for e in check(changed).main.eqns] == ["backward", "forward"] and len(names) == 2


def test_a_stretch_computes_again_what_is_cheaper_to_than_to_read():
    """Logits in 32 bits, their distance from the maximum and its exponential are in no memory, what they are made of in
    16 bits is; but what somebody else reads stays."""
    for read in ("", ", f"):
        program = check(
            Program.parse(f"""
def other(m: f32[8,1]):
  n: f32[8,1] = mul(m, 1.0)
  return n

def main(x: bf16[8,4], w: bf16[100,4]):
  z: bf16[8,100] = linear(x, w)
  f: f32[8,100] = cast(z, dtype=f32)
  m: f32[8,1] = amax(f, dims=(1,), keepdim=True)
  n: f32[8,1] = call(m, block=@other)
  s: f32[8,100] = sub(f, n)
  e: f32[8,100] = exp(s)
  t: f32[8,1] = sum(e, dims=(1,), keepdim=True)
  u: f32[8,1] = call(t, block=@other)
  p: f32[8,100] = div(e, u)
  q: bf16[8,100] = cast(p, dtype=bf16)
  return q{read}
""")
        )
        changed, _ = outline(program, lambda block, run: True)
        stretches = [e for e in check(changed).main.eqns if e.op is call and str(e.params["block"]) != "other"]
        kept = {"f" if read else "z", "m"}
        assert {v.name for v in stretches[0].outputs} == kept
        assert {v.name for v in stretches[1].vars} == {"f" if read else "z", "n"}
        assert {v.name for v in stretches[2].vars} == {"f" if read else "z", "n", "u"}
        args = [torch.randn(8, 4).bfloat16(), torch.randn(100, 4).bfloat16()]
        for a, b in zip(interpret(program, args), interpret(changed, args), strict=True):
            assert torch.equal(a, b)


@st.composite
def programs(draw):
    """Equations on tensors of two shapes and dtypes, with calls between some of them."""
    lines, values = [], [("x", "f32[6,4]"), ("y", "bf16[6,4]"), ("r", "f32[6,1]")]
    for i in range(draw(st.integers(3, 16))):
        kind = draw(st.sampled_from(["sin", "neg", "wide", "narrow", "add", "sum", "call"]))
        name, type_ = draw(st.sampled_from(values))
        if kind == "call":
            name, type_ = draw(st.sampled_from([v for v in values if v[1] == "f32[6,1]"]))
            lines.append(f"v{i}: {type_} = call({name}, block=@other)")
        elif kind == "add":
            other, of = draw(st.sampled_from([v for v in values if v[1].startswith("f32")]))
            type_ = "f32[6,1]" if (type_.endswith("1]") and of.endswith("1]")) else "f32[6,4]"
            lines.append(f"v{i}: {type_} = add({name}, {other})")
        elif kind == "sum":
            type_ = type_.replace("6,4", "6,1").replace("bf16", "f32")
            wide = f"cast({name}, dtype=f32)"
            lines.append(f"w{i}: {dict(values)[name].replace('bf16', 'f32')} = {wide}")
            lines.append(f"v{i}: {type_} = sum(w{i}, dims=(1,), keepdim=True)")
        elif kind in ("wide", "narrow"):
            dtype = "f32" if kind == "wide" else "bf16"
            type_ = f"{dtype}{type_[type_.index('[') :]}"
            lines.append(f"v{i}: {type_} = cast({name}, dtype={dtype})")
        else:
            lines.append(f"v{i}: {type_} = {kind}({name})")
        values.append((f"v{i}", type_))
    results = draw(st.lists(st.sampled_from([name for name, _ in values[3:]]), min_size=1, max_size=3, unique=True))
    body = "\n  ".join(lines)
    return Program.parse(f"""
def other(m: f32[6,1]):
  n: f32[6,1] = mul(m, 0.5)
  return n

def main(x: f32[6,4], y: bf16[6,4], r: f32[6,1]):
  {body}
  return {", ".join(results)}
""")


@settings(max_examples=200, deadline=None)
@given(programs())
def test_stretches_compute_the_same(program):
    changed, _ = outline(check(program), lambda block, run: True)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(v.shape, generator=generator).to(v.dtype) for v in program.inputs]
    for a, b in zip(interpret(program, args), interpret(check(changed), args), strict=True):
        assert torch.equal(a, b)
