"""Tests run on one thread each, on the CPU, and do not talk."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MYCEL_PROBE"] = ""  # presets: what was measured on a machine would change plans
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """What a module of tests leaves alive (caches, libraries) is not gone through again by every later collection."""
    gc.collect()
    gc.freeze()
