"""The clock's laws, on random programs: blocks are exact wherever they are called, what overlaps saves and never adds,
memory is what is alive."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import yaml
from distributing import OneDevice, ready_to_run
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama

import mycel
from mycel import lower, plan, transform
from mycel.errors import PlanError
from mycel.ir import DEVICE, GRAIN, OPS, Mesh, Program, Type, Var, check
from mycel.ops import o
from mycel.ops.memory_sharing import is_view
from mycel.ops.overwriting import overwritten
from mycel.plan import CPU, Clock, Costs, Plan, clock
from mycel.plan.clock import COMPUTE
from mycel.plan.cost import TURNS
from mycel.plan.hardware import KNOWN, Hardware, hardware_of, probed, rate
from mycel.plan.kernels import moments
from mycel.plan.links import Link, Links, fitted, message
from mycel.plan.message_memory import message_memory
from mycel.plan.step_memory import size
from mycel.sizes import span

MESH = Mesh(dp=2, tp=2)
FAST, SLOW = Link(1e10, 2e-5, "host"), Link(1e9, 1e-4, "network", busy=0.25)
LINKS = Links(MESH, SLOW, {"tp": FAST})
SHAPE = "f32[48,48]"
MESSAGES = sorted(name for name, op in OPS.items() if op.collective is not None)


def near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


@st.composite
def bodies(draw, calls=(), most=14):
    """The equations of a block from x: kernels, views, collectives that wait, collectives that are begun and finished
    later, or of two tensors in one message, moves to the host and back, calls."""
    names, lines, open_, away, gone = ["x"], [], [], [], []
    for i in range(draw(st.integers(2, most))):
        a, b = draw(st.sampled_from(names[-3:])), draw(st.sampled_from(names))
        how = f'axes=("{draw(st.sampled_from(("dp", "tp")))}",), count=2'
        kinds = ("work", "work", "view", "wait", "begin", "finish", "together", "leave", "left", "call")
        match draw(st.sampled_from(kinds)):
            case "view" | "wait" | "work" if gone and draw(st.booleans()):
                k = gone.pop(0)
                lines.append(f'  v{i}: {SHAPE} = finish_move(u{k}, h{k}, to="device")')
            case "view":
                lines.append(f"  v{i}: {SHAPE} = permute({a}, dims=(1, 0))")
            case "wait":
                lines.append(f"  v{i}: {SHAPE} = all_reduce({a}, {how})")
            case "begin":
                lines.append(f'  t{i}: i64[] = begin({a}, {how}, op="all_reduce")')
                open_.append((f"t{i}", a, how))
                continue
            case "finish" if open_:
                token, sent, params = open_.pop(draw(st.integers(0, len(open_) - 1)))
                lines.append(f'  v{i}: {SHAPE} = finish({token}, {sent}, {params}, op="all_reduce")')
            case "together":
                lines += together(a, b, how, i)
            case "leave":
                lines.append(f'  t{i}: i64[] = begin_move({a}, to="host")')
                away.append((f"t{i}", a))
                continue
            case "left" if away:
                token, sent = away.pop(0)
                lines.append(f'  h{i}: host({SHAPE}) = finish_move({token}, {sent}, to="host")')
                lines.append(f'  u{i}: i64[] = begin_move(h{i}, to="device")')
                gone.append(i)
                continue
            case "call" if calls:
                lines.append(f"  v{i}: {SHAPE} = call({a}, block=@{draw(st.sampled_from(calls))})")
            case _:
                op = draw(st.sampled_from(("matmul", "add")))
                lines.append(f"  v{i}: {SHAPE} = {op}({a}, {b})")
        names.append(f"v{i}")
    lines += [
        f'  w{k}: {SHAPE} = finish({token}, {sent}, {params}, op="all_reduce")'
        for k, (token, sent, params) in enumerate(open_)
    ]
    names += [f"w{k}" for k in range(len(open_))]
    for k in gone:
        lines.append(f'  b{k}: {SHAPE} = finish_move(u{k}, h{k}, to="device")')
        names.append(f"b{k}")
    lines += [
        f'  g{k}: host({SHAPE}) = finish_move({token}, {sent}, to="host")' for k, (token, sent) in enumerate(away)
    ]
    lines.append(f"  y: {SHAPE} = add({names[-1]}, {draw(st.sampled_from(names))})")
    return "\n".join(lines)


def together(a: str, b: str, how: str, i: int) -> list[str]:
    """Two tensors in one message: scattered, and gathered again as v and w."""
    scatter, gather = (f'{how}, op="{op}", dims=(0, 0)' for op in ("reduce_scatter", "all_gather"))
    return [
        f"  t{i}: i64[] = begin({a}, {b}, {scatter})",
        f"  c{i}: f32[24,48], d{i}: f32[24,48] = finish(t{i}, {a}, {b}, {scatter})",
        f"  s{i}: i64[] = begin(c{i}, d{i}, {gather}, sizes=(48, 48))",
        f"  v{i}: {SHAPE}, z{i}: {SHAPE} = finish(s{i}, c{i}, d{i}, {gather}, sizes=(48, 48))",
    ]


def block(name: str, body: str) -> str:
    return f"def {name}(x: {SHAPE}):\n{body}\n  return y\n"


@st.composite
def programs(draw):
    inner, middle = draw(bodies()), draw(bodies(calls=("inner",)))
    text = block("inner", inner) + block("middle", middle) + block("main", draw(bodies(calls=("inner", "middle"))))
    return check(Program.parse(text))


def flat(program: Program) -> Program:
    """All calls replaced by what they call."""
    blocks = program.blocks

    def opened(name, argument):
        lines = []
        values = {blocks[name].inputs[0]: argument}
        for eqn in blocks[name].eqns:
            inputs = tuple(values.get(x, x) if isinstance(x, Var) else x for x in eqn.inputs)
            if eqn.op.name == "call":
                inside, out = opened(eqn.params["block"], inputs[0])
                lines += inside
                values[eqn.outputs[0]] = out
            else:
                new = tuple(Var(f"u{next(count)}", v.type) for v in eqn.outputs)
                values.update(zip(eqn.outputs, new, strict=True))
                lines.append(replace(eqn, inputs=inputs, outputs=new))
        return lines, values[blocks[name].outputs[0]]

    count = itertools.count()
    main = program.main
    lines, out = opened(program.entry, main.inputs[0])
    return check(replace(program, blocks={program.entry: replace(main, eqns=tuple(lines), outputs=(out,))}))


@settings(max_examples=150, deadline=None)
@given(programs())
def test_blocks_are_exact_wherever_they_are_called(program):
    times, opened = clock(program, CPU, LINKS), clock(flat(program), CPU, LINKS)
    assert near(times.seconds, opened.seconds)
    assert all(near(times.totals[s], opened.totals[s]) for s in times.totals)


@settings(max_examples=100, deadline=None)
@given(programs())
def test_events_are_the_same_time(program):
    times = clock(program, CPU, LINKS)
    events = list(times.events())
    assert near(max(e.end for e in events), times.seconds)
    for stream in times.totals:
        mine = [e for e in events if e.stream == stream]
        assert near(sum(e.end - e.start for e in mine), times.totals[stream])
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(mine)), "a stream does one thing at a time"


def test_waiting_is_told_by_collective_and_computing_by_block():
    """By hand: what begins beside blocks is waited for as long as they do not cover it, and costs `busy`; what a block
    computes has no message in it."""
    how = [f'axes=("{axis}",), count=2' for axis in ("tp", "dp")]
    text = block("layer", f"  a: {SHAPE} = matmul(x, x)\n  y: {SHAPE} = all_reduce(a, {how[0]})")
    body = [f'  t: i64[] = begin(x, {how[1]}, op="all_reduce")', f"  a: {SHAPE} = call(x, block=@layer)"]
    body += [f"  b: {SHAPE} = call(a, block=@layer)", f'  z: {SHAPE} = finish(t, x, {how[1]}, op="all_reduce")']
    program = check(Program.parse(text + block("main", "\n".join([*body, f"  y: {SHAPE} = add(b, z)"]))))
    times, costs = clock(program, CPU, LINKS), Costs(program, CPU, False, LINKS)
    product, inside = (costs.seconds(eqn) for eqn in program.blocks["layer"].eqns)
    across, added = costs.message(program.main.eqns[0]), costs.seconds(program.main.eqns[-1])
    busy = SLOW.busy * across
    waits = times.waits()
    assert near(times.computing("layer"), product) and near(waits["all_reduce", ("tp",)], 2 * inside)
    exposed = max(0.0, across - busy - 2 * (product + inside))
    assert exposed > 0 and near(waits["all_reduce", ("dp",)], busy + exposed)
    assert near(times.seconds, sum(waits.values()) + 2 * product + added)


@settings(max_examples=100, deadline=None)
@given(programs())
def test_the_total_lies_between_computing_alone_and_one_thing_after_the_other(program):
    times = clock(program, CPU, LINKS)
    assert times.totals[COMPUTE] <= times.seconds * (1 + 1e-9)
    assert times.seconds <= sum(times.totals.values()) * (1 + 1e-9)
    for part in times.parts.values():
        assert -1e-12 <= part.exposed <= part.total * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 9))
def test_a_scan_costs_its_length_times_the_body(program, length):
    text = str(program).replace("def main(", "def body(")
    scanned = Program.parse(
        text + f"def main(x: {SHAPE}):\n  y: {SHAPE} = scan(x, body=@body, carry=1, length={length})\n  return y\n"
    )
    calls = [f"  h{i + 1}: {SHAPE} = call(h{i}, block=@body)" for i in range(length)]
    called = Program.parse(text + "\n".join([f"def main(h0: {SHAPE}):", *calls, f"  return h{length}\n"]))
    a, b = clock(check(scanned), CPU, LINKS), clock(check(called), CPU, LINKS)
    assert near(a.seconds, b.seconds) and all(near(a.totals[s], b.totals.get(s, 0.0)) for s in a.totals)
    costs = Costs(scanned, CPU, False, LINKS)
    assert near(
        costs.seconds(scanned.main.eqns[0]), length * sum(costs.seconds(e) for e in scanned.blocks["body"].eqns)
    )


def test_a_branch_costs_the_dearer_and_a_loop_says_what_it_assumes():
    text = (
        f"def work(x: {SHAPE}):\n  y: {SHAPE} = matmul(x, x)\n  return y\n"
        f'def talk(x: {SHAPE}):\n  y: {SHAPE} = all_reduce(x, axes=("dp",), count=2)\n  return y\n'
        f"def more(x: {SHAPE}):\n  p: bool[] = full(shape=(), value=True, dtype=bool)\n  return p\n"
    )
    head = f"def main(p: bool[], x: {SHAPE}):\n"
    branch = Program.parse(text + head + f"  y: {SHAPE} = cond(p, x, then=@work, orelse=@talk)\n  return y\n")
    talk = Program.parse(text + head + f"  y: {SHAPE} = call(x, block=@talk)\n  return y\n")
    loop = Program.parse(text + head + f"  y: {SHAPE} = loop(x, test=@more, body=@talk)  # model.py:7\n  return y\n")
    assert clock(check(branch), CPU, LINKS).seconds == clock(check(talk), CPU, LINKS).seconds
    times = clock(check(loop), CPU, LINKS)
    assert near(times.seconds, TURNS * clock(talk, CPU, LINKS).seconds)
    assert times.assumed == (f"{TURNS} turns of the loop at model.py:7",) and "model.py:7" in str(times)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_message_inside_a_block_costs_what_it_costs_outside(compiled):
    line = f'  y: {SHAPE} = all_reduce(x, axes=("dp",), count=2)\n  return y\n'
    outside = Program.parse(f"def main(x: {SHAPE}):\n{line}")
    inside = Program.parse(
        f"def layer(x: {SHAPE}):\n{line}def main(x: {SHAPE}):\n  y: {SHAPE} = call(x, block=@layer)\n  return y\n"
    )
    seconds = LINKS.seconds("all_reduce", ("dp",), 48 * 48 * 4)
    assert seconds > SLOW.start_s
    assert (
        clock(outside, CPU, LINKS).seconds
        == seconds
        == clock(inside, CPU, LINKS, ["layer"] if compiled else []).seconds
    )
    assert Costs(outside, CPU, compiled, LINKS).seconds(outside.main.eqns[0]) == seconds


def test_starts_of_short_kernels_are_hidden_on_a_gpu():
    """They wait in a queue there; a CPU starts each when the one before has ended."""
    gpu = replace(KNOWN["H200"], memory=1 << 37)
    for seconds in (0.0, 1e-7, 1e-6, 1e-5, 1e-3):
        start = gpu.started(seconds) - seconds
        assert 0 <= start <= min(seconds, gpu.launch_s) and near(CPU.started(seconds), seconds + CPU.launch_s)
    assert start > 0.99 * gpu.launch_s


def test_a_kernel_of_one_element_is_a_product():
    """A convolution with it has a rate of its own, where that was measured, in both directions; with groups it is as
    others."""
    x, w, y = Type(torch.float32, (2, 4, 6, 6)), (8, 4, 1, 1), Type(torch.float32, (2, 8, 6, 6))
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    assert o.conv.rate_of([x, Type(torch.float32, w)], window) == "conv_point"
    assert o.conv_weight.rate_of([y, x], {**window, "shape": w}) == "conv_point"
    assert o.conv_transpose.rate_of([y, Type(torch.float32, w)], {**window, "output_padding": (0, 0)}) == "conv_point"
    assert o.conv.rate_of([x, Type(torch.float32, (8, 4, 3, 3))], window) == "conv"
    assert o.conv.rate_of([x, Type(torch.float32, (8, 1, 1, 1))], {**window, "groups": 4}) == "conv"
    device = replace(CPU, rates={"conv.fp32": ((1e3, 1e9), (1e9, 1e9))})
    assert near(device.flops(torch.float32, "conv_point", 1e6), 1e9)  # of a probe that did not measure it


def test_what_is_standardised_across_rows_is_read_twice():
    """By a compiled block; within a row, once."""
    size, device = 64 * 32 * 4 * 4 * 4, replace(CPU, launch_s=0.0)
    x, c, r = "f32[64,32,4,4]", "f32[32]", "f32[64,32,4,1]"
    batch = f"def main(x: {x}):\n  y: {x}, m: {c}, v: {c} = batch_norm(x, None, None, eps=1e-05)\n  return y\n"
    layer = f"def main(x: {x}):\n  y: {x}, m: {r}, v: {r} = layer_norm(x, None, None, ndim=1, eps=1e-05)\n  return y\n"
    for text, moved in ((batch, 3 * size), (layer, 2 * size)):
        program = check(Program.parse(text))
        assert near(clock(program, device, None, ["main"]).seconds, moved / device.bytes_s)


def test_what_travels_in_one_message_is_packed_and_unpacked():
    """Computing copies it; what travels alone is sent from where it lies and received where it is read."""

    def times(packed: bool):
        lines = together("x", "x", 'axes=("dp",), count=2', 0)
        if not packed:
            lines = [line.replace("x, x", "x").replace("dims=(0, 0)", "dims=(0,)") for line in lines]
            lines = [
                line.replace(", d0: f32[24,48]", "").replace(", d0", "").replace("(48, 48)", "(48,)") for line in lines
            ]
            lines = [line.replace(f", z0: {SHAPE}", "") for line in lines]
        text = "\n".join([f"def main(x: {SHAPE}):", *lines, "  return v0\n"])
        return clock(check(Program.parse(text)), CPU, LINKS)

    size = 2 * 48 * 48 * 4  # of two tensors: read and written, on the way out and when they have come
    copies = 2 * (CPU.started(2 * size / CPU.bandwidth(2 * size)))
    assert near(times(True).totals[COMPUTE], copies) and times(False).totals[COMPUTE] == 0
    assert near(times(True).seconds, copies + sum(times(True).totals[s] for s in ("host", "network")))


def test_levels_are_wires_of_their_own():
    """Two messages at once: over different levels they go beside each other, over one they queue."""

    def begun(*axes):
        begins = [f'  t{i}: i64[] = begin(x, axes=("{a}",), count=2, op="all_reduce")' for i, a in enumerate(axes)]
        ends = [
            f'  y{i}: {SHAPE} = finish(t{i}, x, axes=("{a}",), count=2, op="all_reduce")' for i, a in enumerate(axes)
        ]
        return Program.parse("\n".join([f"def main(x: {SHAPE}):", *begins, *ends, "  return y0, y1\n"]))

    free = Links(MESH, replace(SLOW, busy=0.0), {"tp": FAST})
    one = {a: free.seconds("all_reduce", (a,), 48 * 48 * 4) for a in ("dp", "tp")}
    assert near(clock(begun("dp", "tp"), CPU, free).seconds, max(one.values()))
    assert near(clock(begun("dp", "dp"), CPU, free).seconds, 2 * one["dp"])
    assert free.of(("dp", "tp")).name == "network" and free.levels == ("network", "host")


def test_axes_lie_in_the_innermost_level_that_holds_their_ranks():
    device = Hardware("test", 1e12, 1e12, 1e11, 1e-6, levels=(replace(FAST, ranks=8), SLOW))
    links = device.links(Mesh(pp=2, dp=4, tp=4))
    assert [links.of((a,)).name for a in ("pp", "dp", "tp")] == ["network", "network", "host"]
    assert device.links(Mesh(dp=2, tp=4)).levels == ("host",)


# -- memory ----------------------------------------------------------------------------------------------------------


def brute_peak(program: Program) -> int:
    """The most bytes alive at any equation, each value counted anew at each one: the values of all blocks that are
    open.  A result that is written over an operand is none by itself."""
    over = overwritten(program)

    def most(name: str, below: int) -> int:
        eqns, outputs = program.blocks[name].eqns, program.blocks[name].outputs
        source = {v: e for e in eqns for v in e.outputs}
        first = {v: i for i, e in enumerate(eqns) for v in e.outputs}
        for e in eqns:  # the result of a message has its memory from where it begins
            halves = ("finish", "finish_move")
            first.update(dict.fromkeys(e.outputs, first[e.inputs[0]]) if e.op.name in halves else {})

        within = {eqns[i].outputs[-1]: eqns[i].inputs[k] for i, k in over[name].items()}

        def shows(v):
            while v in within or (v in source and is_view(source[v])):
                v = within[v] if v in within else source[v].inputs[0]
            return v

        def lies(v):
            return v.type.space == DEVICE and source[v].op.name != "begin_move"

        def alive(v, i):
            reads = [j for j, e in enumerate(eqns) for u in e.vars if shows(u) is v]
            is_output = any(isinstance(o, Var) and shows(o) is v for o in outputs)
            end = len(eqns) if is_output else max([first[v], source_at[v], *reads])
            return first[v] <= i <= end

        source_at = {v: i for i, e in enumerate(eqns) for v in e.outputs}
        ends = {source_at[e.inputs[0]]: i for i, e in enumerate(eqns) if e.op.name == "finish"}
        messages = {i: message_memory(e, eqns[ends.get(i, i)].outputs, False) for i, e in enumerate(eqns)}
        peak = below
        for i, eqn in enumerate(eqns):
            here = sum(size(v) for v in first if shows(v) is v and lies(v) and alive(v, i))
            here += sum(m.on_the_way for k, m in messages.items() if k <= i <= ends.get(k, k))
            own = [m.beginning for k, m in messages.items() if k == i]
            own += [m.ending for k, m in messages.items() if ends.get(k, k) == i]
            peak = max(peak, below + here + max([0, *own]))
            if eqn.op.name == "call":
                results = sum(size(v) for v in eqn.outputs)
                peak = max(peak, most(eqn.params["block"], below + here - results))
        return peak

    return most(program.entry, sum(size(v) for v in program.inputs))


@settings(max_examples=100, deadline=None)
@given(programs())
def test_the_peak_is_that_of_counting_what_is_alive(program):
    times = clock(program, CPU, LINKS)
    assert times.peak[DEVICE] == brute_peak(program)
    assert times.held == sum(-(-v.type.bytes // GRAIN) * GRAIN for v in program.inputs)


GATED = """def main(gate: T, up: T, d_hidden: T, d_out: T):
  silu: T = silu(gate)
  hidden: T = mul(silu, up)
  d_weight: T = linear_weight(d_out, hidden)
  d_up: T = mul(d_hidden, silu)
  d_x: T = matmul(d_up, d_weight)
  return d_x
