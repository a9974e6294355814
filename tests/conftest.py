"""Tests run on one thread each, on the CPU, and do not talk."""

import gc
import os
import signal
import zlib
from collections import Counter
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MYCEL_PROBE"] = ""  # presets: what was measured on a machine would change plans
os.environ["MYCEL_LEDGER"] = ""  # runs of tests are no experience
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind `nohup … &`; what interrupts are for is tested
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("tests", deadline=None)  # machines are noisy: no test is about time
hypothesis.settings.load_profile("tests")


# whole files of processes, sweeps and searches, which `make check` leaves out, and about how many seconds each takes
# (MYCEL_SECONDS=1 make test prints that): workers begin with the longest, and so come to the end together
SLOW = {
    "accumulate": 53, "across": 8, "alike": 8, "architectures": 16, "brute": 29, "checkpoint_faults": 9,
    "checkpoint_mesh": 22, "checkpoint_ranks": 16, "commands": 112, "commands_ranks": 39, "compiled_blocks": 157,
    "compress": 46, "context": 11, "control_flow_random": 19, "corrections": 18, "cutting": 3, "data_cache": 5,
    "distribute": 117, "docs": 34, "encoded_messages": 13, "examples": 21, "expert_laws": 12, "expert_loops": 24,
    "expert_ranks": 60, "experts": 9, "feed": 16, "forward_stages": 19, "handwritten": 20, "host_update": 18,
    "interleave": 28, "layouts": 26, "manual": 33, "offload": 78, "offload_ranks": 28, "one_bit": 1,
    "op_database": 91, "optimisers": 93, "pipeline": 81, "places": 23, "plan": 71, "plan_command": 88, "probe": 54,
    "processes": 195, "search": 222, "search_devices": 24, "search_given": 158, "search_limits": 10,
    "search_places": 22, "search_text": 30, "shallow": 74, "stage_offload": 12, "stages": 91, "step": 37,
    "step_memory": 136, "step_models": 28, "step_precision": 28, "step_state": 36, "sync": 61, "tasks": 17,
    "torch_update": 7, "train": 58, "train_export": 6, "train_faults": 19, "train_lora": 2, "train_messages": 20,
    "train_ranks": 436, "train_resume": 43, "weights": 3, "whole_plans": 78, "widths": 1,
}  # fmt: skip


