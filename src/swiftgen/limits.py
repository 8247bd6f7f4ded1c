"""What fits: memory and positions, asked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swiftgen.architectures import head_dim
from swiftgen.devices import free_bytes
from swiftgen.errors import SwiftgenError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Rows of the largest pass (a verify pass or a prefill chunk) the work memory is reckoned for.
_WORK_ROWS = 128
# Python, torch and its kernels, before any weight.
_RUNTIME_BYTES = 300 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a run needs on the model's device: weights, full KV cache of `num_tokens`, everything else."""

    weights_bytes: int
    kv_bytes: int
    work_bytes: int
    num_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.work_bytes


def estimate_memory(
    config: PretrainedConfig, num_params_bytes: int, num_tokens: int, dtype: torch.dtype
) -> MemoryEstimate:
    """Reckon the memory of a run.

    Args:
        config: of a supported architecture.
        num_params_bytes: size of all parameters in `dtype`.
        num_tokens: prompt and text together; the KV cache is allocated for all of them.
        dtype: of weights and KV cache.
    """
    kv_per_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * dtype.itemsize
    )
    # Logits, processed logits, noise and a float64 copy per row; activations of one layer at a time.
    logits_bytes = _WORK_ROWS * config.vocab_size * (4 + 4 + 4 + 8)
    activation_bytes = _WORK_ROWS * (3 * config.intermediate_size + 8 * config.hidden_size) * 4
    return MemoryEstimate(
        weights_bytes=num_params_bytes,
        kv_bytes=kv_per_token * num_tokens,
        work_bytes=logits_bytes + activation_bytes + _RUNTIME_BYTES,
        num_tokens=num_tokens,
    )


def check_memory(estimate: MemoryEstimate, device: torch.device | str) -> None:
    """Raise SwiftgenError, with the numbers and the longest text that fits, if memory does not suffice."""
    device = torch.device(device)
    free = free_bytes(device)
    if estimate.total_bytes <= free:
        return
    where = f"GPU memory on {device}" if device.type == "cuda" else "memory"
    message = (
        f"this needs {_gib(estimate.total_bytes)} GiB (weights {_gib(estimate.weights_bytes)}, KV cache of "
        f"{estimate.num_tokens:,} tokens {_gib(estimate.kv_bytes)}, work {_gib(estimate.work_bytes)}), "
        f"but only {_gib(free)} GiB of {where} are free"
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
    return (free - estimate.weights_bytes - estimate.work_bytes) // per_token


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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
