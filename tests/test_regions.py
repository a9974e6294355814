"""Which stretches of a program are compiled as one."""

from __future__ import annotations

from mycel.ir import Program
from mycel.placing import outlined
from mycel.plan import CPU, Clock


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
