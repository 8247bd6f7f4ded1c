"""Training text the target writes itself: many sequences at once, with the sampler of the preset.

Drafts are judged by what the target writes, so this is the text that heads learn most from. Speed comes
from the batch, not from drafts; a prompt is fed token by token, so sequences with prompts of different
lengths run side by side without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from swiftgen.decoding.sampling import Sampler
from swiftgen.models.architectures import head_dim, layer_windows
from swiftgen.training.base import FrozenBase
from swiftgen.training.states import StateStore, mapped
from swiftgen.training.texts import Texts

ATTENTION_NAME = "swiftgen-batch"
_TOKENS_FILE, _DONE_FILE = "self.tokens", "self.done"
_NOISE_STRIDE = 1 << 32  # sequences draw from distant stretches of the same keyed noise


class BatchCache:
    """Keys and values of sequences of equal length: `[num_layers, B, Hkv, num_tokens, D]`."""

    def __init__(self, base: FrozenBase, batch_size: int, num_tokens: int) -> None:
        config = base.config
        shape = (
            config.num_hidden_layers,
            batch_size,
            config.num_key_value_heads,
            num_tokens,
            head_dim(config),
        )
        self.keys = torch.empty(shape, dtype=base.dtype, device=base.device)
        self.values = torch.empty_like(self.keys)
        self.windows = layer_windows(config)
        self.length = 0


def batch_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    batch_cache: BatchCache,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """One token of each sequence attends to all before it, or to those of its window.

    The query heads of a KV head stand where kernels expect query positions, so keys are not repeated.

    Args:
        query, key, value: After RoPE: `[B, H, 1, D]`, `[B, Hkv, 1, D]`, `[B, Hkv, 1, D]`.

    Returns:
        `[B, 1, H, D]`, and no attention weights.
    """
    end, window = batch_cache.length + 1, batch_cache.windows[module.layer_idx]
    begin = max(0, end - window) if window else 0
    keys, values = batch_cache.keys[module.layer_idx], batch_cache.values[module.layer_idx]
    keys[:, :, end - 1], values[:, :, end - 1] = key[:, :, 0], value[:, :, 0]
    keys, values = keys[:, :, begin:end], values[:, :, begin:end]
    batch_size, num_kv_heads = key.shape[:2]
    q = query.reshape(batch_size, num_kv_heads, -1, query.shape[-1])  # [B, Hkv, G, D]
    if softcap:
        scores = softcap * torch.tanh(q.float() @ keys.float().transpose(2, 3) * (scaling / softcap))
        out = (scores.softmax(dim=-1) @ values.float()).to(q.dtype)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=scaling)
    return out.reshape(batch_size, 1, -1, query.shape[-1]), None


class BatchWriter:
    """Continues prompts side by side; iterating yields the length that every sequence has reached.

    Args:
        base: The model; its attention is replaced while it writes.
        prompts: Token ids; longer prompts are cut.
        num_tokens: Length to reach, prompt included.

    Attributes:
        tokens: int64 `[B, num_tokens]`, on the CPU.
        states: Hidden states before the final norm of all tokens but the last, bfloat16
            `[B, num_tokens - 1, hidden]`, on the CPU.
    """

    def __init__(
        self, base: FrozenBase, sampler: Sampler, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        AttentionInterface.register(ATTENTION_NAME, batch_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)
        self._base, self._sampler = base, sampler
        self._cache = BatchCache(base, len(prompts), num_tokens)
        self.tokens = torch.zeros(len(prompts), num_tokens, dtype=torch.int64)
        self._is_given = torch.zeros_like(self.tokens, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            given = torch.tensor(prompt[:num_tokens])
            self.tokens[row, : len(given)], self._is_given[row, : len(given)] = given, True
        states_shape = (len(prompts), num_tokens - 1, base.config.hidden_size)
        self.states = torch.empty(states_shape, dtype=torch.bfloat16)

    def __iter__(self) -> Iterator[int]:
        with self._base.attention(ATTENTION_NAME):
            for position in range(self.tokens.shape[1] - 1):
                self._step(position)
                yield position + 2

    @torch.no_grad()
    def _step(self, position: int) -> None:
        """Compute the tokens at a position, and choose those that follow where they are not given."""
        hidden = self._base.states(
            self.tokens[:, position, None],
            position_ids=torch.full((len(self.tokens), 1), position, device=self._base.device),
            batch_cache=self._cache,
        )[:, 0]  # [B, hidden]
        self._cache.length += 1
        self.states[:, position] = hidden
        rows = torch.nonzero(~self._is_given[:, position + 1])[:, 0]
        if not len(rows):
            return
        logits = self._base.logits(hidden[rows.to(self._base.device)])
        window = self.tokens[rows, max(0, position + 1 - self._sampler.W) : position + 1]
        noise_positions = rows * _NOISE_STRIDE + position + 1
        picks = self._sampler.pick(logits, noise_positions, window if self._sampler.W else window[:, :0])
        self.tokens[rows, position + 1] = torch.tensor(picks)


def openings(seed: int) -> list[str]:
    """What to ask for, in an order of its own for each seed: every form with every subject."""
    text = resources.files("swiftgen.training").joinpath("openings.yaml").read_text(encoding="utf-8")
    lists = yaml.safe_load(text)
    asked = [form.format(subject=subject) for form in lists["forms"] for subject in lists["subjects"]]
    Random(seed).shuffle(asked)
    return asked


class SelfWriter:
    """Writes a set of texts into a folder, batch by batch; one that was stopped goes on where it was.

    Args:
        folder: Takes the tokens as they come.
        prompts: One for each text, as token ids.
        num_tokens: Length of every text, prompt included.
        new_sampler: Makes the sampler of a batch from its seed.

    Attributes:
        texts: All texts; those not written yet are zeros.
    """

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        new_sampler: Callable[[int], Sampler],
        seed: int,
    ) -> None:
        self._prompts, self._num_tokens = prompts, num_tokens
        self._new_sampler, self._seed = new_sampler, seed
        tokens = mapped(folder / _TOKENS_FILE, (len(prompts), num_tokens), torch.int32)
        self._is_done = mapped(folder / _DONE_FILE, (len(prompts),), torch.bool)
        self.texts = Texts(tokens, torch.full((len(prompts),), num_tokens), torch.arange(len(prompts)))

    def write(self, base: FrozenBase, store: StateStore, batch_size: int) -> Iterator[int]:
        """Write what is missing; yields the number of tokens done in all, as they come."""
        for first in range(0, len(self._prompts), batch_size):
            rows = slice(first, first + batch_size)
            prompts = self._prompts[rows]
            if bool(self._is_done[rows].all()):
                continue
            sampler = self._new_sampler(self._seed + first)
            batch = BatchWriter(base, sampler, prompts, self._num_tokens)
            for length in batch:
                yield (first * self._num_tokens) + length * len(prompts)
            self.texts.tokens[rows] = batch.tokens.to(torch.int32)
            store.put(first, batch.states)
            self._is_done[rows] = True

    @staticmethod
    def clean_up(folder: Path) -> None:
        """Remove what a writer has left in a folder, once the texts are kept elsewhere."""
        for name in (_TOKENS_FILE, _DONE_FILE):
            (folder / name).unlink(missing_ok=True)
