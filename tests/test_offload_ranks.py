"""Offload on ranks that are processes: the same to the bit as without, in the memory that was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mycel.launch import launch

CHILD = str(Path(__file__).parent / "offload_child.py")


@pytest.mark.parametrize("job, nproc", [("zero", 2), ("tp", 2), ("cp", 2), ("stages", 2), ("four", 4)])
def test_ranks_take_the_same_steps_within_a_budget(job, nproc, tmp_path):
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "120"}
    assert launch([job], nproc, program=[CHILD], env=env, logs=tmp_path) == 0
