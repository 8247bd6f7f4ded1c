"""What the plans of `preset.draft` draft, and the room they need in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from swiftgen.decoding.drafters.base import Drafter, Pace
from swiftgen.decoding.drafters.heads import HeadsDrafter, ReadyHeads
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.drafters.self_draft import MAX_PASSES, SelfDrafter
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.cache import BLOCK_TOKENS, PartialCache
from swiftgen.forward.memory import MemoryEstimate, estimate_memory
from swiftgen.forward.target import Target
from swiftgen.settings.presets import Preset, num_drafted_nodes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDTHS, BEAM, FLOOR = (4, 4, 4, 4), 4, 0.1
"""What heads draft where the planner chooses from it: children per node, parents per level, and how likely a
parent must be. What lies below a less likely one is hardly ever worth its row."""


def new_planner(
    preset: Preset,
    target: Target,
    sampler: Sampler,
    heads: ReadyHeads | None,
    seed: int,
    capacity: int,
    pass_seconds: Sequence[float],
) -> Planner:
    """The preset's way to draft: none, paper, heads, ngram, self, or whatever is fastest.

    Args:
        heads: The preset's, if it has any.
        capacity: Tokens in the full cache.
        pass_seconds: What a pass of each size took.
    """
    mode = preset.draft
    beam, floor = (None, 0.0) if mode == "paper" else (BEAM, FLOOR)
    shape = preset.tree if mode == "paper" else (WIDTHS[0], *WIDTHS)
    pace = Pace()
    by_pass: list[Drafter] = []
    by_heads: list[Drafter] = []
    by_lookup: list[Drafter] = []
    if num_kept := draft_cache_tokens(preset):
        by_importance = preset.refresh == "importance"
        partial = PartialCache(target.cache_shape, min(num_kept, capacity), preset.sink, by_importance)
        price = None if mode == "paper" else pace
        by_pass = [SelfDrafter(target, sampler, partial, heads, shape, beam, floor, price)]
    if mode in ("heads", "auto") and heads is not None:
        by_heads = [HeadsDrafter(target, sampler, heads, WIDTHS, beam, floor, pace)]
    if mode == "paper" and preset.k:
        by_pass.append(NgramDrafter(preset.ngram, preset.k, seed))
    if mode in ("ngram", "auto"):
        by_lookup = [LookupDrafter()]
    ways: dict[str, list[list[Drafter]]] = {
        "none": [[]],
        "paper": [by_pass],
        "ngram": [by_lookup],
        "heads": [by_heads, []],
        "self": [by_pass, []],
        "auto": [by_lookup + by_heads, by_lookup + by_pass, by_lookup][0 if by_heads else 1 :],
    }
    return Planner(ways[mode], target.pass_sizes, mode != "paper", pass_seconds, pace)


def draft_cache_tokens(preset: Preset) -> int:
    """Tokens in the partial cache of the draft pass; 0 where the plan has none."""
    return preset.kv_budget if preset.draft in ("paper", "self", "auto") else 0


def max_tree_rows(preset: Preset) -> int:
    """Room behind the text for the largest tree of the plan, padding included."""
    if preset.draft == "paper":
        num_drafted = num_drafted_nodes(preset)
    else:
        num_drafted = MAX_PASSES * WIDTHS[0] + BEAM * sum(WIDTHS) + LookupDrafter.max_nodes
    return 1 + num_drafted + BLOCK_TOKENS


def run_memory(
    preset: Preset,
    config: PretrainedConfig,
    weights_bytes: int,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryEstimate:
    """What a run needs, its drafts included; see `estimate_memory`."""
    return estimate_memory(
        config,
        weights_bytes,
        num_tokens,
        dtype,
        tree_rows=max_tree_rows(preset),
        draft_tokens=draft_cache_tokens(preset),
        on_gpu=device.type == "cuda",
    )
