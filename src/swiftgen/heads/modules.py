"""Draft heads: small layers that predict the tokens after the next one from a hidden state of the target.

Every kind works alike: from the hidden state before the final norm (`s_0`), `advance` makes the state of
the next position, and `output` is what the target's own frozen lm_head reads of it. Read at position p,
the state after `depth` steps predicts the token at p + 1 + depth.

- `linear` (paper, section 3.2, and its checkpoints): `s_i = s_{i-1} + W_i RMSNorm_i(s_{i-1})`, read through
  RMSNorm'_i. All branches of a tree share one state.
- `recurrent` (after Hydra, arXiv 2402.05109): one cell for all depths, which also reads the embedding of
  the token before, so that a branch is conditioned on its own tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class DraftHeads(nn.Module, ABC):
    """What drafting and training need of heads, whatever their kind.

    Args:
        hidden_size: Of the target.
        num_heads: Depths below the base that the heads were trained for.
        eps: Of the RMSNorms.
        vocabulary: Tokens that can be drafted, ascending ids; None is all of them.
    """

    kind: str

    def __init__(
        self, hidden_size: int, num_heads: int, eps: float, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.eps = hidden_size, num_heads, eps
        self.vocabulary: Tensor | None
        self.register_buffer("vocabulary", vocabulary)

    @abstractmethod
    def advance(self, states: Tensor, embedded: Tensor, depth: int) -> Tensor:
        """States one position on.

        Args:
            states: `[..., hidden]`.
            embedded: Embeddings of the token that follows each state's position, `[..., hidden]`.
            depth: 1 for the first step from the target's own state.
        """

    @abstractmethod
    def output(self, states: Tensor, depth: int) -> Tensor:
        """What the lm_head reads of states `depth` steps from the target's own, `[..., hidden]`."""

    @abstractmethod
    def options(self) -> dict[str, int]:
        """Further arguments of the constructor, by name."""

    @abstractmethod
    def read_like(self, final_norm: nn.Module) -> None:
        """Make untrained heads predict what the base predicts, by taking over its final norm."""


class LinearHeads(DraftHeads):
    """The paper's chained residual heads."""

    kind = "linear"

    def __init__(
        self, hidden_size: int, num_heads: int, eps: float = 1e-6, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(hidden_size, num_heads, eps, vocabulary)
        self.heads = nn.ModuleList(_LinearHead(hidden_size, eps) for _ in range(num_heads))

    def advance(self, states: Tensor, embedded: Tensor, depth: int) -> Tensor:
        """See the base class; the embeddings are not read."""
        return self._head(depth)(states)  # type: ignore[no-any-return]

    def output(self, states: Tensor, depth: int) -> Tensor:
        """See the base class."""
        normed: Tensor = self._head(depth).post_layernorm(states)
        return normed

    def options(self) -> dict[str, int]:
        """See the base class."""
        return {}

    def read_like(self, final_norm: nn.Module) -> None:
        """See the base class."""
        for depth in range(1, self.num_heads + 1):
            _copy_norm(final_norm, self._head(depth).post_layernorm)

    def _head(self, depth: int) -> _LinearHead:
        head = self.heads[depth - 1]
        assert isinstance(head, _LinearHead)
        return head


class _LinearHead(nn.Module):
    """One residual step: `s + W RMSNorm(s)`, and the norm before the lm_head."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, state: Tensor) -> Tensor:
        next_state: Tensor = state + self.linear(self.input_layernorm(state))
        return next_state


class RecurrentHeads(DraftHeads):
    """One gated cell for all depths, reading the state and the embedding of the token that follows.

    `s_i = s_{i-1} + D (silu(G x) * U x)` with `x = [RMSNorm(s_{i-1}), RMSNorm(embedding)]`.

    Args:
        width: Of the gated layer.
    """

    kind = "recurrent"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        eps: float = 1e-6,
        vocabulary: Tensor | None = None,
        *,
        width: int,
    ) -> None:
        super().__init__(hidden_size, num_heads, eps, vocabulary)
        self.width = width
        self.state_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.token_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.gate_up = nn.Linear(2 * hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)
        self.post_norm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.down.weight)

    def advance(self, states: Tensor, embedded: Tensor, depth: int) -> Tensor:
        """See the base class; every depth has the same cell."""
        read = torch.cat([self.state_norm(states), self.token_norm(embedded)], dim=-1)
        gate, up = self.gate_up(read).chunk(2, dim=-1)
        next_states: Tensor = states + self.down(silu(gate) * up)
        return next_states

    def output(self, states: Tensor, depth: int) -> Tensor:
        """See the base class."""
        normed: Tensor = self.post_norm(states)
        return normed

    def options(self) -> dict[str, int]:
        """See the base class."""
        return {"width": self.width}

    def read_like(self, final_norm: nn.Module) -> None:
        """See the base class."""
        _copy_norm(final_norm, self.post_norm)


KINDS: dict[str, type[DraftHeads]] = {heads.kind: heads for heads in (LinearHeads, RecurrentHeads)}


def new_heads(kind: str, hidden_size: int, num_heads: int, eps: float, **options: Any) -> DraftHeads:
    """Untrained heads of a kind."""
    return KINDS[kind](hidden_size, num_heads, eps, **options)


def chain_states(heads: DraftHeads, states: Tensor, embedded: Sequence[Tensor]) -> list[Tensor]:
    """What the lm_head reads at each depth when the tokens that follow are known.

    Args:
        states: The target's own, `[..., hidden]`.
        embedded: For each depth the embeddings of the token it reads, `[..., hidden]`.
    """
    outputs = []
    for depth, following in enumerate(embedded, start=1):
        states = heads.advance(states, following, depth)
        outputs.append(heads.output(states, depth))
    return outputs


@torch.no_grad()
def _copy_norm(source: nn.Module, target: nn.Module) -> None:
    assert isinstance(source.weight, Tensor)
    assert isinstance(target.weight, Tensor)
    target.weight.copy_(source.weight)
