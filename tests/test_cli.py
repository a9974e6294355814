"""The command line: answers without torch, tells what is wrong in one clean message, and hands the rest to the loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import mycel
from mycel.cli import app
from mycel.errors import CheckpointError, TrainError
from mycel.train.config import Config, dump, load

ALL_COMMANDS = """
import json, sys
from mycel.cli import main

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["mycel", *arguments]
    try:
        main()
    except SystemExit as e:
        code = e.code
    print(json.dumps([arguments, code, sorted({"torch", "transformers", "numpy"} & set(sys.modules))]), file=sys.stderr)
"""


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)


def test_help_version_and_wrong_configurations_do_without_torch(tmp_path):
    (tmp_path / "bad.yaml").write_text("trian: {steps: 3}\n")
    good = [
        ["--help"],
        ["train", "--help"],
        ["config", "--help"],
        ["config"],
        ["config", "train.steps=3"],
        ["--version"],
    ]
    bad = [
        ["train", "bad.yaml"],
        ["config", "bad.yaml"],
        ["train", "none.yaml"],
        ["train", "a=1"],
        ["train", "--resume", "none"],
        ["train", "--nope"],
        ["train", "--nproc", "2", "parallel.mesh={dp: 3}"],
        ["train", "--nnodes", "2"],
        ["nope"],
    ]
    ran = python("-c", ALL_COMMANDS, json.dumps(good + bad), cwd=tmp_path)
    outcomes = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith("[[")]
    assert outcomes == [[arguments, 0, []] for arguments in good] + [[arguments, 2, []] for arguments in bad], (
        ran.stderr
    )
    assert "Traceback" not in ran.stderr and "unknown key trian" in ran.stderr


def test_importing_mycel_is_quick_and_complete():
    """Torch comes with the first name that needs it, and the function `capture` is not hidden by the folder of that
    name."""
    code = """
import sys, mycel
assert "torch" not in sys.modules and "capture" in dir(mycel)
from mycel import CheckpointError, TrainError
assert "torch" not in sys.modules
import mycel.capture.trace
from mycel import capture, jit
assert "torch" in sys.modules and callable(mycel.capture) and mycel.capture is capture and mycel.jit is jit
assert all(hasattr(mycel, name) for name in mycel.__all__)
"""
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr


def test_the_public_names_are_those_of_their_homes():
    for name, home in mycel.HOME.items():
        assert name in mycel.__all__ and getattr(mycel, name) is getattr(sys.modules[home], name)
    assert mycel.__all__ == sorted(set(mycel.__all__)) and set(mycel.__all__) <= set(dir(mycel))
    with pytest.raises(AttributeError, match="no attribute 'jti'"):
        mycel.jti  # noqa: B018


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """`mycel ARGUMENTS` in an empty folder, with a loop that notes what it is called with and returns 0, or does what
    is set."""
    calls: list[dict] = []
    loop = ModuleType("mycel.train.loop")

    def train(config: Config, **rest: object) -> int:
        calls.append({"config": config, **rest})
        if isinstance(run.does, BaseException):
            raise run.does
        return run.does

    loop.train = train
    monkeypatch.setitem(sys.modules, "mycel.train.loop", loop)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str):
        return CliRunner().invoke(app, list(arguments), prog_name="mycel")

    run.calls, run.does = calls, 0
    return run


def test_what_the_loop_is_called_with(ran):
    Path("a.yaml").write_text("train: {steps: 7, batch: 2}\n")
    assert ran("train").exit_code == 0
    assert ran("train", "train.batch=3", "a.yaml", "--run", "out", "--dry-run", "log.every=1").exit_code == 0
    first, second = ran.calls
    assert first == {
        "config": load(None), "resume": None, "dry_run": False, "started_from": None, "overwrite": False
    }  # fmt: skip
    config = second.pop("config")
    assert second == {"resume": None, "dry_run": True, "started_from": Path("a.yaml"), "overwrite": False}
    assert ran("train", "--run", "out", "--overwrite").exit_code == 0 and ran.calls[2]["overwrite"]
    assert (config.train.steps, config.train.batch, config.log.every, config.run) == (7, 3, 1, Path("out"))


def test_resume_takes_the_configuration_of_the_run(ran):
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/config.yaml").write_text(dump(load(None, ["train.steps=77", "run=elsewhere"])))
    assert ran("train", "--resume", "runs/old", "log.every=1").exit_code == 0
    (call,) = ran.calls
    assert call["config"] == load(None, ["train.steps=77", "run=runs/old", "log.every=1"])
    assert call["resume"] == Path("runs/old") and call["started_from"] == Path("runs/old/config.yaml")


@pytest.mark.parametrize("does, code, message", [
    (0, 0, ""),
    (130, 130, ""),
    (KeyboardInterrupt(), 130, ""),
    (TrainError("no file x\n  try       y"), 1, "error: no file x\n  try       y\n"),
    (CheckpointError("disk full"), 1, "error: disk full\n"),
])  # fmt: skip
def test_exit_codes(ran, does, code, message):
    ran.does = does
    result = ran("train")
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")


def test_our_own_faults_show_their_traceback(ran):
    ran.does = ZeroDivisionError("ours")
    assert isinstance(ran("train").exception, ZeroDivisionError)


GOLDEN = {
    "train a.yaml b.yaml": (
        "more than one configuration: a.yaml and b.yaml\n"
        "  try       one file, and settings such as train.steps=500 over it"
    ),
    "train a.yaml parallel.mesh={dp: 2}": (
        "the shell has split parallel.mesh at a space: its bracket is not closed\n"
        "  at        argument parallel.mesh={dp:\n  try       quotes around it: 'parallel.mesh={…}'"
    ),
    "train c.yaml": "no configuration file c.yaml\n  try       the path of a YAML file",
    "train train.stesp=3": "unknown key train.stesp\n  at        argument train.stesp=3\n  try       train.steps",
    "train --resume runs/new": "no run runs/new: there is no such folder\n  try       runs/older",
    "train --resume nothere": "no run nothere: there is no such folder\n  try       runs/older",
    "train --resume runs": "runs is not a run: it has no config.yaml\n  try       runs/older",
    "train --resume runs/older/config.yaml": "runs/older/config.yaml is a file, not a run\n  try       runs/older",
    "train --resume runs/older a.yaml": (
        "--resume runs/older uses the run's own folder and configuration, not a.yaml\n  try       leave it out"
    ),
    "train --resume runs/older --run x": (
        "--resume runs/older uses the run's own folder and configuration, not --run x\n  try       leave it out"
    ),
    "train --overwrite": "--overwrite replaces the run of a folder, but none is named\n  try       --run FOLDER",
    "train --overwrite --resume runs/older run=x": (
        "--overwrite starts anew, --resume goes on\n  try       one of them"
    ),
    "train --run=": "--run is given an empty name\n  try       --run runs/NAME",
    "config data.pack=1": (
        "data.pack is 1, not true or false\n  at        argument data.pack=1\n  try       true, the default"
    ),
}


@pytest.mark.parametrize("command", GOLDEN)
def test_golden(ran, command):
    Path("runs/older").mkdir(parents=True)
    Path("runs/older/config.yaml").touch()
    result = ran(*command.split(" "))
    assert (result.exit_code, result.stderr, result.stdout, ran.calls) == (2, f"error: {GOLDEN[command]}\n", "", [])


def test_a_file_with_equals_in_its_folder_is_a_file(ran):
    Path("lr=1").mkdir()
    Path("lr=1/a.yaml").write_text("train: {steps: 5}\n")
    assert ran("train", "./lr=1/a.yaml").exit_code == 0 and ran.calls[0]["config"].train.steps == 5


def test_config_prints_what_loads_back(ran):
    result = ran("config", "train.steps=9", "model.lora.rank=2")
    Path("printed.yaml").write_text(result.stdout)
    assert load(Path("printed.yaml")) == load(None, ["train.steps=9", "model.lora.rank=2"])
    assert "  steps: 9                # in all\n" in result.stdout


def test_config_says_whose_defaults_it_prints(ran):
    Path("my.yaml").write_text("model: {path: llama}\n")
    mine = ran("config", "my.yaml", "train.batch=3").stdout
    assert mine.startswith("# mycel train my.yaml train.batch=3\nmodel:") and "  steps: 500 " in mine
    embedded = ran("config").stdout
    assert embedded.startswith("# no model is named: a small Llama and what suits it\nmodel:")
    assert "  steps: 600 " in embedded


def test_config_into_a_closed_pipe():
    ran = subprocess.run(
        f"'{sys.executable}' -m mycel config | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("# no model") and ran.stderr == ""


@pytest.mark.parametrize("command", ["", "train", "config"])
def test_help_fits_a_terminal(ran, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = ran(*command.split(), "--help").stdout
    assert max(len(line) for line in text.splitlines()) <= 80 and f"Usage: mycel {command}".rstrip() in text


INTERRUPTED = """
import sys, time
from types import ModuleType
from mycel.cli import main

