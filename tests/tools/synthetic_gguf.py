"""A GGUF file in the shapes of Llama-3.1-8B as Q4_K_M, 4.9 GB of random weights, to measure memory and speed.

python tests/tools/synthetic_gguf.py /tmp/8b.gguf --tokenizer model.gguf
swiftgen write --set model.source=/tmp/8b.gguf --set model.sha256=null --raw --tokens 32
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))  # for support

from support.gguf_files import random_blocks, scale_for
from support.model_files import shapes_writer
from swiftgen.models.gguf_header import read_header

WEIGHT_STD = 0.02


def shapes(is_tiny: bool, vocab_size: int) -> LlamaConfig:
    """Those of Llama-3.1-8B, or of eight small layers with the vocabulary as it is, in groups of 16."""
    numbers = {
        "num_hidden_layers": 8 if is_tiny else 32,
        "hidden_size": 256 if is_tiny else 4096,
        "intermediate_size": 512 if is_tiny else 14336,
        "num_attention_heads": 4 if is_tiny else 32,
        "num_key_value_heads": 2 if is_tiny else 8,
        "vocab_size": -(-vocab_size // 16) * 16 if is_tiny else 128256,
        "max_position_embeddings": 1024 if is_tiny else 131072,
    }
    return LlamaConfig(**numbers, rms_norm_eps=1e-5, rope_theta=500000.0)


def matrices(config: LlamaConfig) -> Iterator[tuple[str, Kind, tuple[int, int]]]:
    """Name, type and shape of each, as llama.cpp mixes them in a file of 8B called Q4_K_M."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_width = config.head_dim * config.num_key_value_heads
    yield "token_embd", Kind.Q4_K, (config.vocab_size, hidden)
    eighth = config.num_hidden_layers // 8
    for layer in range(config.num_hidden_layers):
        has_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        more = Kind.Q6_K if has_more else Kind.Q4_K
        for name, kind, shape in (
            ("attn_q", Kind.Q4_K, (hidden, hidden)),
            ("attn_k", Kind.Q4_K, (kv_width, hidden)),
            ("attn_v", more, (kv_width, hidden)),
            ("attn_output", Kind.Q4_K, (hidden, hidden)),
            ("ffn_gate", Kind.Q4_K, (inner, hidden)),
            ("ffn_up", Kind.Q4_K, (inner, hidden)),
            ("ffn_down", more, (hidden, inner)),
        ):
            yield f"blk.{layer}.{name}", kind, shape
    yield "output", Kind.Q6_K, (config.vocab_size, hidden)


def write(path: Path, tokenizer: Path, is_tiny: bool) -> None:
    """Write the file tensor by tensor, with the tokenizer of another file, padded to the vocabulary."""
    fields = read_header(tokenizer).fields
    tokens = fields["tokenizer.ggml.tokens"]
    config = shapes(is_tiny, len(tokens))
    num_unused = config.vocab_size - len(tokens)
    writer = shapes_writer(path, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"unused{i}" for i in range(num_unused))])
    if types := fields.get("tokenizer.ggml.token_type"):
        writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * num_unused])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])

    found = list(matrices(config))
    layers = range(config.num_hidden_layers)
    norms = [*(f"blk.{i}.{name}" for i in layers for name in ("attn_norm", "ffn_norm")), "output_norm"]
    for name, kind, (num_out, num_in) in found:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        row = num_in // block * size
        writer.add_tensor_info(f"{name}.weight", (num_out, row), np.dtype(np.uint8), num_out * row, kind)
    ones = np.ones(config.hidden_size, np.float32)
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", ones.shape, ones.dtype, ones.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    scales = {kind: scale_for(kind, (64, 4096), 0, WEIGHT_STD) for kind in (Kind.Q4_K, Kind.Q6_K)}
    for seed, (_, kind, shape) in enumerate(found):
        writer.write_tensor_data(random_blocks(kind, *shape, seed, scales[kind]))
    for _ in norms:
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
    write(options.path, options.tokenizer, options.tiny)


if __name__ == "__main__":
    main()
