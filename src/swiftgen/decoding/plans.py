"""What builds the drafters of a plan, and the room a plan needs in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from swiftgen.decoding.drafters.base import Drafter
from swiftgen.decoding.drafters.heads import HeadsDrafter, ReadyHeads
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.drafters.self_draft import MAX_PASSES, SelfDrafter
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.forward.memory import MemoryEstimate, estimate_memory
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.settings.schema import Preset, num_ngram_nodes, num_tree_nodes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDTHS, BEAM, FLOOR = (4, 4, 4, 4), 4, 0.1
"""What heads draft where the planner chooses from it: children per node, parents per level, and how likely a
parent must be. What lies below a less likely one is hardly ever worth its row."""


@dataclass(frozen=True)
class _Parts:
    """What drafters are made of; see `new_planner`."""

    preset: Preset
    target: Target
    sampler: Sampler
    heads: ReadyHeads | None
    seed: int
    capacity: int
    estimates: Estimates | None


@dataclass(frozen=True)
class _DrafterKind:
    """How a drafter is built, and the most nodes it adds to a tree."""

    build: Callable[[_Parts], Drafter]
    max_nodes: Callable[[Preset], int]


def new_planner(
    preset: Preset,
    target: Target,
    sampler: Sampler,
    heads: ReadyHeads | None,
    seed: int,
    capacity: int,
    estimates: Estimates,
) -> Planner:
    """The preset's plan, ready to draft.

    Args:
        heads: The preset's, if it has any.
        capacity: Tokens in the full cache.
        estimates: What a measured plan begins with, and learns.
    """
    plan = preset.plan
    weighing = estimates if plan.measured else None
    parts = _Parts(preset, target, sampler, heads, seed, capacity, weighing)
    drafter = cache(lambda name: _DRAFTERS[name].build(parts))  # the ways share them
    ways = [[drafter(name) for name in way] for way in plan.ways_with(heads is not None)]
    return Planner(ways, weighing)


def _heads_drafter(parts: _Parts) -> HeadsDrafter:
    assert parts.heads
    return HeadsDrafter(parts.target, parts.sampler, parts.heads, WIDTHS, BEAM, FLOOR, parts.estimates)


def _self_drafter(parts: _Parts) -> SelfDrafter:
    preset, target = parts.preset, parts.target
    num_kept = min(draft_cache_tokens(preset), parts.capacity)
    partial = PartialCache(target.cache_shape, num_kept, preset.sink, preset.refresh == "importance")
    fixed = target, parts.sampler, partial, parts.heads
    if not preset.plan.measured:
        return SelfDrafter(*fixed, preset.tree)
    return SelfDrafter(*fixed, (WIDTHS[0], *WIDTHS), BEAM, FLOOR, parts.estimates)


def _max_heads_nodes(preset: Preset) -> int:
    return BEAM * sum(WIDTHS)


def _max_self_nodes(preset: Preset) -> int:
    if not preset.plan.measured:
        return num_tree_nodes(preset.tree)
    return MAX_PASSES * WIDTHS[0] + _max_heads_nodes(preset)


_DRAFTERS = {
    "self": _DrafterKind(_self_drafter, _max_self_nodes),
    "heads": _DrafterKind(_heads_drafter, _max_heads_nodes),
    "lookup": _DrafterKind(lambda parts: LookupDrafter(), lambda preset: LookupDrafter.max_nodes),
    "ngram": _DrafterKind(
        lambda parts: NgramDrafter(parts.preset.ngram, parts.preset.k, parts.seed), num_ngram_nodes
    ),
}
"""By the names in `settings.plans`."""


def draft_cache_tokens(preset: Preset) -> int:
    """Tokens in the partial cache of the draft pass; 0 where the plan has none."""
    return preset.kv_budget if preset.plan.uses_partial_cache else 0


def max_tree_rows(preset: Preset) -> int:
    """Room behind the text for the largest tree of the plan, padding included."""
    most = max(sum(_DRAFTERS[name].max_nodes(preset) for name in way) for way in preset.plan.ways)
    return 1 + most + BLOCK_TOKENS


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
