"""Real processes: every collective is what it says on lists of tensors, and a rank that fails ends the others, who say
which and how.

The ranks run `process_child.py`; what they find is in its asserts, in their exit codes, and in the notes they leave in
a folder.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.errors import PlanError, RunError
from mycel.ir.layout import Mesh
from mycel.launch import LocalRanks, launch
from mycel.ops.collective import ALONE_BYTES, MESSAGE_BYTES
from mycel.run import rendezvous
from mycel.run.collectives import buckets
from mycel.run.crossed_waits import Turn, crossed, debts
from mycel.run.groups import SMALL_BYTES
from mycel.run.processes import Processes, world
from mycel.run.rendezvous import code_version, connect, difference, named, serve
from mycel.run.shares import Shares
from mycel.run.watch import LOST

CHILD = str(Path(__file__).parent / "process_child.py")
QUICK = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
LAUNCHER = """
import sys
from mycel.launch import launch
job, folder, child, grace_s = sys.argv[1:]
sys.exit(launch([job, folder], 2, program=[child], logs=folder, grace_s=float(grace_s)))
"""


def run(job: str, nproc: int, folder: Path, **env: str) -> int:
    return launch([job, str(folder)], nproc, program=[CHILD], env={**QUICK, **env}, logs=folder / "logs")


def until(true, within_s: float = 30.0):
    """The first true answer; a failure if there is none."""
    end = time.monotonic() + within_s
    while not (answer := true()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
    return answer


def notes(folder: Path, what: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob(f"{what}*")}


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_every_collective_is_its_reference(nproc, tmp_path):
    assert run("laws", nproc, tmp_path) == 0


# -- faults ----------------------------------------------------------------------------------------------------------

FATES = {  # ranks, exit code, what the others say
    "kill": (3, 137, "rank 1 was killed by SIGKILL"),
    "early": (2, 137, "rank 1 was killed by SIGKILL"),  # before any connection
    "exit": (2, 3, "rank 1 ended with exit code 3"),
    "raise": (2, 1, "rank 1 failed: ValueError: a mistake of rank 1"),
    "linger": (2, 1, "rank 1 failed: ValueError: a mistake of rank 1"),  # and is the last to end
}


@pytest.mark.parametrize("how", FATES)
def test_when_a_rank_dies_the_others_end_by_themselves_and_say_why(how, tmp_path, capfd):
    """By themselves: had the launcher had to kill them, five seconds later, they would have said nothing."""
    nproc, code, fate = FATES[how]
    assert run(f"fail-{how}", nproc, tmp_path) == code
    console, logs = capfd.readouterr().err, [tmp_path / "logs" / f"{rank}.log" for rank in range(1, nproc)]
    for output in [console, *(log.read_text() for log in logs[1:])]:
        assert fate in output
        assert "at        model.py:31, in all_reduce over dp" in output
    last_words = console.rpartition("error: rank 1 ")[2]
    assert f"log       {logs[0]}" in last_words
    # a traceback comes after what was said before
    last = "ValueError: a mistake of rank 1" if how in ("raise", "linger") else "the last words of rank 1"
    assert f"| {last}" in last_words
    assert not any(alive(pid) for pid in notes(tmp_path, "pid-").values())


LATE = {
    "stop": "rank 1 is stopped (process {pid}, by SIGSTOP or a debugger), last in all_reduce over dp, model.py:30",
    "late": "rank 1 has not come to it: it works after all_reduce over dp, model.py:30",
}


@pytest.mark.parametrize("how", LATE)
def test_a_rank_that_does_not_come_is_named_at_the_timeout(how, tmp_path, capfd):
    assert run(f"fail-{how}", 2, tmp_path, MYCEL_TIMEOUT="4") == LOST
    output = capfd.readouterr().err
    pids = notes(tmp_path, "pid-")
    assert f"no answer in all_reduce over dp for 4 s: {LATE[how].format(pid=pids['pid-1'])}" in output
    assert "at        model.py:31, rank 0 waits in all_reduce over dp" in output
    assert not any(alive(pid) for pid in pids.values())


def test_ranks_that_wait_for_each_other_in_different_places_are_told_where(tmp_path, capfd):
    """Long before the timeout, which is a minute."""
    assert run("crossed", 2, tmp_path) in (1, LOST)
    output = capfd.readouterr().err
    told = """ranks 0-1 wait for each other in different places
  rank 0    waits in all_gather over dp, FILE (step 2)
  rank 1    waits in an agreement on how gradients are compressed (step 2, captured again: NEW)
  try       all ranks call the same, in the same order; what their code reads changes on all of them
