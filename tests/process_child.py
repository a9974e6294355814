"""What a rank does in the tests of real processes:  python process_child.py JOB [FOLDER]

Every rank makes the tensors of all ranks from the same seeds, so each can say by itself what it should get.
A job that goes wrong raises, and its rank ends with exit code 1.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def note(name: str, text: str = "") -> None:
    """Leave word for the test, in one piece."""
    (FOLDER / f".{name}-{os.getpid()}").write_text(text)
    os.rename(FOLDER / f".{name}-{os.getpid()}", FOLDER / name)


# -- jobs without torch


def say() -> None:
    """A line to stdout, the environment to a file."""
    print(f"this is rank {RANK} of {WORLD}", flush=True)
    note(f"env-{RANK}", "\n".join(f"{k}={v}" for k, v in os.environ.items()))


def family() -> None:
    """Sleep, with a process of its own that does so too, and hears no signal."""
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note(f"pid-of-{RANK}", str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    sleep()


def sleep() -> None:
    """Wait, until interrupted."""
    note(f"pid-{RANK}", str(os.getpid()))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        note(f"interrupted-{RANK}")
        sys.exit(130)


def deaf() -> None:
    """Wait, and hear no signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note(f"pid-{RANK}", str(os.getpid()))
    time.sleep(60)


# -- the collectives, on lists of the tensors of a group


COLLECTIVES = [
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "exchange_chunks", "gather_chunks",
]  # fmt: skip


def reference(name, xs, me, **how):
    """What the rank at index `me` gets when the ranks of its group hold `xs`."""
    import torch

    if name == "all_reduce":
        return reduced(xs, how["kind"])
    if name == "all_gather":
        return torch.cat(xs, how["dim"])
    if name == "gather_chunks":
        return torch.cat(xs)
    if name == "exchange_chunks":
        return torch.cat([x.tensor_split(len(xs))[me] for x in xs])
    if name == "reduce_scatter":
        return reduced(xs, how["kind"]).tensor_split(len(xs), how["dim"])[me]
    if name == "all_to_all":
        return torch.cat([x.tensor_split(len(xs), how["split"])[me] for x in xs], how["join"])
    return xs[how["to"].index(me)] if me in how["to"] else torch.zeros_like(xs[me])


def reduced(xs, kind):
    import torch

    if kind == "+":
        total = xs[0].to(torch.float64) if xs[0].dtype in (torch.float16, torch.bfloat16) else xs[0]
        for x in xs[1:]:
            total = total + x
        return total.to(xs[0].dtype)
    larger = {">": torch.maximum, "<": torch.minimum}[kind]
    total = xs[0]
    for x in xs[1:]:
        total = larger(total, x)
    return total


def make(seed, rank, shape, dtype, form):
    """A tensor whose sums are exact in every type, now and then NaN where it may be, laid out in memory as `form`
    says."""
    import torch

    g = torch.Generator().manual_seed(seed * 101 + rank)
    low = 0 if not dtype.is_signed or dtype is torch.bool else -8
    whole = {"plain": shape, "turned": shape[::-1], "strided": (*shape[:-1], shape[-1] * 2) if shape else shape}[form]
    x = torch.randint(low, 9, whole, generator=g).to(dtype)
    if dtype.is_complex:
        x = torch.complex(x.real, torch.randint(-8, 9, whole, generator=g).to(x.real.dtype)).conj()
    if form == "turned":
        return x.permute(*reversed(range(len(shape))))
    return x[..., ::2] if form == "strided" and shape else x


def same(a, b) -> bool:
    import torch

    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0))


def arguments(name, r, n, ndim):
    """Random arguments of a collective over n ranks."""
    some = lambda: r.randrange(ndim) - r.choice([0, ndim])
    if name == "all_reduce":
        return {"kind": r.choice("++><")}
    if name == "all_gather":
        return {"dim": some()}
    if name == "reduce_scatter":
        return {"dim": some(), "kind": r.choice("++><")}
    if name == "all_to_all":
        return {"split": some(), "join": some()}
    if name.endswith("_chunks"):
        return {}
    to = [j if r.random() < 0.7 else -1 for j in r.sample(range(n), n)]
    return {"to": tuple(to)}


