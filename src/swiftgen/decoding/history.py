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
        paths = [[tree.tokens[step] for step in tree.path(node)[1:]] for node in nodes]
        num_tokens = min(num_tokens, self._length + max(map(len, paths)))  # there are no more
        windows = np.empty((len(paths), num_tokens), dtype=np.int64)
        for window, node, path in zip(windows, nodes, paths, strict=True):
            seen = path[max(0, len(path) - num_tokens) :]
            base = self._ids[max(0, self._length + len(seen) - num_tokens) : self._length]
            end = len(base) + len(seen)
            window[: len(base)] = base
            window[len(base) : end] = seen
            window[end:] = tree.tokens[node]  # the last token of the window, so always in it
        return torch.from_numpy(windows)
