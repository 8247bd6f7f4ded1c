"""A tiny random Llama with a tokenizer of bytes: as an object, as a folder, as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import Preset

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(ALPHABET) + 2
EOS = VOCAB_SIZE - 1
HIDDEN_SIZE = 32
MAX_POSITIONS = 512
"""Of the model of the fixture `preset_file`."""
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_config(**changes: object) -> LlamaConfig:
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": VOCAB_SIZE - 1,
        "bos_token_id": None,
    }
    return LlamaConfig(**{**settings, **changes})


def tiny_model(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*ALPHABET, "he", "<end>"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save_model(folder: Path, **changes: object) -> Path:
    """The model and its tokenizer as a folder."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def preset_for(source: Path, **overrides: object) -> Preset:
    settings = {"model.source": str(source), "model.sha256": None, "model.device": "cpu", **overrides}
    return load_preset(None, {"model.dtype": "float32", **settings})


def gguf_writer(
    path: Path, config: LlamaConfig | Qwen2Config, architecture: str = "llama"
) -> gguf.GGUFWriter:
    """A GGUF file of a model with the tiny tokenizer, to which the tensors are still to be added."""
    writer = shapes_writer(path, config, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    more = (f"<{i}>" for i in range(VOCAB_SIZE, config.vocab_size))
    writer.add_token_list([*ALPHABET, "he", "<end>", *more])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(EOS)
    return writer


def shapes_writer(
    path: Path, config: LlamaConfig | Qwen2Config, architecture: str = "llama"
) -> gguf.GGUFWriter:
    """The same without a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters  # of each type of layer, where they differ
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    return writer


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """The model as a GGUF file of 32-bit floats, q and k in the row order of llama.cpp."""
    config = model.config
    writer = gguf_writer(path, config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        num_heads = next((count for key, count in heads.items() if key in name), None)
        if num_heads is not None:
            data = data.reshape(num_heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