""".replace("NEW", "model.scale is 2.0 and was 1.0")
    for said in (output, (tmp_path / "logs" / "1.log").read_text()):
        assert told in re.sub(r"\n  at  .*", "", re.sub(r"[\w/]*child.py:\d+", "FILE", said.replace("| ", ""))), said


def test_what_has_been_said_is_not_said_again(tmp_path, capfd):
    assert run("said", 2, tmp_path) == 1
    assert capfd.readouterr().err == "not all of it could be saved\n"


ALONE = {
    "evaluate-step": "waits in step.evaluate",
    "state_dict-step": "waits in step.state_dict",
    "save-step": "waits in a word of each rank (checkpoint)",
    "state_dict-end": "rank 0 waits in step.state_dict, which rank 1 has ended without",
    "evaluate-end": "rank 0 waits in step.evaluate, which rank 1 has ended without",
    "save-end": "rank 0 waits in a word of each rank (checkpoint), which rank 1 has ended without",
}


@pytest.mark.parametrize("case", ALONE)
def test_a_rank_that_asks_a_step_alone_is_told(case, tmp_path, capfd):
    """Within seconds, instead of messages whose sizes do not fit, at which gloo ends the process."""
    began = time.monotonic()
    assert run(f"alone-{case}", 2, tmp_path) in (1, LOST)
    output = capfd.readouterr().err
    assert ALONE[case] in output and "all ranks call the same, in the same order" in output, output
    assert "SIGABRT" not in output and time.monotonic() - began < 45
    if case.endswith("step"):
        assert re.search(r"rank 1 +waits in \w+ over dp, .*\(step 3\)|rank 1 +waits in a step", output), output


ALL, PAIR = ("all", (0, 1, 2)), ("pair", (0, 1))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_ranks_that_wait_for_each_other_never_go_on_and_none_is_missed(data):
    """Ranks that each run a list of messages, started and waited for at any time: `crossed` names some as soon as no
    rank can move though none has ended, and whom it names never moves again."""
    kinds = st.lists(st.sampled_from([ALL, PAIR, ("other", (1, 2)), ("same", (0, 1, 2))]), max_size=4)
    common = data.draw(kinds)
    programs = [
        [kind for kind in (common if data.draw(st.booleans()) else data.draw(kinds)) if r in kind[1]] for r in range(3)
    ]
    at, begun, others = [0, 0, 0], [{}, {}, {}], [{}, {}, {}]
    held, named_once = [None, None, None], {}

    def beat(r):
        places = [] if held[r] is None else [{"number": at[r], "collective": "", "turns": [held[r]]}]
        return {"held": places, "owes": debts(others[r], r, begun[r]) if places else {}}

    def moves(r):
        if held[r] is not None:
            kind, nth, ranks = held[r]
            if any(begun[s].get(kind, 0) < nth for s in ranks):
                return False
            held[r] = None
        elif at[r] < len(programs[r]):
            kind, ranks = programs[r][at[r]]
            begun[r][kind] = begun[r].get(kind, 0) + 1
            held[r] = Turn(kind, begun[r][kind], ranks)
            at[r] += 1
        else:
            return False
        return True

    for r in [*data.draw(st.lists(st.integers(0, 2), max_size=20)), *[0, 1, 2] * 8]:
        moved = moves(r)
        assert not (moved and r in named_once)
        for s in range(3):  # each looks, and what it owes is in its next beat
            others[s] = {i: beat(i) for i in range(3)}
        named_once.update(dict.fromkeys(crossed({i: beat(i) for i in range(3)})))
    waiting = [r for r in range(3) if held[r] is not None]
    is_for_ended = any(
        s not in waiting and begun[s].get(held[r].kind, 0) < held[r].nth for r in waiting for s in held[r].ranks
    )
    assert bool(named_once) or not waiting or is_for_ended


def test_ranks_at_the_same_number_in_different_collectives_are_at_odds():
    place = lambda name: {"number": 1, "collective": name, "turns": [("over dp", 3, (0, 1))]}
    beats = lambda *names: {r: {"held": [place(name)], "owes": {}} for r, name in enumerate(names)}
    assert crossed(beats("all_reduce", "reduce_scatter")) == [0, 1]
    assert crossed(beats("all_reduce", "all_reduce")) == [] == crossed(beats("", "all_reduce"))


def test_ranks_that_differ_are_refused_on_all_before_the_first_collective(tmp_path):
    assert run("disagree", 3, tmp_path) == 0
    plan, config, code = (set(notes(tmp_path, f"refused-{i}-").values()) for i in range(3))
    assert [len(notes(tmp_path, f"refused-{i}-")) for i in range(3)] == [3, 3, 3]
    hint = "\n  at        before the first collective\n  try       the same files, settings and packages for all ranks"
    assert plan == {f"plan is not the same on all ranks: - on rank 0, + on rank 1\n  -zero: 1\n  +zero: 3{hint}"}
    assert config == {f"config is not the same on all ranks: - on rank 0, + on rank 2\n  -lr: 0.1\n  +lr: 0.2{hint}"}
    assert code == {
        f"code version is not the same on all ranks: - on rank 0, + on rank 1\n  -{code_version()}\n  +another{hint}"
    }


def test_a_difference_is_short_and_names_its_ranks():
    assert difference({"a": "x"}, {"a": "x"}) == ""
    long = difference({"a": "\n".join(f"{i}" for i in range(100))}, {"a": ""})
    assert len(long.splitlines()) < 16
    assert "and 88 lines more" in long
    assert "-'x'\n  +'x\\n'" in difference({"a": "x"}, {"a": "x\n"})
    assert "+new" in difference({}, {"a": "new"})
    assert [named([3]), named([1, 2, 3, 7]), named([0, 2])] == ["rank 3", "ranks 1-3, 7", "ranks 0, 2"]


def test_the_code_version_is_that_of_all_source_files(tmp_path):
    seen = set()
    for name, text in [("a.py", "x"), ("a.py", "y"), ("b/c.py", "y"), ("b/c.py", ""), ("notes.txt", "z")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.add(code_version(tmp_path))
    assert len(seen) == 4
    assert code_version() == code_version()


# -- who starts the ranks


def test_ranks_get_the_environment_and_only_the_first_the_console(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert launch(["say", str(tmp_path)], 3, program=[CHILD]) == 0
    assert capfd.readouterr().out == "this is rank 0 of 3\n"
    assert not list(tmp_path.glob("mycel-logs-*"))

    def broken(ranks, server):
        raise OSError("no store")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no store"):
        patch.setattr(LocalRanks, "hold", broken)
        launch(["say", str(tmp_path)], 2, program=[CHILD])
    assert not list(tmp_path.glob("mycel-logs-*")), "also where the launcher itself fails"
    assert launch(["say", str(tmp_path)], 2, program=[CHILD], logs=tmp_path / "logs", env={"OMP_NUM_THREADS": "7"}) == 0
    assert [(p.name, p.read_text()) for p in (tmp_path / "logs").iterdir()] == [("1.log", "this is rank 1 of 2\n")]
    got = {
        rank: dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        for rank, text in notes(tmp_path, "env-").items()
    }
    assert [got[f"env-{r}"]["OMP_NUM_THREADS"] for r in range(3)] == [
        "7",
        "7",
        str(max(1, len(os.sched_getaffinity(0)) // 3)),
    ]
    for r in range(2):
        env = got[f"env-{r}"]
        assert [env[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == [
            str(r),
            str(r),
            "2",
            "2",
            "127.0.0.1",
        ]


def test_ranks_die_with_their_launcher(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "sleep", str(tmp_path), CHILD, "60"])
    pids = until(lambda: len(by_name := notes(tmp_path, "pid-")) == 2 and by_name).values()
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    assert launcher.wait() == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(("job", "grace_s"), [("family", 60), ("deaf", 0.5)])
def test_an_interrupt_goes_to_all_ranks_and_none_stays(job, grace_s, tmp_path):
    """Those that end by themselves, with what they started; and those that do not, when their time is over."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, job, str(tmp_path), CHILD, str(grace_s)])
    pids = until(lambda: len(by_name := notes(tmp_path, "pid-")) == (4 if job == "family" else 2) and by_name).values()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 130
    assert len(notes(tmp_path, "interrupted-")) == (2 if job == "family" else 0)
    assert not any(alive(pid) for pid in pids)


