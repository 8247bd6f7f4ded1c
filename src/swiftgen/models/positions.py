"""Positions of a run: angles that stay as they are while the text grows, so that a cached key stays right.

Two rules of RoPE change their angles with the length of the text. They are fixed for the planned length of
a run: dynamic NTK at the length, longrope at the side of its limit where the text will end. A run that is
planned longer is computed with another model, and may write another text from the first word on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swiftgen.models.architectures import head_dim
from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def usable_positions(config: PretrainedConfig) -> int:
    """How long a text can be without `long_context: yarn`, prompt included."""
    positions = int(config.max_position_embeddings)
    rope = _rope(config)
    return int(positions * float(rope["factor"])) if rope.get("rope_type") == "dynamic" else positions


def planned_config(config: PretrainedConfig, total_tokens: int, stretch: bool) -> PretrainedConfig:
    """The config that a run of prompt and text of `total_tokens` is computed with.

    Its `max_position_embeddings` says how far it reaches, and identifies it among those of one model. A
    config whose angles depend on the position alone is returned as it is, if it reaches far enough.

    Args:
        stretch: Reach further by YaRN if need be.

    Raises:
        SwiftgenError: see `yarn_config`.
    """
    if stretch and total_tokens > usable_positions(config):
        return yarn_config(config, total_tokens)
    kind = _rope(config).get("rope_type")
    if kind == "longrope":
        return _fixed_longrope(config, total_tokens)
    return _fixed_dynamic(config, total_tokens) if kind == "dynamic" else config


def yarn_config(config: PretrainedConfig, total_tokens: int) -> PretrainedConfig:
    """A copy of `config` whose positions reach `total_tokens` by YaRN (arXiv 2309.00071).

    The factor is rounded up to a whole number, so that runs of about the same length see the same model.
    A config that reaches far enough is returned as it is.

    Raises:
        SwiftgenError: if the model already stretches its positions by another rule.
    """
    if total_tokens <= config.max_position_embeddings:
        return config
    rope = _rope(config)
    kind = rope.get("rope_type", "default") if rope else "layerwise"
    if kind not in ("default", "yarn"):
        raise SwiftgenError(
            f"long_context=yarn cannot be combined with the model's own {kind} positions",
            f"Write less: the model has {usable_positions(config):,} positions.",
        )
    original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(math.ceil(total_tokens / original))
    rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    rope.pop("attention_factor", None)  # belongs to the old factor
    return _changed(config, rope, int(original * factor))


def _fixed_longrope(config: PretrainedConfig, total_tokens: int) -> PretrainedConfig:
    """Both sides of the limit get the factors of the side on which the text will end (arXiv 2402.13753)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, reach = _rope(config), int(config.max_position_embeddings)
    _, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, None)
    limit = int(rope["original_max_position_embeddings"])
    factors = rope["long_factor" if total_tokens > limit else "short_factor"]
    # The factor of the attention would follow from the positions, which are cut here.
    rope |= {"long_factor": factors, "short_factor": factors, "attention_factor": scaling}
    return _changed(config, rope, reach if total_tokens > limit else min(reach, limit))


def _fixed_dynamic(config: PretrainedConfig, total_tokens: int) -> PretrainedConfig:
    """The base of dynamic NTK at this length, rounded up to a multiple of the model's own positions."""
    rope, trained = _rope(config), int(config.max_position_embeddings)
    times = max(1, math.ceil(total_tokens / trained))
    dim = int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    factor = float(rope.pop("factor"))
    rope["rope_theta"] *= (factor * times - (factor - 1)) ** (dim / (dim - 2))
    return _changed(config, rope | {"rope_type": "default"}, trained * times)


def _changed(config: PretrainedConfig, rope: dict[str, Any], positions: int) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    changed.rope_parameters = rope
    changed.max_position_embeddings = positions
    return changed


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """A copy of the parameters of RoPE; empty where they differ by layer."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return {} if any(isinstance(rules, Mapping) for rules in rope.values()) else rope