def laws(count: int = 100) -> None:
    """Every collective is its reference: meshes of one and two axes in any order, types, layouts in memory, one tensor
    and several."""
    import torch

    from mycel.ir.layout import Mesh
    from mycel.run.processes import world

    forms = {2: [{"dp": 2}, {"tp": 1, "dp": 2}], 3: [{"dp": 3}], 4: [{"dp": 2, "tp": 2}, {"dp": 4}]}[WORLD]
    for number, sizes in enumerate(forms):
        with world(Mesh(sizes), "cpu") as ranks:
            ranks.agree({"mesh": str(ranks.mesh)})
            for seed in range(number * 1000, number * 1000 + count):
                one_case(ranks, seed)
            one_rounding(ranks, torch.bfloat16)
            one_rounding(ranks, torch.float16)
            in_step(ranks)
            under_way(ranks)
            only_loopback()
            as_nccl(ranks)
            for seed in range(number * 1000, number * 1000 + 30):
                one_case(ranks, seed)


def one_case(ranks, seed: int) -> None:
    import torch

    r = random.Random(seed)
    axes = r.choice([p for k in range(1, len(ranks.mesh.axes) + 1) for p in itertools.permutations(ranks.mesh.axes, k)])
    n, me, group = ranks.mesh.count(axes), ranks.index(axes), ranks.mesh.group(ranks.rank, axes)
    name = r.choice(COLLECTIVES)
    moved = [
        torch.bool,
        torch.int16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ]
    dtypes = r.sample([*moved, torch.complex64, torch.complex128], 2)
    ndim = r.randint(1, 3)
    how = arguments(name, r, n, ndim)
    if how.get("kind", "+") != "+":
        dtypes = [t for t in dtypes if not t.is_complex] or [torch.float32]
    sizes = [0, n, 2 * n] if r.random() < 0.1 else [n, 2 * n, 6 * n]
    shapes = [tuple(r.choice(sizes) for _ in range(ndim)) for _ in range(r.choice([1, 1, 3]))]
    specs = [(shape, r.choice(dtypes), r.choice(["plain", "turned", "strided"])) for shape in shapes]
    xs = {rank: [make(seed * 7 + i, rank, *each) for i, each in enumerate(specs)] for rank in group}
    if how.get("kind", "+") != "+" and r.random() < 0.5:
        for x in xs[r.choice(group)]:
            if x.is_floating_point() and x.numel():
                x[(0,) * x.ndim] = float("nan")
    mine = xs[ranks.rank]
    before = [x.clone() for x in mine]
    if len(mine) == 1:
        got = [getattr(ranks, name)(mine[0], axes, *how.values())]
    else:
        got = ranks.wait(ranks.start(name, mine, axes=axes, **how))
    for i, y in enumerate(got):
        want = reference(name, [xs[rank][i] for rank in group], me, **how)
        assert same(y, want), (
            f"seed {seed}: {name}{how} over {axes} of {ranks.mesh}, {specs[i]}: rank {ranks.rank} has {y}, not {want}"
        )
    assert all(same(x, old) for x, old in zip(mine, before, strict=True)), f"seed {seed}: {name} changed its input"


def one_rounding(ranks, dtype) -> None:
    """A sum of 16-bit numbers is the right one, rounded once."""
    import torch

    from mycel.ops import o
    from mycel.ops.collective import COMMUNICATORS

    axes = ranks.mesh.axes
    n = ranks.mesh.count(axes)
    xs = [torch.rand(64, n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(n)]
    exact = sum(x.double() for x in xs)
    low, high = (exact * (1 - 2**-20)).to(dtype), (exact * (1 + 2**-20)).to(dtype)
    y = ranks.all_reduce(xs[ranks.rank], axes, "+")
    assert ((low <= y) & (y <= high)).all()
    z = ranks.reduce_scatter(xs[ranks.rank], axes, 1, "+")
    me = ranks.index(axes)
    assert ((low[:, me : me + 1] <= z) & (z <= high[:, me : me + 1])).all()
    COMMUNICATORS.append(ranks)
    wide = o.reduce_scatter_wide(xs[ranks.rank], axes=axes, count=n, dim=1)
    COMMUNICATORS.pop()
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    assert torch.equal(wide, total.to(dtype)[:, me : me + 1])


def in_step(ranks) -> None:
    """A sum of floats is the same to the bit on all ranks, and close to the right one; a large one, and one of
    nothing."""
    import torch

    axes = ranks.mesh.axes
    for size in (1, 5, 70_001, 600_000):
        xs = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(WORLD)]
        y = ranks.all_reduce(xs[ranks.rank], axes, "+")
        rows = ranks.all_gather(y[None], axes, 0)
        assert (rows == y).all()
        assert torch.allclose(y.double(), sum(x.double() for x in xs), rtol=1e-5, atol=1e-5)
    large = torch.full((600_000, 2), float(ranks.index(axes)))
    whole = ranks.wait(ranks.start("all_gather", [large, large.t()], axes=axes, dim=[0, 1]))
    assert (whole[0] == whole[1].t()).all()
    assert (whole[0].view(WORLD, -1) == torch.arange(WORLD)[:, None]).all()
    assert ranks.all_reduce(torch.zeros(0, 3), axes).shape == (0, 3)
    scalar = torch.tensor(2.0, requires_grad=True)
    assert not ranks.all_reduce(scalar, axes).requires_grad
    assert ranks.all_reduce(scalar, axes).item() == 2.0 * WORLD
    alone = ranks.all_reduce(scalar, ())
    assert alone is scalar