def test_ranks_of_torchrun_meet(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    done = subprocess.run(
        [*command, CHILD, "meet", str(tmp_path)],
        env={**os.environ, **QUICK},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(notes(tmp_path, "met-")) == 2


def test_local_runs_listen_on_loopback_only(tmp_path):
    """The ranks, and the launcher, which holds their store."""
    assert run("meet", 2, tmp_path) == 0
    heard = {address for text in notes(tmp_path, "listens-").values() for address in text.split()}
    # 127.0.0.1, the same in IPv6, ::1
    assert heard and heard <= {"0100007F", "0" * 16 + "FFFF00000100007F", "0" * 24 + "01000000"}, heard


def test_ranks_meet_without_anyone_to_hold_the_store(tmp_path):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, CHILD, "meet", str(tmp_path)], env={**os.environ, **QUICK, **place, "RANK": str(r)}
        )
        for r in range(2)
    ]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    assert len(notes(tmp_path, "met-")) == 2


def test_a_refusal_reaches_all_where_rank_0_holds_the_store(tmp_path):
    """It goes last: with it goes the store."""
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, CHILD, "refused"],
            env={**os.environ, **QUICK, **place, "RANK": str(r)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(3)
    ]
    for rank in ranks:
        output = rank.communicate(timeout=100)[1]
        assert rank.returncode == 1
        assert "plan is not the same on all ranks" in output
        assert "+of rank 1" in output
        assert "+of rank 2" in output


