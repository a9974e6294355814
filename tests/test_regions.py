"""Which stretches of a program are compiled as one."""

from __future__ import annotations

from mycel.ir import Program, call, check
from mycel.placing import outlined
from mycel.plan import CPU, Clock
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