def train(config, **rest):
    print("running", flush=True)
    time.sleep(60)

loop = sys.modules["mycel.train.loop"] = ModuleType("mycel.train.loop")
loop.train = train
sys.argv = ["mycel", "train"]
main()
"""


def test_an_interrupt_is_130_and_silent():
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")


INTERRUPTED_AT_IMPORT = """
import importlib.abc, os, runpy, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
module, sys.argv = sys.argv[1], ["mycel", "train", "--dry-run"]
runpy.run_module("mycel", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["mycel.cli", "typer", "pydantic", "mycel.train.loop", "torch", "numpy._core"])
def test_an_interrupt_of_an_import_is_130_and_silent(module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_IMPORT, module], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ranks_are_started_with_the_same_arguments(ran, monkeypatch):
    started: list[tuple] = []
    monkeypatch.setattr("mycel.cli.launch", lambda *arguments: started.append(arguments) or 7)
    monkeypatch.delenv("RANK", raising=False)
    Path("a.yaml").write_text("parallel: {mesh: {dp: 2, tp: 2}}\n")
    assert ran("train", "a.yaml", "--nproc", "4", "train.steps=3", "--run", "out", "--dry-run").exit_code == 7
    assert (
        ran(
            "train", "a.yaml", "--nproc", "2", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "10.0.0.1:29500"
        ).exit_code
        == 7
    )
    assert started == [
        (["train", "a.yaml", "train.steps=3", "--run", "out", "--dry-run"], 4, 1, 0, None),
        (["train", "a.yaml"], 2, 2, 1, "10.0.0.1:29500"),
    ]
    wrong = ran("train", "a.yaml", "--nproc", "3")
    assert (
        wrong.exit_code == 2
        and "the mesh has 4 ranks, but 3 processes would run\n  at        parallel.mesh: {dp: 2, tp: 2}" in wrong.output
    )
    Path("old").mkdir()
    Path("old/config.yaml").write_text("parallel: {mesh: {dp: 2, tp: 2}}\n")
    resumed = ran("train", "--resume", "old", "--nproc", "2").output
    assert "try       --nproc 4, or parallel.mesh=null parallel.plan=auto: a plan for 2 from here on" in resumed
    monkeypatch.setenv("RANK", "0")
    assert "this process is one" in ran("train", "a.yaml", "--nproc", "4").output
    assert not ran.calls and len(started) == 2
