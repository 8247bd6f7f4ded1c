"""What a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from swiftgen.decoding.history import History
from swiftgen.forward.cache import FullCache
from swiftgen.forward.tree import DraftTree


@dataclass(frozen=True)
class Committed:
    """What a step (or the prefill) added to the text.

    Args:
        token_ids: New tokens; the last one has no key in the cache yet.
        cache: The full cache, already grown.
        begin: Its length before.
        queries: Those of the last token in the cache, `[num_layers, Hkv, G, D]`; None without a pass.
        state: Its hidden state before the final norm, `[hidden]`; None without a pass.
    """

    token_ids: Sequence[int]
    cache: FullCache
    begin: int
    queries: Tensor | None
    state: Tensor | None


@dataclass
class Pace:
    """How fast the text is written, the price of time, and what one more row of a verify pass takes."""

    tokens_per_s: float = 0.0
    row_s: float = 0.0


class Drafter(Protocol):
    """Adds drafts to a tree and learns from what was written.

    Attributes:
        num_passes: Passes of the target that a proposal costs at least.
    """

    num_passes: int

    def propose(self, tree: DraftTree, history: History) -> None:
        """Add drafted tokens below the root of `tree`, the last token of `history`."""
        ...

    def observe(self, committed: Committed) -> None:
        """Learn from the prompt, then from every step."""
        ...