# of long sweeps `make test` runs one case in k, whichever the names fall on, so that no flag or operator is left out as
# such; MYCEL_SWEEPS=all runs all of them (`make sweeps`)
ONE_IN = {
    "test_a_family_trains_as_in_torch": 8, "test_ready_plans_for_experts": 16, "test_any_layer_in_any_layout": 6,
    "test_a_router_chooses_as_in_torch": 6, "test_random_plans": 10,
    "test_ready_plans_and_their_products": 16, "test_ready_plans_are_the_same_when_read_back": 3,
    "test_every_operator_in_every_layout": 14, "test_every_operator_in_every_pair_of_labels": 14,
    "test_from_each_layout_to_each_other": 10, "test_four_steps_are_torchs": 12, "test_under_any_plan": 5,
    "test_simulated_ranks_take_the_step_of_one_device": 4, "test_fifty_steps_are_those_of_pytorch": 3,
    "test_every_budget_is_kept_by_computing_no_more_than_it_takes": 14,
    "test_a_step_under_a_budget_is_the_same_step": 3,
    "test_generated_code_can_be_compiled": 4, "test_a_family_of_models": 5, "test_gradients_are_autograds": 3,
    "test_cross_entropies_under_plans_by_chance": 5, "test_loss_and_gradient_are_those_of_the_whole_batch": 3,
    "test_the_cheapest_of_all": 3, "test_kinds_of_steps": 3,
    "test_a_skipped_step_changes_nothing": 3, "test_clipping_and_parts_of_a_batch": 3,
    "test_plain_torch_goes_on_where_a_step_stopped_and_back": 3, "test_the_code_needs_torch_alone": 3,
    "test_hyper_parameters_are_read_at_every_step": 3, "test_second_derivatives": 3,
    "test_gradients_are_finite_differences": 3, "test_state_saved_under_one_mesh_is_loaded_under_another": 3,
    "test_models": 3, "test_every_optimiser": 3, "test_assignments": 3, "test_expressions": 3,
    "test_placed_is_serial": 18,
    "test_adapters_of_peft": 2, "test_examples_on_two_processes": 2,
    "test_a_compressed_run_goes_on_to_the_bit": 2, "test_regions_are_the_plain_code": 3,
    "test_other_families_go_on_and_come_out": 3, "test_a_rank_that_does_not_come_is_named_at_the_timeout": 2,
    "test_the_example_of_a_mode_runs": 4, "test_what_is_said_of_the_whole_is_what_it_says_itself": 2,
    "test_when_a_rank_dies_the_others_end_by_themselves_and_say_why": 2, "test_every_collective_is_its_reference": 2,
    "test_kill_of_a_rank_before_a_touch_of_the_disk": 2, "test_models_no_plan_was_written_for": 6,
    "test_other_families_come_out_as_from_one_process": 4, "test_no_ready_plan_is_priced_lower": 2,
    "test_sixteen_bits_are_near_to_fp32_as_autocast_is": 3,
    "test_an_interrupted_run_is_the_uninterrupted_one": 2, "test_compiled_steps_are_those_of_pytorch": 4,
    "test_the_best_of_all_it_may_choose_from": 7, "test_no_plan_of_all_is_faster": 16,
    "test_no_pipeline_of_all_is_faster": 12, "test_no_pipeline_of_all_within_a_limit_is_faster": 99,
    "test_no_pipeline_of_a_deep_model_is_faster": 99, "test_a_run_is_that_of_one_process": 4,
    "test_no_plan_of_all_within_a_limit_is_faster": 14, "test_no_other_values_to_compute_again_are_faster": 6,
    "test_towers_are_placed_where_that_is_faster": 3,
    "test_what_is_given_holds_in_every_plan": 3, "test_in_parts_it_equals_the_whole": 2,
    "test_second_derivatives_by_torch_are_our_own": 4, "test_forward_mode_is_reverse_mode_transposed": 3,
    "test_passes_keep_the_zoo": 2, "test_ranks_take_the_same_steps_within_a_budget": 4,
    "test_what_is_found_fits_and_no_ready_plan_is_priced_lower": 5, "test_a_rank_that_asks_a_step_alone_is_told": 12,
    "test_an_error_that_ranks_come_to_is_said_once": 5, "test_what_is_said_of_messages_holds_in_every_plan": 3,
    "test_a_budget_holds_where_values_are_moved": 4, "test_losses_and_bytes_of_ranks_given_parts": 2,
    "test_sixteen_bits_in_parts": 2, "test_an_onnx_file_of_a_model_gives_its_logits": 4,
    "test_options_of_how_torch_computes_are_known": 2, "test_kill_before_a_touch_of_the_disk": 2,
    "test_losses_are_those_of_one_process_under_every_plan": 2,
    "test_the_planned_peak_fits_and_is_what_a_walk_sees": 2,
    "test_processes_on_several_hosts_measure_the_links_between_them": 2,
    "test_no_other_offload_within_a_limit_is_faster": 5,
    "test_pipelined_is_serial": 3,
}  # fmt: skip


def pytest_collection_modifyitems(config, items):
    by_name = any("::" in str(arg) for arg in config.args)
    is_all = by_name or os.environ.get("MYCEL_SWEEPS") == "all"
    kept, left = [], []
    for item in items:
        if _stem(item.path) in SLOW:
            item.add_marker(pytest.mark.slow)
        chosen = is_all or zlib.crc32(item.name.encode()) % ONE_IN.get(item.originalname, 1) == 0
        (kept if chosen else left).append(item)
    there = {item.function for item in kept}
    for item in [*left]:  # of a sweep that would lose all of its cases the first stays
        if item.function not in there:
            there.add(item.function)
            left.remove(item)
            kept.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = _for_workers(kept, workers) if workers > 1 else kept


def _for_workers(items, workers):
    """Items so that the equal stretches which xdist gives to workers begin with slow files, in each about as long, and
    end with quick ones, which workers that are done take from others (--dist worksteal)."""
    by_file = {}
    for item in items:
        by_file.setdefault(_stem(item.path), []).append(item)
    shares, seconds = [[] for _ in range(workers)], [0] * workers
    for name in sorted(by_file.keys() & SLOW.keys(), key=lambda name: (-SLOW[name], name)):
        least = seconds.index(min(seconds))
        shares[least] += by_file[name]
        seconds[least] += SLOW[name]
    quick = [item for name, own in by_file.items() if name not in SLOW for item in own]
    ordered = []
    for k, share in enumerate(shares):
        room = max(0, (len(items) - len(ordered)) // (workers - k) - len(share))
        ordered += [*share, *quick[:room]]
        quick = quick[room:]
    return ordered


def _stem(path):
    return Path(path).stem.removeprefix("test_")


def pytest_terminal_summary(terminalreporter):
    """How long each slow file took, as SLOW has it."""
    if os.environ.get("MYCEL_SECONDS"):
        seconds = Counter()
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                seconds[_stem(report.fspath)] += report.duration
        slow = [f'"{name}": {max(round(s), 1)}' for name, s in sorted(seconds.items()) if name in SLOW or s >= 10]
        terminalreporter.write_line(", ".join(slow))


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """What a module of tests leaves alive (caches, libraries) is not gone through again by every later collection."""
    gc.collect()
    gc.freeze()
