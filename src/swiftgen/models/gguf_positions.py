"""How a GGUF file scales its positions: transformers reads the base frequency and would forget the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LONG, _SHORT, _FREQUENCIES = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"


def scaled_rope(
    gguf: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], config: PretrainedConfig
) -> dict[str, Any]:
    """The `rope_parameters` that a config needs to have the positions of its file.

    Args:
        gguf: For messages.
        keys: All that begin with `rope.scal` after the architecture.
        tensors: All that begin with `rope_`.
        config: As it is without them.

    Raises:
        SwiftgenError: the file scales its positions by a rule that is not known here.
    """
    rope: dict[str, Any] = copy.deepcopy(dict(config.rope_parameters))
    left = {name.removeprefix("rope.scaling."): value for name, value in keys.items()}
    left.pop("finetuned", None)  # how the model came by its positions
    factor = float(left.pop("factor", None) or left.pop("rope.scale_linear", None) or 1.0)
    original, attention = left.pop("original_context_length", None), left.pop("attn_factor", None)
    # What llama.cpp assumes where the file does not say.
    kind = left.pop("type", "linear" if factor != 1 else "none")
    added: dict[str, Any] | None = None
    if set(tensors) == {_LONG, _SHORT}:
        added = {
            "rope_type": "longrope",
            "long_factor": tensors[_LONG].tolist(),
            "short_factor": tensors[_SHORT].tolist(),
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
        if kind not in ("none", "longrope") or not original:
            added = None
    elif kind == "none" and set(tensors) == {_FREQUENCIES}:
        added = _llama3(config, rope, tensors[_FREQUENCIES])
    elif not tensors and (kind == "none" or (kind == "linear" and factor == 1)):
        added = {}
    elif not tensors and kind == "linear" and attention in (None, 1):
        added = {"rope_type": "linear", "factor": factor}
    elif not tensors and kind == "yarn" and original:
        added = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (beta := left.pop(f"yarn_{name}", None)) is not None:
                added[name] = beta
        if attention not in (None, 1):
            added["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    usual = {"yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0, "alpha": 0}
    others = [name for name, value in left.items() if value != usual.get(name)]
    if added is None or others or (added and "full_attention" in rope and kind != "linear"):
        raise SwiftgenError(
            f"{gguf} scales its positions in a way not known here ({', '.join([*tensors, *keys])})",
            "use the safetensors of this model",
        )
    # Layers that slide see no far position, and are not scaled.
    rope.get("full_attention", rope).update(added)
    return rope


def _llama3(config: PretrainedConfig, rope: Mapping[str, Any], wanted: Tensor) -> dict[str, Any] | None:
    """The rule of Llama 3, if it divides each frequency as the file does."""
    if "full_attention" in rope:
        return None
    added = {"rope_type": "llama3", "factor": float(wanted.max()), **_LLAMA3}
    divisors = _divisors(config, {**rope, **added})
    return added if torch.allclose(divisors, wanted, rtol=1e-4) else None


def _divisors(config: PretrainedConfig, rope: dict[str, Any]) -> Tensor:
    """By what a rule divides each frequency, `[head_dim / 2]`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = copy.deepcopy(config)
    scaled.rope_parameters = rope
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](scaled, torch.device("cpu"))
    num_dims = 2 * len(frequencies)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, num_dims, 2) / num_dims)
    divisors: Tensor = plain / frequencies
    return divisors
