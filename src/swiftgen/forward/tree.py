"""The draft tree: drafted tokens below the root, merged into one trie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROOT_SOURCE = "root"


class DraftTree:
    """Trie of drafted tokens whose node 0, the root, is the last token of the text so far.

    Nodes are numbered in the order they were added, so a parent always comes before its children.
    Drafts of different drafters that begin alike share their nodes (paper, section 3.3).

    Args:
        root_token: The last emitted token, whose key and value are not in the cache yet.
        max_depth: Levels allowed below the root; deeper drafts are cut silently.
    """

    def __init__(self, root_token: int, max_depth: int) -> None:
        self.max_depth = max_depth
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [ROOT_SOURCE]
        self.chances = [1.0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Number of drafted levels (gamma of this step)."""
        return max(self.depths)

    def add(self, parent: int, token: int, source: str, chance: float = 0.5) -> int | None:
        """Add one drafted token below `parent`; its node, or None below the depth limit.

        `chance` is how likely the drafter thinks the token is if its parent is right. Of two drafters that
        draft the same token there, the surer one counts, and the first if both are equally sure.
        """
        known = self._children[parent].get(token)
        if known is not None:
            if chance > self.chances[known]:
                self.sources[known], self.chances[known] = source, chance
            return known
        if self.depths[parent] >= self.max_depth:
            return None
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.chances.append(chance)
        self._children.append({})
        self._children[parent][token] = node
        return node

    def add_path(self, parent: int, tokens: Sequence[int], source: str, chance: float = 0.5) -> None:
        """Add a chain of tokens below `parent`, sharing what is there."""
        for token in tokens:
            child = self.add(parent, token, source, chance)
            if child is None:
                return
            parent = child

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if it was drafted."""
        return self._children[node].get(token)

    def children(self, node: int) -> list[int]:
        """All children of `node`, in the order they were added."""
        return list(self._children[node].values())

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def walk(self, picks: Sequence[int]) -> list[int]:
        """The accepted path: from the root down while a child carries the target's own pick.

        Args:
            picks: The token the target picks after each node, `[len(self)]`.
        """
        path = [0]
        while (node := self.child(path[-1], picks[path[-1]])) is not None:
            path.append(node)
        return path

    def keep(self, nodes: Sequence[int]) -> DraftTree:
        """The subtree of the given nodes, which must contain the parent of each (root included)."""
        kept = DraftTree(self.tokens[0], self.max_depth)
        new_of = {0: 0}
        for node in sorted(nodes):
            if node:
                added = kept.add(
                    new_of[self.parents[node]], self.tokens[node], self.sources[node], self.chances[node]
                )
                assert added is not None
                new_of[node] = added
        return kept

    def visibility(self, num_rows: int) -> Tensor:
        """Which row sees which: itself and its ancestors. Bool `[num_rows, num_rows]`.

        Rows beyond the tree are padding: they see only themselves and nobody sees them.
        """
        visible = torch.eye(num_rows, dtype=torch.bool).numpy()
        for node in range(1, min(len(self), num_rows)):
            visible[node] |= visible[self.parents[node]]
        return torch.from_numpy(visible)