@pytest.mark.parametrize(("started_by", "late"), [("launch", 0), ("launch", 1), ("torchrun", 0), ("nobody", 1)])
def test_an_error_that_ranks_come_to_is_said_once(started_by, late, tmp_path, capfd):
    """By the first of them, which is shown also where it writes to a log; a rank with another error says that."""
    job, env = [CHILD, f"error-{late}", str(tmp_path)], {**os.environ, **QUICK}
    if started_by == "launch":
        assert run(f"error-{late}", 2, tmp_path) == 2
        assert ("no plan fits" in (tmp_path / "logs" / "1.log").read_text()) == (late == 0)
    elif started_by == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
        done = subprocess.run([*command, "--master-port", str(free_port()), *job], env=env, timeout=100, check=False)
        assert done.returncode == 1
    else:
        place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [subprocess.Popen([sys.executable, *job], env={**env, **place, "RANK": str(r)}) for r in range(3)]
        assert [rank.wait(100) for rank in ranks] == [2, 2, 2]
    shown = capfd.readouterr().err
    assert shown.count("no plan fits") == 1, shown
    assert ("another mistake" in shown) == (started_by == "nobody")


@pytest.mark.parametrize("job", ["meet", "fail-kill"])
def test_hosts_meet_and_a_death_on_one_ends_the_others(job, tmp_path, capfd):
    """Two launchers, as on two hosts, one rank each."""
    meeting, codes = f"127.0.0.1:{free_port()}", {}

    def host(number: int) -> None:
        codes[number] = launch(
            [job, str(tmp_path)], 1, 2, number, meeting, QUICK, program=[CHILD], logs=tmp_path / f"logs-{number}"
        )

    hosts = [threading.Thread(target=host, args=(number,)) for number in range(2)]
    for each in hosts:
        each.start()
    for each in hosts:
        each.join()
    if job == "meet":
        assert codes == {0: 0, 1: 0}
        assert len(notes(tmp_path, "met-")) == 2
    else:
        assert codes[1] == 137
        assert codes[0] in (1, LOST)
        assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    assert not any(alive(pid) for pid in notes(tmp_path, "pid-").values())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_a_mesh_of_another_size_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        PlanError, match=r"has 4 ranks, but one process runs\n  the mesh  Mesh\(dp=2, tp=2\)\n  try .*--nproc 4"
    ):
        world(Mesh(dp=2, tp=2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RunError, match="not MASTER_ADDR, MASTER_PORT"):
        world(Mesh(dp=3))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "many")
    with pytest.raises(RunError, match=r"is no number: .*many"):
        world(Mesh(dp=3))
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(RunError, match=r"MASTER_PORT is 99999\n.*\n  try       a port from 1024 to 65535"):
        world(Mesh(dp=3))
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(PlanError, match="the mesh has 2 ranks, but 3 processes run"):
        world(Mesh(dp=2))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RunError, match="RANK is 3, but WORLD_SIZE is 3"):
        world(Mesh(dp=3))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MYCEL_TIMEOUT", "soon")
    with pytest.raises(RunError, match="MYCEL_TIMEOUT is 'soon'"):
        world(Mesh(dp=3))


