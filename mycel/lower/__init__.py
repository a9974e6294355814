"""Program + Plan -> the programs that run.  Rewriting never decides."""

from mycel.lower.compress import compress
from mycel.lower.distribute import Distributed, distribute, hinted_axes, refuse_unknown_values, settled, with_known_axes
from mycel.lower.explain import explain, proved, schedule_text, sent, sent_text
from mycel.lower.forward_stages import forward_stages
from mycel.lower.hoist import hoist
from mycel.lower.lowered import (
    Lowered,
    finished,
    in_pairs,
    is_chosen,
    local_of,
    local_of_place,
    lowered,
    staged,
    summed_for_stages,
    with_moves,
    with_moves_by_rank,
    with_regions,
    with_regions_by_rank,
    with_residuals,
)
from mycel.lower.offload import gradients_may_leave, hosted_updates, offload, split_updates, with_copies
from mycel.lower.outer import SENT_AT, OuterMessage, outer_message, outer_messages, outer_role, rounds
from mycel.lower.overlap import overlap
from mycel.lower.places import PlaceWriter, connect, crossings, in_places
from mycel.lower.price import Prices
from mycel.lower.residency import reside
from mycel.lower.stage_sums import plain_sums
from mycel.lower.stages import Pipeline, RankWriter, pipelined, rank_programs, stage_parts

__all__ = [
    "SENT_AT",
    "Distributed",
    "Lowered",
    "OuterMessage",
    "Pipeline",
    "PlaceWriter",
    "Prices",
    "RankWriter",
    "compress",
    "connect",
    "crossings",
    "distribute",
    "explain",
    "finished",
    "forward_stages",
    "gradients_may_leave",
    "hinted_axes",
    "hoist",
    "hosted_updates",
    "in_pairs",
    "in_places",
    "is_chosen",
    "local_of",
    "local_of_place",
    "lowered",
    "offload",
    "outer_message",
    "outer_messages",
    "outer_role",
    "overlap",
    "pipelined",
    "plain_sums",
    "proved",
    "rank_programs",
    "refuse_unknown_values",
    "reside",
    "rounds",
    "schedule_text",
    "sent",
    "sent_text",
    "settled",
    "split_updates",
    "stage_parts",
    "staged",
    "summed_for_stages",
    "with_copies",
    "with_known_axes",
    "with_moves",
    "with_moves_by_rank",
    "with_regions",
    "with_regions_by_rank",
    "with_residuals",
]  # fmt: skip