def under_way(ranks) -> None:
    """Several collectives at a time, waited for in another order, with others in between."""
    import torch

    axes = ranks.mesh.axes
    xs = [torch.full((1000, WORLD), float(i)) for i in range(6)]
    started = [ranks.start("all_reduce", [x], axes=axes, kind="+") for x in xs]
    started += [ranks.start("reduce_scatter", xs, axes=axes, dim=1, kind="+")]
    assert ranks.all_reduce(torch.ones(3), axes).tolist() == [WORLD] * 3
    for i, pending in reversed(list(enumerate(started[:-1]))):
        assert (ranks.wait(pending)[0] == i * WORLD).all()
        assert ranks.wait(pending)[0].shape == (1000, WORLD)
    assert [float(y.mean()) for y in ranks.wait(started[-1])] == [float(i * WORLD) for i in range(6)]


def as_nccl(ranks) -> None:
    """From here on the messages are those for NCCL, carried by gloo."""
    from mycel.run.groups import Nccl

    for key, gloo in ranks.groups.items():
        nccl = ranks.groups[key] = Nccl.__new__(Nccl)
        nccl.index, nccl.count, nccl.backend = gloo.index, gloo.count, gloo.backend


def only_loopback() -> None:
    """This process and the one that started it listen at 127.x.x.x and ::1 only."""
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening[f"socket:[{fields[9]}]"] = fields[1].rpartition(":")[0]
    mine = set()
    for pid in ("self", os.getppid()):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with_name = os.readlink(fd) if fd.is_symlink() and os.path.lexists(fd) else ""
            mine |= {listening[with_name]} if with_name in listening else set()
    assert mine, "nothing listens: the test does not see what it should"
    v4 = {address for address in mine if len(address) == 8}
    assert all(address.endswith("7F") for address in v4), f"listens at {v4}"
    assert not {a for a in mine if len(a) == 32} - {
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }, f"listens at {mine}"


# -- faults ----------------------------------------------------------------------------------------------------------


def disagree() -> None:
    """Facts that are not the same are refused on all ranks; what is refused can be put right."""
    from mycel.errors import PlanError, RunError
    from mycel.ir.layout import Mesh
    from mycel.run.processes import code_version, world

    for mesh in (Mesh(dp=WORLD + 1), Mesh(dp=2, tp=WORLD)):
        try:
            world(mesh, "cpu")
        except PlanError as e:
            assert f"the mesh has {mesh.world} ranks, but {WORLD} processes run" in str(e), str(e)
        else:
            raise AssertionError(f"{mesh} is taken")
    with world(Mesh(dp=WORLD), "cpu") as ranks:
        facts = {
            "plan": "mesh: dp=3\nzero: 1\nlast: line",
            "config": "lr: 0.1",
            "code version": code_version(),
            "torch": "2",
        }
        ranks.agree(facts)
        different = [
            ("plan", "zero: 1", "zero: 3", 1),
            ("config", "0.1", "0.2", 2),
            ("code version", code_version(), "another", 1),
        ]
        for i, (name, old, new, who) in enumerate(different):
            theirs = {**facts, name: facts[name].replace(old, new)} if ranks.rank == who else facts
            try:
                ranks.agree(theirs)
            except RunError as e:
                note(f"refused-{i}-{ranks.rank}", str(e))
            else:
                raise AssertionError(f"{name} is taken")
        ranks.agree(facts)


def refused() -> None:
    """Every rank has facts of its own, and ends by the error; the last one reads it late."""
    from mycel.ir.layout import Mesh
    from mycel.run.processes import world
    from mycel.run.rendezvous import Rendezvous

    get = Rendezvous._get
    if RANK == WORLD - 1:
        Rendezvous._get = lambda self, *asked: (time.sleep(4 * ("verdict" in asked)), get(self, *asked))[1]
    with world(Mesh(dp=WORLD), "cpu") as ranks:
        ranks.agree({"plan": f"of rank {RANK}"})


def error(late) -> None:
    """Ranks 0 and 1 come to the same error, one of them after the other; rank 2 to another.  All begin when all have
    imported what it takes, however long that is."""
    import typer

    from mycel.cli import _fail
    from mycel.errors import PlanError
    from mycel.run import rendezvous  # noqa: F401

    note(f"ready-{RANK}")
    while len(list(FOLDER.glob("ready-*"))) < WORLD:
        time.sleep(0.01)
    time.sleep(str(RANK) == late)
    try:
        _fail(PlanError("another mistake" if RANK == 2 else "no plan fits"), 2)
    except typer.Exit as ends:
        sys.exit(ends.exit_code)


