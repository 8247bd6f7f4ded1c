"""The model families swiftgen runs: unmodified transformers classes with causal attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Family:
    """What is known of a model family beyond its config.

    Args:
        class_name: The transformers class that writes text with it.
        slides_throughout: Whether all its layers have the sliding window of its config, whatever
            `layer_types` says.
        layers: What its layers compute. "plain" ones do what those of Llama do; "varied" ones have the same
            parts, and in the places that the native kernels know other norms, factors, caps and angles;
            "other" ones are run as they are.
        has_centred_norms: Whether the weights of its norms are what is added to 1.
    """

    class_name: str
    slides_throughout: bool = False
    layers: Literal["plain", "varied", "other"] = "other"
    has_centred_norms: bool = False


FAMILIES = {
    "gemma2": Family("Gemma2ForCausalLM", layers="varied", has_centred_norms=True),
    "gemma3_text": Family("Gemma3ForCausalLM", layers="varied", has_centred_norms=True),
    "granite": Family("GraniteForCausalLM", layers="varied"),
    "llama": Family("LlamaForCausalLM", layers="plain"),
    "mistral": Family("MistralForCausalLM", slides_throughout=True, layers="plain"),
    "mixtral": Family("MixtralForCausalLM", slides_throughout=True),
    "olmo2": Family("Olmo2ForCausalLM", layers="varied"),
    "phi3": Family("Phi3ForCausalLM", slides_throughout=True, layers="varied"),
    "qwen2": Family("Qwen2ForCausalLM", layers="plain"),
    "qwen3": Family("Qwen3ForCausalLM", layers="plain"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", slides_throughout=True),
    "smollm3": Family("SmolLM3ForCausalLM", layers="varied"),
}
"""By `model_type`, those whose tests compare them with transformers; others are compared when loaded."""
_ADVICE = f"Supported are {', '.join(FAMILIES)}."
_NEEDED = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
_ATTENDING = ("full_attention", "sliding_attention")
_GROWING_RULES = ("dynamic", "longrope")  # see `positions`
_ROPE_RULES = ("default", "linear", "llama3", "yarn", *_GROWING_RULES)


def check_family(family: object) -> None:
    """Raise SwiftgenError unless transformers has a class of this `model_type` that writes text."""
    if _class_name(family) is None:
        raise SwiftgenError(f"the architecture {family!r} is not supported", _ADVICE)


def check_supported(config: Any) -> None:
    """Raise SwiftgenError unless swiftgen can run this architecture, or at least try it (see `conformance`).

    Args:
        config: a transformers config, or anything with its attributes.
    """
    family = getattr(config, "model_type", None)
    check_family(family)
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if kind not in _ATTENDING:
            raise SwiftgenError(
                f"this {family} model has layers of the type {kind!r}, which cannot take drafts back",
                "Supported are layers whose attention sees all tokens, or a sliding window of them.",
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise SwiftgenError(f"this {family} model attends to later tokens, so it cannot write")
    for rope in _rope_rules(config):
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_RULES or (kind in _GROWING_RULES and rope is not config.rope_parameters):
            raise SwiftgenError(
                f"{kind} positions are not supported in this {family} model",
                f"Supported are {', '.join(_ROPE_RULES)}; the last two in all layers alike.",
            )
    if family not in FAMILIES:
        _check_can_be_tried(config)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The transformers class of a supported config."""
    import transformers

    name = _class_name(config.model_type)
    assert name is not None, "see check_supported"
    found: type[PreTrainedModel] = getattr(transformers, name)
    return found


def head_dim(config: PretrainedConfig) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens: a token sees the keys less than that many before it.

    None where a layer sees all tokens, also because the model has no position beyond its window.
    """
    num_layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or window >= config.max_position_embeddings:
        return (None,) * num_layers
    family = FAMILIES.get(config.model_type)
    if kinds is None or (family and family.slides_throughout):
        return (int(window),) * num_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def layer_rotaries(config: PretrainedConfig) -> tuple[str | None, ...]:
    """The angles that turn the heads of each layer: of a type of layers, the only ones (""), or none."""
    num_layers = int(config.num_hidden_layers)
    rope = getattr(config, "rope_parameters", None) or {}
    turned = (getattr(config, "no_rope_layers", None) or [1] * num_layers)[:num_layers]
    has_types = any(isinstance(rules, Mapping) for rules in rope.values())
    kinds = config.layer_types[:num_layers] if has_types else [""] * num_layers
    return tuple(kind if is_turned else None for kind, is_turned in zip(kinds, turned, strict=True))


def has_plain_layers(config: PretrainedConfig) -> bool:
    """See `Family`."""
    return _record(config).layers == "plain"


def has_known_layers(config: PretrainedConfig) -> bool:
    """Whether its layers have the parts of Llama's, see `Family`."""
    return _record(config).layers != "other"


def activation_name(config: PretrainedConfig) -> str:
    """Of the gates of the MLPs."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def norm_weight(config: PretrainedConfig, norm: Any) -> Tensor:
    """What an RMSNorm of the model multiplies with, `[width]`; float32 where it has to be made."""
    weight: Tensor = norm.weight
    return 1 + weight.float() if _record(config).has_centred_norms else weight


def norm_eps(norm: Any) -> float:
    """Of an RMSNorm of a model."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def embedding_multiplier(config: PretrainedConfig) -> float:
    """What a model multiplies its embeddings with, beyond what the embedding itself does (Granite)."""
    return float(getattr(config, "embedding_multiplier", 1.0))


def take_final_norm(base: Any) -> nn.Module:
    """Take the final norm out of a base model, which gives the states before it from then on."""
    from torch import nn

    norm: nn.Module = base.norm
    base.norm = nn.Identity()
    return norm


def logits_rule(config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """What a family does to the logits behind its lm_head; by config, since only its `forward` knows it.

    Gemma caps them (`final_logit_softcapping`), Granite divides them (`logits_scaling`), Cohere multiplies
    them (`logit_scale`).
    """
    import torch

    cap = getattr(config, "final_logit_softcapping", None)
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)

    def rule(logits: Tensor) -> Tensor:
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if divisor:
            logits = logits / divisor
        return logits * factor if factor else logits

    return rule


def _record(config: PretrainedConfig) -> Family:
    """Of a family without one, that of a family which is run by the same class."""
    name = _class_name(config.model_type)
    found = (family for family in FAMILIES.values() if family.class_name == name)
    return next(found, Family(name or ""))


def _class_name(family: object) -> str | None:
    """The class that writes text with this family, if transformers has one."""
    if not isinstance(family, str):
        return None
    if family in FAMILIES:
        return FAMILIES[family].class_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    return name if isinstance(name, str) and name.endswith("ForCausalLM") else None


def _check_can_be_tried(config: Any) -> None:
    """Refuses what can be seen to fail before the weights are loaded."""
    family, found = config.model_type, model_class(config)
    if getattr(found, "_is_stateful", False):
        raise SwiftgenError(f"{family} models keep a state that cannot take drafts back", _ADVICE)
    lacking = [name for name in _NEEDED if not isinstance(getattr(config, name, None), int)]
    if lacking or not found._supports_attention_backend:
        reason = f"its config has no {lacking[0]}" if lacking else "it has an attention of its own"
        raise SwiftgenError(f"the architecture {family!r} is not supported: {reason}", _ADVICE)


def _rope_rules(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of RoPE, of each type of layer where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [rules for rules in rope.values() if isinstance(rules, Mapping)]
    yield from nested or [rope]
