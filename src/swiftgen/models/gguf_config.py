"""The config of a GGUF file: what transformers reads of its metadata, and what it would forget.

A key that changes attention, positions or scales is applied or refused, never ignored.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from swiftgen.models.architectures import head_dim
from swiftgen.models.gguf_header import GgufHeader
from swiftgen.models.gguf_positions import scaled_rope
from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_READ_BY_TRANSFORMERS = frozenset(
    {
        *("attention.head_count", "attention.head_count_kv", "rope.freq_base"),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    }
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SCALES = ("logit_scale", "residual_scale", "embedding_scale", "router_logit_softcapping")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Gemma of 27B scales scores by hidden size and heads; llama.cpp knows it by its layers, no file says so."""


def read_config(gguf: Path, header: GgufHeader, rope_tensors: Mapping[str, Tensor]) -> PretrainedConfig:
    """The config of a model.

    Args:
        gguf: For messages.
        rope_tensors: Those of the file that scale its positions.

    Raises:
        SwiftgenError: a key asks for what is not known here.
        Exception: whatever transformers raises for an odd file.
    """
    config = _as_transformers_reads(header)
    keys = _Keys(gguf, header)
    _apply_heads(keys, config)
    _apply_windows(keys, config)
    _apply_scales(keys, config)
    _apply_rotation(keys, config)
    config.rope_parameters = scaled_rope(gguf, keys.take_all("rope.scal"), rope_tensors, config)
    if original := config.rope_parameters.get("original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    keys.refuse_the_rest()
    return config


class _Keys:
    """The keys of an architecture that change what is computed; each is taken once."""

    def __init__(self, gguf: Path, header: GgufHeader) -> None:
        prefix = f"{header.architecture}."
        own = {
            name.removeprefix(prefix): value
            for name, value in header.fields.items()
            if name.startswith(prefix)
        }
        self._gguf = gguf
        self._left = {
            name: value
            for name, value in own.items()
            if name.startswith(("attention.", "rope.")) or name in (*_CAPS, *_SCALES)
            if name not in _READ_BY_TRANSFORMERS
        }

    def take(self, name: str) -> Any:
        """The value of a key; None if there is none."""
        return self._left.pop(name, None)

    def take_all(self, prefix: str) -> dict[str, Any]:
        """All keys that begin so."""
        return {name: self.take(name) for name in list(self._left) if name.startswith(prefix)}

    def refuse_unless(self, is_known: bool, name: str, value: object) -> None:
        """Raise SwiftgenError where a key asks for what is not known here."""
        if not is_known:
            raise SwiftgenError(
                f"{self._gguf} asks for what is not known here in a model of its kind: {name} is {value}",
                "Use the safetensors of this model.",
            )

    def refuse_the_rest(self) -> None:
        """Raise SwiftgenError if a key is left that changes anything."""
        for name, value in self._left.items():
            is_usual = value == 1 if name in ("attention.causal", *_SCALES) else not np.any(value)
            self.refuse_unless(is_usual, name, value)


def _apply_heads(keys: _Keys, config: PretrainedConfig) -> None:
    width = keys.take("attention.key_length")
    if width and width != head_dim(config):
        config.head_dim = width
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        value = keys.take(name)
        keys.refuse_unless(value in (None, head_dim(config)), name, value)


def _apply_windows(keys: _Keys, config: PretrainedConfig) -> None:
    name = "attention.sliding_window"
    window, family = keys.take(name), config.model_type
    if family in ("mistral", "phi3"):
        config.sliding_window = window or None
    elif window and window < config.max_position_embeddings:
        keys.refuse_unless(window == getattr(config, "sliding_window", None), name, window)
    name = "attention.sliding_window_pattern"
    pattern = keys.take(name)
    if pattern is None:
        return
    keys.refuse_unless(family in ("gemma2", "gemma3_text"), name, pattern)
    num_layers = int(config.num_hidden_layers)
    slides = [(i + 1) % pattern != 0 for i in range(num_layers)] if isinstance(pattern, int) else pattern
    keys.refuse_unless(len(slides) == num_layers, name, pattern)
    config.layer_types = ["sliding_attention" if each else "full_attention" for each in slides]


def _apply_scales(keys: _Keys, config: PretrainedConfig) -> None:
    for name in _CAPS:
        if (value := keys.take(name)) is not None:
            keys.refuse_unless(hasattr(config, name), name, value)
            setattr(config, name, value or None)
    width = head_dim(config)
    if config.model_type in ("gemma2", "gemma3_text"):
        if config.num_hidden_layers == _LAYERS_OF_27B[config.model_type]:
            width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width
    scale = keys.take("attention.scale")
    is_usual = scale in (None, 0) or math.isclose(scale, width**-0.5, rel_tol=1e-4)
    keys.refuse_unless(is_usual, "attention.scale", scale)


def _apply_rotation(keys: _Keys, config: PretrainedConfig) -> None:
    """How much of a head turns, and how fast in layers that slide."""
    rope, width = config.rope_parameters, head_dim(config)
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        turned = keys.take(name)
        if turned in (None, width):
            continue
        keys.refuse_unless("partial_rotary_factor" in rope, name, turned)
        rope["partial_rotary_factor"] = turned / width
    name = "rope.freq_base_swa"
    if (base := keys.take(name)) is not None:
        keys.refuse_unless("sliding_attention" in rope, name, base)
        rope["sliding_attention"]["rope_theta"] = base


def _as_transformers_reads(header: GgufHeader) -> PretrainedConfig:
    """By a file that has all but the vocabulary and the weights: transformers looks at every token."""
    from gguf import GGUFWriter
    from transformers import AutoConfig

    fields = dict(header.fields)
    architecture = fields.pop("general.architecture", "")
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens:
        fields.setdefault(f"{architecture}.vocab_size", len(tokens))
    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / "header.gguf", architecture)
        for name, value in fields.items():
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_int64(name, value)
            elif isinstance(value, float):
                writer.add_float64(name, value)
            elif not name.startswith("tokenizer.") and not any(isinstance(part, str) for part in value):
                writer.add_array(name, value)
        if "output.weight" in header.tensors:  # else the embedding takes its place
            writer.add_tensor("output.weight", np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, gguf_file="header.gguf")
    return config