def seated(monkeypatch, rank: int, port: int, timeout_s: float) -> None:
    """As somebody who starts ranks by hand sets the environment."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    given = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MYCEL_TIMEOUT": timeout_s}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_that_comes_first_can_be_stopped_and_finds_the_store():
    """torch's own connecting goes on through a signal, until its timeout."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt("stopped")

    port, before = free_port(), signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt, match="stopped"):
            connect("127.0.0.1", port, 20)
        assert time.monotonic() - start < 5
    finally:
        signal.signal(signal.SIGALRM, before)
    held: list[object] = []
    later = threading.Timer(1.0, lambda: held.append(serve(socket.create_server(("127.0.0.1", port)), "127.0.0.1")))
    later.start()
    store = connect("127.0.0.1", port, 20)
    later.join()
    store.set("greeting", "hello")
    assert held[0].get("greeting") == b"hello"


def test_a_rank_that_finds_no_rank_0_says_so(monkeypatch, capfd):
    port = free_port()
    seated(monkeypatch, 1, port, 1.5)
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.2)
    with pytest.raises(RunError) as error:
        world(Mesh(dp=2), "cpu")
    golden("told_no_rank_0", str(error.value).replace(str(port), "PORT"))
    assert capfd.readouterr().err == f"waiting for rank 0 at 127.0.0.1:{port}, 1.5 s at most\n", "and no stack of torch"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RunError, match=r"^the process that starts the ranks was not at 127\.0\.0\.1:\d+ after 1\.5 s"):
        world(Mesh(dp=2), "cpu")


@pytest.mark.parametrize("wait", ["a word", "the end"])
def test_a_rank_that_never_comes_is_named_at_the_timeout(monkeypatch, wait):
    """Also where no collective is waited in, which the watch would see."""
    seated(monkeypatch, 0, free_port(), 1.0)
    monkeypatch.setattr(rendezvous.Rendezvous, "held", None)
    meeting = rendezvous.Rendezvous(rendezvous.seat())
    start = time.monotonic()
    with pytest.raises(RunError, match=r"waited 1 s for .* in vain: rank 1 has not started"):
        Shares(meeting, "test")("hello") if wait == "a word" else meeting.leave()
    assert time.monotonic() - start < 10


def test_a_rank_that_waits_for_others_hears_that_the_world_ends(monkeypatch):
    """It says so itself: the store goes with rank 0, a moment later."""
    seated(monkeypatch, 0, free_port(), 20)
    monkeypatch.setattr(rendezvous.Rendezvous, "held", None)
    meeting = rendezvous.Rendezvous(rendezvous.seat())
    other = meeting.connect()
    threading.Timer(0.3, lambda: rendezvous.tell(other, "rank 1 has not started")).start()
    with pytest.raises(RunError, match=r"^rank 1 has not started$"):
        meeting.agree({"plan": "any"})


def test_what_ranks_of_a_host_take_of_its_memory_is_added_up(monkeypatch):
    seated(monkeypatch, 0, free_port(), 20)
    monkeypatch.setattr(rendezvous.Rendezvous, "held", None)
    meeting = rendezvous.Rendezvous(rendezvous.seat())
    ranks = [Processes(Mesh(dp=2), r, meeting=meeting) for r in range(2)]
    try:
        assert [r.promise_memory(10)[0] for r in ranks] == [10, 20]
        inside = Processes(Mesh(tp=1), 0, meeting=meeting, world=ranks[1], numbers=(1,))
        assert inside.promise_memory(5) == (25, ranks[1].host_bytes)
    finally:
        for r in ranks:
            r.close(KeyboardInterrupt())
    alone = Processes(Mesh(dp=1))
    assert alone.promise_memory(7) == (7, alone.host_bytes) and alone.host_bytes > 0


