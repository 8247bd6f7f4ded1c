"""How a GGUF file scales its positions: transformers reads the base frequency and would forget the rest."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_READ_BY_TRANSFORMERS = ("gpt-oss",)
_KEYS = {"type", "factor", "original_context_length", "finetuned"}


def scaled_rope(gguf_file: Path, reader: GGUFReader, config: PretrainedConfig) -> dict[str, Any]:
    """The `rope_parameters` that a config needs to have the positions of its file.

    Args:
        reader: of the file.
        config: as transformers reads it from the file.

    Raises:
        SwiftgenError: the file scales its positions by a rule that is not known here.
    """
    rope: dict[str, Any] = dict(config.rope_parameters)
    architecture = str(reader.fields["general.architecture"].contents())
    prefix = f"{architecture}.rope.scaling."
    scaling = {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}
    kind = scaling.get("type", "none")
    if architecture in _READ_BY_TRANSFORMERS or (kind == "none" and not tensors):
        return rope
    if kind == "none" and set(tensors) == {"rope_freqs.weight"}:
        wanted = torch.from_numpy(tensors["rope_freqs.weight"].copy())
        rope |= {"rope_type": "llama3", "factor": float(wanted.max()), **_LLAMA3}
        if torch.allclose(_divisors(config, rope), wanted, rtol=1e-4):
            return rope
    if kind in ("linear", "yarn") and not tensors and set(scaling) <= _KEYS:
        rope |= {"rope_type": kind, "factor": float(scaling["factor"])}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = int(scaling["original_context_length"])
        return rope
    raise SwiftgenError(
        f"{gguf_file} scales its positions in a way not known here ({', '.join([*tensors, *scaling])})",
        "use the safetensors of this model",
    )


def _divisors(config: PretrainedConfig, rope: dict[str, Any]) -> torch.Tensor:
    """By what a rule divides each frequency, `[head_dim / 2]`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = copy.deepcopy(config)
    scaled.rope_parameters = rope
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](scaled, torch.device("cpu"))
    num_dims = 2 * len(frequencies)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, num_dims, 2) / num_dims)
    divisors: torch.Tensor = plain / frequencies
    return divisors
