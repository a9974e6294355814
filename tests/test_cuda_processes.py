"""Ranks in processes with NCCL between them, on one GPU: steps are those of one device, under plans of each kind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

WORLD, LIMIT_S = 2, 240


def test_nccl_between_processes(tmp_path):
    """NCCL takes two ranks on one GPU where it believes them on two hosts: messages go over a socket of this one."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0",
              "MYCEL_TIMEOUT": "120"}  # fmt: skip
    child = [sys.executable, str(Path(__file__).parent / "cuda_child.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen(child, env={**os.environ, **shared, "RANK": str(r), "NCCL_HOSTID": f"host {r}"})
        for r in range(WORLD)
    ]
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * WORLD and len(list(tmp_path.glob("done-*"))) == WORLD
