"""The model families swiftgen runs: unmodified transformers classes with plain causal attention."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from swiftgen.errors import SwiftgenError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Rules whose angles depend on the position alone, so that a cached key stays right as the text grows.
_STEADY_ROPE = ("default", "linear", "llama3", "yarn")


def check_supported(config: Any) -> None:
    """Raise SwiftgenError unless swiftgen can run this architecture exactly.

    Args:
        config: a transformers config, or anything with its attributes.
    """
    family = getattr(config, "model_type", None)
    if family not in SUPPORTED:
        raise SwiftgenError(
            f"the architecture {family!r} is not supported", f"Supported are {', '.join(sorted(SUPPORTED))}."
        )
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    if window is not None or "sliding_attention" in layer_types:
        raise SwiftgenError(
            f"this {family} model uses a sliding window of {window} tokens, which is not supported",
            "Use a version with full attention (config.json: sliding_window null).",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise SwiftgenError("quantised safetensors are not supported", "Use 16-bit weights or a GGUF file.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STEADY_ROPE:
        raise SwiftgenError(
            f"{rope} positions are not supported (they change as the text grows)",
            f"Supported are {', '.join(_STEADY_ROPE)}.",
        )


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The transformers class of a supported config."""
    import transformers

    found: type[PreTrainedModel] = getattr(transformers, SUPPORTED[config.model_type])
    return found


def head_dim(config: PretrainedConfig) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def yarn_config(config: PretrainedConfig, total_tokens: int) -> PretrainedConfig:
    """A copy of `config` whose positions reach `total_tokens` by YaRN (arXiv 2309.00071).

    The factor is rounded up to a whole number, so that runs of about the same length see the same model.
    A config that reaches far enough is returned as it is.

    Raises:
        SwiftgenError: if the model already stretches its positions by another rule.
    """
    if total_tokens <= config.max_position_embeddings:
        return config
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise SwiftgenError(
            f"long_context=yarn cannot be combined with the model's own {kind} positions",
            f"Write less: the model has {config.max_position_embeddings:,} positions.",
        )
    original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(math.ceil(total_tokens / original))
    rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    rope.pop("attention_factor", None)  # belongs to the old factor
    stretched = copy.deepcopy(config)
    stretched.rope_parameters = rope
    stretched.max_position_embeddings = int(original * factor)
    return stretched
