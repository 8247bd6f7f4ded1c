"""The text so far, as token ids, and what of it the contextual penalty of each tree node sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from swiftgen.forward.tree import DraftTree


class History:
    """All token ids so far, prompt included, and the penalty windows of tree nodes.

    Args:
        capacity: Most tokens it can hold.
    """

    def __init__(self, capacity: int) -> None:
        self._ids = np.empty(capacity, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        end = self._length + len(token_ids)
        self._ids[self._length : end] = token_ids
        self._length = end

    def last(self, num_tokens: int) -> list[int]:
        """The last tokens, oldest first."""
        last: list[int] = self._ids[max(0, self._length - num_tokens) : self._length].tolist()
        return last

    def windows(self, tree: DraftTree, num_tokens: int, nodes: Sequence[int] | None = None) -> Tensor:
        """The last `num_tokens` tokens as seen from some nodes (None: from all), their paths included.

        Returns:
            int64, one row a node; a window shorter than the longest repeats the node's own token.
        """
        nodes = range(len(tree)) if nodes is None else nodes
        if len(nodes) == 1:
            path = [tree.tokens[step] for step in tree.path(nodes[0])[1:]]
            base = self._ids[max(0, self._length + len(path) - num_tokens) : self._length]
            return torch.from_numpy(np.concatenate([base, path]).astype(np.int64)).unsqueeze(0)
        depths = np.array([tree.depths[node] for node in nodes])
        # The last token of a node's window, so always in it.
        own = np.array([tree.tokens[node] for node in nodes])[:, None]
        paths = np.repeat(own, depths.max(), axis=1)
        for row, node in enumerate(nodes):
            path = tree.path(node)[1:]
            paths[row, : len(path)] = [tree.tokens[step] for step in path]
        num_tokens = min(num_tokens, self._length + int(depths.max()))  # there are no more
        base = self._ids[max(0, self._length - num_tokens) : self._length]
        both = np.concatenate([np.broadcast_to(base, (len(nodes), len(base))), paths], axis=1)
        # A node at depth d sees d path tokens, so the oldest d of a full window have left it.
        overflow = np.maximum(0, len(base) + depths - num_tokens)
        left = np.arange(both.shape[1]) < overflow[:, None]
        return torch.from_numpy(np.where(left, own, both))
