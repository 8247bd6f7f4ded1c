"""What fits: memory and positions, asked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swiftgen.forward.cache import sliding_room
from swiftgen.forward.spans import SPAN_TOKENS
from swiftgen.models.architectures import head_dim, layer_windows
from swiftgen.models.tensor_parallel import num_kv_heads
from swiftgen.system.devices import free_bytes
from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Rows of the largest pass (a prefill chunk) the work memory is reckoned for, and of the largest verify pass.
_WORK_ROWS = 128
VERIFY_ROWS = 64
# Python, torch and its kernels, before any weight.
_RUNTIME_BYTES = 300 * 2**20
# What CUDA's libraries take beside the context, which is there when memory is asked for: workspaces, kernels
# that are loaded on first use, graphs, and what the allocator cannot fill.
_CUDA_RUNTIME_BYTES = 512 * 2**20
# On a GPU the sampler goes over the whole vocabulary: logits, their copies, the hash, noise, scores.
_CUDA_SAMPLER_BYTES = 44


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a run needs on the model's device.

    Attributes:
        kv_bytes: the full KV cache of `num_tokens`, prompt and text.
        sliding_bytes: what it has for layers with a sliding window, however long the text.
        draft_bytes: its room for the widest tree (`tree_rows` rows), and the cache of the draft pass.
        work_bytes: everything else.
    """

    weights_bytes: int
    kv_bytes: int
    work_bytes: int
    num_tokens: int
    draft_bytes: int = 0
    tree_rows: int = 0
    sliding_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.sliding_bytes + self.draft_bytes + self.work_bytes


def estimate_memory(
    config: PretrainedConfig,
    num_params_bytes: int,
    num_tokens: int,
    dtype: torch.dtype,
    *,
    tree_rows: int = 0,
    draft_tokens: int = 0,
    on_gpu: bool = False,
) -> MemoryEstimate:
    """Reckon the memory of a run.

    Args:
        config: of a supported architecture.
        num_params_bytes: size of all parameters in `dtype`.
        num_tokens: prompt and text together; the KV cache is allocated for all of them.
        dtype: of weights and KV cache.
        tree_rows: room in the KV cache for the widest tree.
        draft_tokens: in the partial cache of the draft pass.
        on_gpu: whether it runs on a GPU, which is fast and spends memory on it.
    """
    windows = layer_windows(config)
    per_layer = 2 * num_kv_heads(config) * head_dim(config) * dtype.itemsize
    activation_bytes = _WORK_ROWS * (3 * config.intermediate_size + 8 * config.hidden_size) * 4
    if on_gpu:
        work_bytes = _gpu_work_bytes(config, num_tokens, dtype)
    else:  # logits, processed logits, noise and a float64 copy per row
        work_bytes = _WORK_ROWS * config.vocab_size * (4 + 4 + 4 + 8) + _RUNTIME_BYTES
    return MemoryEstimate(
        weights_bytes=num_params_bytes,
        kv_bytes=per_layer * windows.count(None) * num_tokens,
        work_bytes=work_bytes + activation_bytes,
        num_tokens=num_tokens,
        draft_bytes=per_layer * (len(windows) * tree_rows + windows.count(None) * draft_tokens),
        tree_rows=tree_rows,
        sliding_bytes=per_layer * sum(sliding_room(window, num_tokens) for window in windows if window),
    )


def _gpu_work_bytes(config: PretrainedConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Work memory of the largest pass and its sampling, and the results that each graph keeps."""
    largest, all_sizes = VERIFY_ROWS, 2 * VERIFY_ROWS
    logits_bytes = config.vocab_size * (largest * _CUDA_SAMPLER_BYTES + all_sizes * 4)
    # For each span of the prefix its queries and outputs, and those weighed in float32; see `spans`.
    num_values = _WORK_ROWS * config.num_attention_heads * head_dim(config)
    num_spans = -(-num_tokens // SPAN_TOKENS)
    prefix_bytes = num_values * num_spans * (2 * dtype.itemsize + 4)
    query_bytes = 2 * num_values * config.num_hidden_layers * dtype.itemsize
    return int(logits_bytes + prefix_bytes + query_bytes + _CUDA_RUNTIME_BYTES)


def check_memory(estimate: MemoryEstimate, device: torch.device | str) -> None:
    """Raise SwiftgenError, with the numbers and the longest text that fits, if memory does not suffice."""
    device = torch.device(device)
    free = free_bytes(device)
    if estimate.total_bytes <= free:
        return
    where = f"GPU memory on {device}" if device.type == "cuda" else "memory"
    message = (
        f"this needs {_gib(estimate.total_bytes)} GiB (weights {_gib(estimate.weights_bytes)}, KV cache of "
        f"{estimate.num_tokens:,} tokens {_gib(estimate.kv_bytes + estimate.sliding_bytes)}, "
        f"{_drafts(estimate)}"
        f"work {_gib(estimate.work_bytes)}), "
        f"but only {_gib(free)} GiB of {where} are free"
    )
    if estimate.draft_bytes > estimate.kv_bytes and estimate.total_bytes - estimate.draft_bytes <= free:
        raise SwiftgenError(
            message,
            "Without so many drafts it fits: use a smaller k, tree or kv_budget, or another --draft.",
        )
    fitting = fitting_tokens(estimate, free)
    if fitting >= 1:
        raise SwiftgenError(message, f"At most {fitting:,} tokens fit, the prompt included.")
    raise SwiftgenError(message, "The weights alone do not fit: use a smaller model or another device.")


def fitting_tokens(estimate: MemoryEstimate, free: int) -> int:
    """The longest text that fits into `free` bytes with its prompt, by an estimate for any length from 1 up.

    0 or less if not even the weights fit.
    """
    per_token = max(1, estimate.kv_bytes // max(1, estimate.num_tokens))
    fixed = estimate.total_bytes - estimate.kv_bytes
    return (free - fixed) // per_token


def check_length(prompt_tokens: int, num_tokens: int, max_positions: int, long_context: str) -> None:
    """Raise SwiftgenError if prompt and text together exceed the positions the model was made for.

    Args:
        prompt_tokens: length of the prompt.
        num_tokens: tokens to write.
        max_positions: of the model, before any stretching.
        long_context: "error", or "yarn" to allow stretched positions.
    """
    total = prompt_tokens + num_tokens
    if total <= max_positions or long_context == "yarn":
        return
    message = (
        f"{prompt_tokens:,} tokens of prompt and {num_tokens:,} to write need {total:,} positions, "
        f"the model has {max_positions:,}"
    )
    left = max_positions - prompt_tokens
    fewer = f"Write at most {left:,} tokens, or stretch" if left > 0 else "Shorten the prompt, or stretch"
    raise SwiftgenError(
        message, f"{fewer} the positions with --set long_context=yarn (the text may get worse)."
    )


def _drafts(estimate: MemoryEstimate) -> str:
    if not estimate.draft_bytes:
        return ""
    return f"drafts of up to {estimate.tree_rows:,} rows {_gib(estimate.draft_bytes)}, "


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