"""


def test_what_a_compiler_makes_one_kernel_of_is_alive_at_once():
    """`hidden` waits for `d_up`: silu, of which both are made, is never in memory.  Each by itself, d_weight would be
    made and `hidden` gone before d_up is there."""
    program = check(Program.parse(GATED.replace("T", SHAPE)))
    main = program.main
    costs = Costs(program, CPU, True)
    there = costs.in_memory(main, True)
    assert moments(main, costs.groups(main, there), there) == [0, 3, 4, 3, 4]
    apart = check(Program.parse(GATED.replace("d_hidden, silu", "d_hidden, d_out").replace("T", SHAPE)))
    together, one_by_one = (clock(p, CPU, None, ["main"]).peak[DEVICE] for p in (program, apart))
    assert together == one_by_one + size(main.inputs[0])


def test_what_waits_for_a_kernel_between_is_another_kernel():
    """And a small statistic is written: what uses it later does not hold up what was made with it."""
    waits = GATED.replace("mul(d_hidden, silu)", "mul(d_weight, silu)")
    row = SHAPE.replace("48]", "1]")
    norm = f"""def main(x: T, d: T, w: T):
  y: T, mean: {row}, scale: {row} = layer_norm(x, None, None, ndim=1, eps=1e-05)
  p: T = matmul(y, w)
  shifted: T = mul(d, scale)
  q: T = matmul(p, shifted)
  return q