def fail(how) -> None:
    """Rank 1 fails while the others wait for it in a collective."""
    import torch

    from mycel.ir.layout import Mesh
    from mycel.run.processes import world

    if RANK == 1 and how == "linger":
        atexit.register(time.sleep, 1.5)  # after it has told the others
    ranks = world(Mesh(dp=WORLD), "cpu")
    note(f"pid-{RANK}", str(os.getpid()))
    x = torch.ones(1000)
    if how != "early":
        ranks.all_reduce(x, ("dp",), "+", at="model.py:30")
    if RANK == 1:
        print("the last words of rank 1", flush=True)
        time.sleep(0.6)  # until its watch has told where it is
        if how == "exit":
            os._exit(3)
        if how in ("raise", "linger"):
            raise ValueError("a mistake of rank 1")
        if how == "late":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    ranks.at = "model.py:31"
    ranks.all_reduce(x, ("dp",), "+")
    raise AssertionError("a collective without rank 1 ended well")


def crossed() -> None:
    """A value that a step reads changes on rank 1 alone, which captures the step again."""
    import torch

    import mycel
    from mycel.ir.layout import Mesh

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return (super().forward(x) * self.scale).square().mean()

    torch.manual_seed(0)
    model, plan = Scaled(16, 16), {"batch": ["dp"], "compress": {"dp": "int8+ef"}}
    model.scale = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mycel.train_step(model, optimizer, plan=plan, mesh=Mesh(dp=WORLD), compile=False)
    for i in range(3):
        if RANK == 1 and i == 1:
            model.scale = 2.0
        step(torch.ones(4, 16))


def alone(what: str, goes_on: bool) -> None:
    """Rank 0 alone asks a step for what all ranks have to be asked for; the other takes steps, or has ended."""
    import torch

    import mycel
    from mycel.ir.layout import Mesh

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    step = mycel.train_step(
        model, optimizer, torch.nn.functional.mse_loss, plan="zero3", mesh=Mesh(dp=WORLD), compile=False
    )
    x = torch.ones(8, 16)
    for _ in range(2):  # in turn: what all ranks call is no mistake
        step(x, x)
        step.evaluate(x, x)
    step.state_dict()
    calls = {
        "evaluate": lambda: step.evaluate(x, x),
        "state_dict": step.state_dict,
        "save": lambda: step.save(FOLDER / "saved"),
    }
    if RANK == 0:
        calls[what]()
    for _ in range(3 if goes_on else 0):
        step(x, x)


def said() -> None:
    """End with an exit code of which rank 0 has said why."""
    from mycel.ir.layout import Mesh
    from mycel.run.processes import world

    with world(Mesh(dp=WORLD), "cpu") as ranks:
        print("not all of it could be saved", file=sys.stderr)
        ranks.meeting.has_said()
    sys.exit(1)


def meet() -> None:
    """A few collectives, whoever started the processes."""
    import torch

    from mycel.ir.layout import Mesh
    from mycel.run.processes import world

    with world(Mesh(dp=WORLD), "cpu") as ranks:
        ranks.agree({"same": "text"})
        assert ranks.all_reduce(torch.tensor([1.0 + RANK]), ("dp",)).item() == sum(range(1, WORLD + 1))
        assert ranks.all_gather(torch.tensor([RANK]), ("dp",), 0).tolist() == list(range(WORLD))
        note(f"listens-{RANK}", "\n".join(listening(os.getpid()) + listening(os.getppid())))
    note(f"met-{RANK}")


def listening(pid: int) -> list[str]:
    """The addresses at which a process waits to be called, in hexadecimal."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            mine.add(os.readlink(fd))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


JOBS = {
    "say": say,
    "sleep": sleep,
    "family": family,
    "deaf": deaf,
    "laws": laws,
    "disagree": disagree,
    "refused": refused,
    **{f"error-{late}": lambda late=late: error(late) for late in "01"},
    "crossed": crossed,
    "meet": meet,
    "said": said,
    **{
        f"alone-{what}-{then}": lambda what=what, then=then: alone(what, then == "step")
        for what in ("evaluate", "state_dict", "save")
        for then in ("step", "end")
    },
    **{
        f"fail-{how}": lambda how=how: fail(how) for how in ("kill", "early", "exit", "raise", "linger", "stop", "late")
    },
}

if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    JOBS[sys.argv[1]]()
