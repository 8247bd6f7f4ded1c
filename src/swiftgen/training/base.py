"""The frozen model that heads are trained for, in whole sequences rather than passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swiftgen.models.architectures import logits_rule, take_final_norm


class FrozenBase:
    """A model in eval mode without its final norm, since heads read the state before it.

    Args:
        model: It is changed in place and belongs to the base.

    Attributes:
        norm, lm_head, embedding: Parts of the model that heads share.
        finish_logits: What the model does behind its lm_head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.device, self.dtype = model.device, model.dtype
        self._decoder: nn.Module = model.base_model
        self.norm = take_final_norm(self._decoder)
        self.lm_head: nn.Linear = model.lm_head
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.finish_logits = logits_rule(model.config)

    @torch.no_grad()
    def states(self, token_ids: Tensor, **options: Any) -> Tensor:
        """Hidden states before the final norm: int64 `[B, S]` -> `[B, S, hidden]`.

        Args:
            options: For the model, e.g. `position_ids`.
        """
        states: Tensor = self._decoder(
            input_ids=token_ids.to(self.device), use_cache=False, **options
        ).last_hidden_state
        return states

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """What the base itself predicts from states: `[..., hidden]` -> float32 `[..., vocab]`."""
        return self.finish_logits(self.lm_head(self.norm(states)).float())

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Use a registered attention function for a while."""
        before = self.config._attn_implementation
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)