def test_rank_0_at_an_address_that_is_taken_says_so(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        seated(monkeypatch, 0, port := other.getsockname()[1], 2)
        monkeypatch.setattr(rendezvous.Rendezvous, "held", None)
        with pytest.raises(RunError) as error:
            world(Mesh(dp=2), "cpu")
    text = str(error.value).replace(str(port), "PORT")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # kept for documentation: nobody's
    with pytest.raises(RunError) as error:
        world(Mesh(dp=2), "cpu")
    golden("told_address_taken", text + "\n\n" + str(error.value).replace(str(port), "PORT"))


def test_a_world_of_one_needs_nobody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = threading.active_count()
    with world(Mesh(dp=1, tp=1), "cpu") as ranks:
        ranks.agree({"plan": "any"})
        x = torch.ones(2, 3)
        for axes in [(), ("dp",), ("tp", "dp")]:
            assert ranks.all_reduce(x, axes, "+") is x
            assert ranks.all_gather(x, axes, 1) is x
            assert ranks.reduce_scatter(x, axes, 0, ">") is x
            assert ranks.all_to_all(x, axes, 0, 1) is x
            assert ranks.permute(x, axes, (0,)) is x
            assert not ranks.permute(x, axes, (-1,)).any()
            assert ranks.index(axes) == 0
        assert threading.active_count() == before


def test_wrong_places_to_meet_are_refused():
    for bad in (
        {"nproc": 0},
        {"nproc": 1, "nnodes": 2, "node_rank": 2},
        {"nproc": 1, "nnodes": 2},
        {"nproc": 1, "rendezvous": "host"},
    ):
        with pytest.raises(RunError, match="\n  try "):
            launch(["say"], **bad)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RunError, match=r"cannot listen at 127\.0\.0\.1:"),
    ):
        launch(["say"], 1, rendezvous=f"127.0.0.1:{listener.getsockname()[1]}")


@given(st.lists(st.tuples(st.integers(1, 3 << 19), st.sampled_from([torch.float32, torch.bfloat16])), max_size=20))
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("name, count", [("reduce_scatter", 1), ("all_gather", 2), ("exchange_chunks", 1)])
def test_as_much_travels_together_as_one_message_is_good_for(name, count, tensors):
    """Of each type in its order; what begins a message would have been too much for the one before."""
    xs = [torch.empty(n, dtype=dtype, device="meta") for n, dtype in tensors]
    together = [bucket for bucket, _ in buckets(name, xs, count, {})]
    sizes = {i: x.nbytes * count for i, x in enumerate(xs)}
    assert sorted(i for bucket in together for i in bucket) == list(range(len(xs)))
    for dtype in (torch.float32, torch.bfloat16):
        small = [b for b in together if xs[b[0]].dtype == dtype and sizes[b[0]] < ALONE_BYTES]
        assert [i for b in small for i in b] == [
            i for i, x in enumerate(xs) if x.dtype == dtype and sizes[i] < ALONE_BYTES
        ]
        totals = [sum(sizes[i] for i in b) for b in small]
        assert all(total <= MESSAGE_BYTES for total in totals)
        assert all(t + sizes[b[0]] > MESSAGE_BYTES for t, b in zip(totals, small[1:], strict=False))


@pytest.mark.parametrize("hosts, apart", [(1, False), (2, True)])
def test_gathers_inside_a_host_and_between_hosts(hosts, apart):
    """Rank i of three is at 127.0.0.1 or 127.0.0.2: how they gather differs, what does not."""
    store, results = torch.distributed.HashStore(), {}

    def rank(i: int) -> None:
        under = lambda key: torch.distributed.PrefixStore(key, store)
        meeting = SimpleNamespace(meet=lambda *_: None, under=under, timeout_s=30, address=f"127.0.0.{1 + i % hosts}")
        group = Processes._joined(SimpleNamespace(meeting=meeting), "key", "cpu", i, 3)
        for n in (5, SMALL_BYTES):
            out = torch.empty(3, n)
            for work in group.gather(out, torch.arange(n) + float(i)):
                work.wait()
            results[i, n] = group.apart, out

    ranks = [threading.Thread(target=rank, args=(i,)) for i in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    for i, n in itertools.product(range(3), (5, SMALL_BYTES)):
        seen, out = results[i, n]
        assert seen == apart and torch.equal(out, torch.arange(n) + torch.arange(3.0)[:, None])
