"""A GGUF file in the shapes of Llama-3.1-8B as Q4_K_M, 4.9 GB of random weights, to measure memory and speed.

python tests/tools/synthetic_gguf.py /tmp/8b.gguf --tokenizer model.gguf
swiftgen write --set model.source=/tmp/8b.gguf --set model.sha256=null --raw --tokens 32
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from swiftgen.models.gguf_header import read_header

SCALES_AT = {Kind.Q4_K: {0: 1.0, 2: 7.5}, Kind.Q6_K: {208: 1.0}}
"""Where in a block its float16 numbers lie, and how large they are if weights are around 0."""
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shapes:
    """Of a Llama."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    positions: int = 131072


TINY = Shapes(layers=8, hidden=256, intermediate=512, heads=4, kv_heads=2, vocab=0, positions=1024)


def matrices(shapes: Shapes) -> Iterator[tuple[str, Kind, tuple[int, int]]]:
    """Name, type and shape of each, as llama.cpp mixes them in a file of 8B called Q4_K_M."""
    hidden, kv_width = shapes.hidden, shapes.hidden // shapes.heads * shapes.kv_heads
    yield "token_embd", Kind.Q4_K, (shapes.vocab, hidden)
    for layer in range(shapes.layers):
        eighth = shapes.layers // 8
        has_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        more = Kind.Q6_K if has_more else Kind.Q4_K
        for name, kind, shape in (
            ("attn_q", Kind.Q4_K, (hidden, hidden)),
            ("attn_k", Kind.Q4_K, (kv_width, hidden)),
            ("attn_v", more, (kv_width, hidden)),
            ("attn_output", Kind.Q4_K, (hidden, hidden)),
            ("ffn_gate", Kind.Q4_K, (shapes.intermediate, hidden)),
            ("ffn_up", Kind.Q4_K, (shapes.intermediate, hidden)),
            ("ffn_down", more, (hidden, shapes.intermediate)),
        ):
            yield f"blk.{layer}.{name}", kind, shape
    yield "output", Kind.Q6_K, (shapes.vocab, hidden)


def random_rows(
    generator: np.random.Generator, kind: Kind, shape: tuple[int, int], scale: float
) -> np.ndarray[Any, Any]:
    """Rows of blocks: all codes, and scales of both signs, normally distributed."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    num_out, num_blocks = shape[0], shape[1] // block
    rows = np.frombuffer(generator.bytes(num_out * num_blocks * size), np.uint8).reshape(
        num_out, num_blocks, size
    )
    rows = rows.copy()
    scales = generator.standard_normal((num_out, num_blocks, 1), np.float32) * scale
    for at, factor in SCALES_AT[kind].items():
        rows[..., at : at + 2] = (factor * scales).astype(np.float16).view(np.uint8)
    return rows.reshape(num_out, -1)


def usual_scale(kind: Kind) -> float:
    """The scale of blocks whose weights have the usual spread."""
    rows = random_rows(np.random.default_rng(0), kind, (64, 4096), 1e-3)
    return 1e-3 * WEIGHT_STD / float(gguf.dequantize(rows, kind).std())


def write(path: Path, shapes: Shapes, tokenizer: Path) -> None:
    """Write the file tensor by tensor, with the tokenizer of another file, padded to the vocabulary."""
    fields = read_header(tokenizer).fields
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    vocab = shapes.vocab or -(-len(tokens) // 16) * 16
    shapes = Shapes(**{**shapes.__dict__, "vocab": vocab})
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shapes.positions)
    writer.add_embedding_length(shapes.hidden)
    writer.add_block_count(shapes.layers)
    writer.add_feed_forward_length(shapes.intermediate)
    writer.add_head_count(shapes.heads)
    writer.add_head_count_kv(shapes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(shapes.hidden // shapes.heads)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"unused{i}" for i in range(len(tokens), vocab))])
    if types := fields.get("tokenizer.ggml.token_type"):
        writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * (vocab - len(tokens))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])

    found = list(matrices(shapes))
    norms = [f"blk.{i}.{name}" for i in range(shapes.layers) for name in ("attn_norm", "ffn_norm")]
    for name, kind, shape in found:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = shape[0] * shape[1] // block * size
        row = shape[1] // block * size
        writer.add_tensor_info(f"{name}.weight", (shape[0], row), np.dtype(np.uint8), num_bytes, kind)
    ones = np.ones(shapes.hidden, np.float32)
    for name in [*norms, "output_norm"]:
        writer.add_tensor_info(f"{name}.weight", ones.shape, ones.dtype, ones.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator, scales = np.random.default_rng(0), {kind: usual_scale(kind) for kind in SCALES_AT}
    for _, kind, shape in found:
        writer.write_tensor_data(random_rows(generator, kind, shape, scales[kind]))
    for _ in [*norms, "output_norm"]:
        writer.write_tensor_data(ones)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a GGUF file with the tokenizer of GPT-2's kind"
    )
    parser.add_argument("--tiny", action="store_true", help="eight small layers, the vocabulary as it is")
    options = parser.parse_args()
    write(options.path, TINY if options.tiny else Shapes(), options.tokenizer)


if __name__ == "__main__":
    main()
