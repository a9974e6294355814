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


# whole files of processes, sweeps and searches, which `make check` leaves out
SLOW = {
    "across", "alike", "architectures", "brute", "checkpoint_faults", "checkpoint_mesh", "checkpoint_ranks", "commands",
    "control_flow_random", "cutting", "data_cache", "distribute", "feed", "layouts", "manual", "optimisers", "plan",
    "processes", "search", "step_memory", "step_models", "step_state", "torch_update", "train", "train_export",
    "train_faults", "train_lora", "train_messages", "train_ranks", "train_resume", "weights",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """What a module of tests leaves alive (caches, libraries) is not gone through again by every later collection."""
    gc.collect()
    gc.freeze()