"""
    for text in (waits, norm):
        program = check(Program.parse(text.replace("T", SHAPE)))
        costs = Costs(program, CPU, True)
        there = costs.in_memory(program.main, True)
        assert moments(program.main, costs.groups(program.main, there), there) == list(range(len(program.main.eqns)))


AGAIN = """def main(x: T, w: T):
  p: T = matmul(x, w)
  s: T = add(x, p)
  a: T = mul(s, w)
  q: T = matmul(a, w)
  b: T = mul(s, q)
  r: T = matmul(b, w)
  return r
"""


def test_what_is_made_again_by_a_later_kernel_keeps_what_it_is_made_of():
    """`s` is never in memory: behind `q` it is made of `p` once more."""
    again, anew = (check(Program.parse(text.replace("T", SHAPE))) for text in (AGAIN, AGAIN.replace("s, q", "x, q")))
    of_both, of_one = (clock(p, CPU, None, ["main"]).peak[DEVICE] for p in (again, anew))
    assert of_both == of_one + size(again.main.inputs[0])


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one():
    model = llama()
    ids = torch.randint(0, 64, (8, 16))
    return OneDevice.of(model, {"input_ids": ids, "labels": ids}, clip_norm=1.0)


@pytest.mark.parametrize(
    "names, sizes",
    [("dp", {"dp": 4}), ("zero3", {"dp": 4}), ("tp", {"tp": 2}), ("zero3+tp", {"dp": 2, "tp": 2})],
    ids=str,
)
def test_what_overlaps_takes_no_longer_than_one_after_the_other(one, names, sizes):
    mesh = Mesh(sizes)
    distributed = one.under(Plan.read(names, mesh))
    apart = check(lower.hoist(transform.simplify(distributed.local)))
    links = CPU.links(mesh)
    serial, beside = clock(apart, CPU, links), clock(ready_to_run(distributed), CPU, links)
    assert near(serial.seconds, sum(serial.totals.values())), "nothing goes on beside anything yet"
    assert beside.seconds <= serial.seconds * (1 + 1e-9)


def test_messages_that_recomputation_sends_again_are_charged(one):
    mesh = Mesh(tp=2)
    program = check(transform.simplify(one.under(Plan.read("tp", mesh)).local))
    links = CPU.links(mesh)
    costs = Costs(program, CPU, False, links)
    times, sent = {}, {}
    for how in ("none", "full"):
        decided = plan.decide(lambda prices: under(program, one.unsharded.body, costs, prices), 0, costs, None, how)
        local, times[how] = decided.program, decided.times
        runs = lower.sent(local)
        sent[how] = sum(runs.values())
        wire = [links.seconds(*message(e)) for e in itertools.chain(*(b.eqns for b in flat_calls(local)))]
        assert near(times[how].totals["network"], sum(wire))
    assert sent["full"] > sent["none"] and times["full"].totals["network"] > times["none"].totals["network"]
    assert times["full"].seconds > times["none"].seconds


@dataclass
class Resident:
    program: Program
    times: plan.Times


def under(program: Program, body: str, costs: Costs, prices) -> Resident:
    """What a rank runs where keeping a byte costs so much."""
    local = lower.reside(program, plan.residuals(program, body, costs, prices))
    return Resident(local, clock(local, costs.hardware, costs.links))


def flat_calls(program: Program):
    """Blocks as often as they are called."""

    def opened(name):
        yield program.blocks[name]
        for e in program.blocks[name].eqns:
            for ref in e.refs:
                yield from opened(ref)

    return opened(program.entry)


def test_a_dear_message_is_kept_where_a_free_one_is_sent_again(one):
    """The cut knows what messages cost."""
    mesh = Mesh(tp=2)
    program = check(transform.simplify(one.under(Plan.read("tp", mesh)).local))
    sent = []
    for link in (Link(1e15, 0.0), Link(1e6, 1e-2)):
        costs = Costs(program, CPU, False, Links(mesh, link))
        kept = plan.residuals(program, one.unsharded.body, costs, [1e-9])
        sent.append(sum(lower.sent(lower.reside(program, kept)).values()))
    assert sent[0] > sent[1] == sum(lower.sent(program).values())


def test_blocks_that_programs_share_are_priced_once(one):
    program = ready_to_run(one.under(Plan.read("dp", Mesh(dp=2))))
    shared = Clock(CPU, CPU.links(Mesh(dp=2)))
    first = shared(program)
    lines = dict(shared._lines)
    again = shared(replace(program, updates=program.updates))
    assert again == first and shared._lines == lines


def test_explain_says_how_long_a_step_takes():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss)
    step.prepare(torch.ones(4, 8), torch.ones(4, 8))
    assert f"predicted step   {span(step.plan.predicted.seconds)}: computing" in step.explain()


# -- what was measured


@settings(max_examples=50, deadline=None)
@given(st.floats(1e7, 1e12), st.floats(1e-7, 1e-3), st.sampled_from(MESSAGES))
def test_a_fit_finds_the_link_it_was_measured_on(bytes_s, start_s, name):
    true = Link(bytes_s, start_s)
    points = [(k, size, true.seconds(name, k, size)) for k in (2, 4) for size in (2**10, 2**16, 2**24)]
    link = fitted("host", 4, 0.5, {name: points})
    assert all(math.isclose(link.seconds(name, k, n), s, rel_tol=1e-3) for k, n, s in points)


@given(
    st.floats(1e7, 1e9), st.floats(1e-5, 1e-3), st.sampled_from(MESSAGES), st.integers(0, 4), st.floats(1e-6, 1e-2)
)  # fmt: skip
def test_a_message_measured_wrongly_does_not_bend_the_fit(bytes_s, start_s, name, which, wrong):
    """As where ranks share cores: what was computed beside a message is subtracted, and almost nothing may be left."""
    true = Link(bytes_s, start_s)
    points = [[4, size, true.seconds(name, 4, size)] for size in (2**10, 2**14, 2**17, 2**20, 2**23)]
    measured = [[*p[:2], p[2] * (wrong if i == which else 1)] for i, p in enumerate(points)]
    link = fitted("host", 4, 0.5, {name: measured})
    right = [p for i, p in enumerate(points) if i != which]
    assert all(0.49 < link.seconds(name, 4, n) / s < 2.01 for _, n, s in right)


@pytest.mark.parametrize("unseen", [1, 2, 3, 4])
def test_messages_that_were_not_seen_say_nothing(unseen):
    """Where ranks share cores small messages take no time: others compute in what one waits."""
    true = Link(2e7, 0.0)
    points = [[4, n, true.seconds("all_reduce", 4, n)] for n in (2**10, 2**14, 2**17, 2**20, 2**23)]
    measured = [[*p[:2], 0.0] for p in points[:unseen]] + points[unseen:]
    link = fitted("network", 4, 0.0, {"all_reduce": measured})
    assert link.seconds("all_reduce", 4, 2**23) == pytest.approx(points[-1][2])


def test_groups_of_each_size_are_as_fast_as_they_were_measured():
    """Two pairs share a wire, which a ring of four crosses once each way: half as fast for what each rank sends."""
    pairs, ring = Link(5e7, 1e-4), Link(1e8, 1e-4)
    points = [
        (k, size, link.seconds("all_reduce", k, size)) for k, link in ((2, pairs), (4, ring)) for size in (2**12, 2**22)
    ]
    link = fitted("network", 4, 0.0, {"all_reduce": points})
    assert all(math.isclose(link.seconds("all_reduce", k, n), s, rel_tol=1e-6) for k, n, s in points)
    assert link.seconds("all_reduce", 8, 1e7) == pytest.approx(ring.seconds("all_reduce", 8, 1e7))  # as the nearest


@given(
    st.builds(
        Link,
        st.floats(1.0, 1e15),
        st.floats(0.0, 1.0),
        st.sampled_from(["network", "host"]),
        st.integers(1, 1 << 30),
        st.floats(0.0, 1.0),
        st.lists(
            st.tuples(st.sampled_from(MESSAGES), st.integers(2, 64), st.floats(1.0, 1e15), st.floats(0.0, 1.0)),
            unique_by=lambda x: x[:2],
        ).map(tuple),
    )
)
def test_a_plan_writes_links_as_they_are(link):
    assert Link.read(yaml.safe_load(yaml.safe_dump(link.data()))) == replace(
        link, measured=tuple(sorted(link.measured))
    )


@given(
    st.lists(st.tuples(st.floats(1.0, 1e12), st.floats(1.0, 1e12)), min_size=1, max_size=6, unique_by=lambda p: p[0]),
    st.floats(1.0, 1e13),
)
def test_a_rate_lies_between_its_neighbours(points, work):
    curve = tuple(sorted(points))
    below = [p for p in curve if p[0] <= work][-1:]
    above = [p for p in curve if p[0] > work][:1]
    rates = [y for _, y in (*below, *above)]
    assert min(rates) * (1 - 1e-9) <= rate(curve, work) <= max(rates) * (1 + 1e-9)
    assert all(math.isclose(rate(curve, x), y, rel_tol=1e-9) for x, y in curve)


PROBED = """
device: CPU
launch_s: 1.0e-05
rates: {memory: [[1000, 1.0e+10], [1000000, 1.0e+9]], product.fp32: [[1000, 1.0e+9], [1000000, 4.0e+9]]}
levels:
- {name: host, ranks: 4, busy: 0.5, messages: {all_reduce: [[2, 1000, 0.001], [4, 1000000, 0.1]]}}
"""


def test_planning_reads_what_was_probed(tmp_path, monkeypatch):
    file = tmp_path / "probe.yaml"
    file.write_text(PROBED)
    monkeypatch.setenv("MYCEL_PROBE", str(file))
    device = hardware_of(torch.device("cpu"))
    assert (
        device.launch_s == 1e-5 and device.flops(torch.float32, "product", 1e6) == 4e9 and device.bandwidth(1e3) == 1e10
    )
    assert device.links(Mesh(dp=4)).of(("dp",)).busy == 0.5
    file.write_text(PROBED.replace("device: CPU", "device: another"))
    preset = lambda: replace(hardware_of(torch.device("cpu")), widens={})  # this processor's, measured apart
    assert preset() == CPU
    file.write_text("device: CPU\nrates: 3")
    with pytest.raises(PlanError, match="cannot be read"):
        hardware_of(torch.device("cpu"))
    file.unlink()
    with pytest.raises(PlanError, match="no file"):
        hardware_of(torch.device("cpu"))
    monkeypatch.setenv("MYCEL_PROBE", "")
    assert preset() == CPU == probed(CPU, "")
