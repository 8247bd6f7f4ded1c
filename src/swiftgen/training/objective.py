"""The training loss of draft heads, and how good their drafts are on known text.

At position p of a text the heads start from the target's state there and read the tokens that follow;
after `depth` steps they predict the token at p + 1 + depth. The states of a text are known, so all
positions are computed side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from swiftgen.heads.modules import DraftHeads, chain_states
from swiftgen.training.base import FrozenBase

CHUNK_ROWS = 1024
"""Rows of logits in memory at a time: `[CHUNK_ROWS, vocab]` in float32."""


@dataclass(frozen=True)
class Positions:
    """Where heads can be judged: positions with all the tokens they predict in the same text.

    Args:
        text_states: The target's own at every token of the texts, `[B * S, hidden]`.
        index: Which of them the heads start from, int64 `[M]`.
        following: The tokens after each position, int64 `[M, num_heads + 1]`.
    """

    text_states: Tensor
    index: Tensor
    following: Tensor

    def __len__(self) -> int:
        return len(self.index)

    @property
    def states(self) -> Tensor:
        """What the heads start from, float32 `[M, hidden]`."""
        return self.text_states[self.index].float()

    def predicting(self, depth: int, rows: slice = slice(None)) -> Tensor:
        """Which of `text_states` predict what the head of a depth is to predict, int64 `[rows]`."""
        return self.index[rows] + depth


def positions_of(states: Tensor, tokens: Tensor, lengths: Tensor, num_heads: int) -> Positions:
    """All usable positions of a batch of texts.

    Args:
        states: `[B, S - 1, hidden]` (or longer), any float dtype.
        tokens: int64 `[B, S]`, padded behind `lengths`.
        lengths: int64 `[B]`.
    """
    last = tokens.shape[1] - 1 - num_heads  # positions 0 .. last - 1 have num_heads + 1 tokens behind them
    if last < 1:
        raise ValueError(f"texts of {tokens.shape[1]} tokens are too short for {num_heads} heads")
    usable = torch.arange(last) < (lengths - 1 - num_heads).unsqueeze(1)  # [B, last]
    usable = usable.to(states.device)
    index = torch.arange(states.shape[0] * states.shape[1], device=states.device).view(states.shape[:2])
    windows = tokens.to(states.device)[:, 1:].unfold(1, num_heads + 1, 1)[:, :last]
    return Positions(states.flatten(0, 1), index[:, :last][usable], windows[usable])


class HeadsObjective:
    """Cross entropy of heads against the text, or against what the target itself would predict.

    Args:
        soft: Learn the target's whole distribution instead of the token that followed. It is the target's
            over the draft vocabulary.
    """

    def __init__(self, base: FrozenBase, heads: DraftHeads, soft: bool) -> None:
        self._base, self._heads, self._soft = base, heads, soft
        ids = heads.vocabulary
        weight = base.lm_head.weight.detach()
        self._lm_head = weight if ids is None else weight[ids]  # [V, hidden]
        bias = base.lm_head.bias
        self._bias = bias if ids is None or bias is None else bias[ids]
        self._index = None
        if ids is not None:
            self._index = torch.full((weight.shape[0],), -100, device=weight.device)
            self._index[ids] = torch.arange(len(ids), device=weight.device)

    def backward(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Add the gradients of the mean loss, summed over the heads; returns loss and top-1 of each head.

        Logits exist for `CHUNK_ROWS` rows at a time: each chunk is differentiated at once, and the heads
        themselves in one go at the end.
        """
        outputs = self.outputs(positions)
        leaves = [output.detach().requires_grad_() for output in outputs]
        losses = torch.zeros(len(outputs), device=positions.index.device)
        hits = torch.zeros_like(losses)
        for depth, rows, wanted in self._chunks(positions):
            logits = self.unembed(leaves[depth - 1][rows])
            loss = cross_entropy(logits, wanted, reduction="sum") / len(positions)
            torch.autograd.backward(loss)
            losses[depth - 1] += loss.detach()
            followed = self.columns(positions.following[rows, depth])
            hits[depth - 1] += (logits.detach().argmax(dim=-1) == followed).sum()
        torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])
        return losses, hits / len(positions)

    @torch.no_grad()
    def losses(self, positions: Positions) -> Tensor:
        """Mean loss of each head."""
        outputs = self.outputs(positions)
        losses = torch.zeros(len(outputs), device=positions.index.device)
        for depth, rows, wanted in self._chunks(positions):
            logits = self.unembed(outputs[depth - 1][rows])
            losses[depth - 1] += cross_entropy(logits, wanted, reduction="sum")
        return losses / len(positions)

    def outputs(self, positions: Positions) -> list[Tensor]:
        """What the lm_head reads at each depth, `[M, hidden]` each."""
        num_heads = self._heads.num_heads
        embedded = [self._base.embedding(positions.following[:, d]).float() for d in range(num_heads)]
        return chain_states(self._heads, positions.states, embedded)

    def unembed(self, outputs: Tensor) -> Tensor:
        """Float32 logits over the draft vocabulary, `[..., V]`."""
        logits = linear(outputs.to(self._lm_head.dtype), self._lm_head, self._bias)
        return self._base.finish_logits(logits.float())

    def columns(self, tokens: Tensor) -> Tensor:
        """Columns of tokens in the draft vocabulary; -100, which `cross_entropy` ignores, outside."""
        return tokens if self._index is None else self._index[tokens]

    def _chunks(self, positions: Positions) -> Iterator[tuple[int, slice, Tensor]]:
        """Depth, rows, and what the head of that depth is to predict there: columns or probabilities."""
        depths = range(1, self._heads.num_heads + 1)
        for first in range(0, len(positions), CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            if not self._soft:
                for depth in depths:
                    yield depth, rows, self.columns(positions.following[rows, depth])
                continue
            # What one head predicts at a position, the next one predicts at the position before.
            index = torch.stack([positions.predicting(depth, rows) for depth in depths])
            distinct, place = index.unique(return_inverse=True)
            probabilities = self._target_probabilities(positions.text_states[distinct])
            for depth in depths:
                yield depth, rows, probabilities[place[depth - 1]]

    @torch.no_grad()
    def _target_probabilities(self, states: Tensor) -> Tensor:
        """The target's own distribution over the draft vocabulary, `[..., V]`."""
        return torch.softmax(self.unembed(self._base.norm(states.to(self._base.dtype))), dim=-1)
