"""Tiny random models of several families as GGUF files, with matrices of any type."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from torch import nn

from support.model_files import gguf_writer

SCALES_AT = {
    Kind.Q4_0: {0: 1},
    Kind.Q4_1: {0: 1, 2: -7.5},
    Kind.Q5_0: {0: 1},
    Kind.Q5_1: {0: 1, 2: -15.5},
    Kind.Q8_0: {0: 1},
    Kind.Q4_K: {0: 1, 2: 7.5},
    Kind.Q5_K: {0: 1, 2: 15.5},
    Kind.Q6_K: {208: 1},
    Kind.Q2_K: {80: 1, 82: 1.5},
    Kind.IQ4_NL: {0: 1},
}
"""Where in a block of each type its float16 numbers lie, and how large they are if weights are around 0."""
PACKABLE = [kind for kind in SCALES_AT if kind not in (Kind.Q2_K, Kind.IQ4_NL)]
"""Types that the kernels read."""
ARCHITECTURES = {"gemma3_text": "gemma3"}
"""In GGUF files, where they are not the model type."""


def random_blocks(
    kind: Kind, num_out: int, num_in: int, seed: int, std: float = 0.02
) -> np.ndarray[Any, Any]:
    """Rows of a GGUF tensor: all codes, and scales of both signs, normally distributed, one of them 0."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = generator.integers(0, 256, (num_out, num_in // block, size), dtype=np.uint8)
    scales = generator.normal(0, std, (*rows.shape[:2], 1))
    scales[0, 0] = 0
    for at, factor in SCALES_AT[kind].items():
        rows[..., at : at + 2] = (factor * scales).astype(np.float16).view(np.uint8)
    return rows.reshape(num_out, -1)


def scale_for(kind: Kind, shape: tuple[int, ...], seed: int, std: float) -> float:
    """What random blocks have to be made with, so that their weights have a standard deviation."""
    return 0.02 * std / float(np.std(gguf.dequantize(random_blocks(kind, *shape, seed), kind)))


def blocks(weights: np.ndarray[Any, Any], kind: Kind) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A matrix in blocks of a type, and what they stand for; random ones of types that gguf only reads."""
    try:
        data = gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        seed = zlib.crc32(weights.tobytes())
        scale = scale_for(kind, weights.shape, seed, float(np.std(weights)))
        data = random_blocks(kind, *weights.shape, seed, scale)
    return data, gguf.dequantize(data, kind)


def write_quantised(path: Path, model: nn.Module, kinds: Mapping[str, Kind], **fields: int | float) -> Path:
    """A model as a GGUF file; a matrix is of the kind that the longest part of its name in the file says.

    Args:
        kinds: By parts of names; what has none is F32.
        fields: Of the metadata of the architecture.
    """
    config: Any = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf_writer(path, config, architecture)
    for key, number in fields.items():
        (writer.add_uint32 if isinstance(number, int) else writer.add_float32)(
            f"{architecture}.{key.replace('__', '.')}", number
        )
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        place, weights = f"{names.get_name(base)}.{suffix}", tensor.float().numpy()
        if architecture == "gemma3" and place.endswith("norm.weight"):
            weights = weights + 1
        found = [part for part in kinds if f".{part}" in f".{place}" and weights.ndim == 2]
        kind = kinds[max(found, key=len)] if found else Kind.F32
        writer.add_tensor(place, blocks(weights, kind)[0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
