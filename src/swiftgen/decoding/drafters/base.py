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


class Drafter(Protocol):
    """Adds drafts to a tree and learns from what was written."""

    def propose(self, tree: DraftTree, history: History) -> None:
        """Add drafted tokens below the root of `tree`, the last token of `history`."""
        ...

    def promise(self) -> float:
        """Tokens that a proposal promises to add to a step, less those that its time is worth."""
        ...

    def observe(self, committed: Committed) -> None:
        """Learn from the prompt, then from every step."""
        ...
