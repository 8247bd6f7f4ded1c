"""Drafts by the target itself: a pass over the root with the partial KV cache, and the draft heads.

Paper, sections 3.2 and 3.4. The base logits of the pass predict the next token, the heads those after it.
Candidates are ranked with the noise the target will use, so the first one is what the target would pick
if the partial cache told it everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swiftgen.cache import PartialCache
from swiftgen.drafters.base import Committed
from swiftgen.heads import LinearHeads
from swiftgen.sampling import History, Sampler
from swiftgen.target import Target
from swiftgen.tree import DraftTree

BASE_SOURCE = "base"
HEADS_SOURCE = "heads"


class SelfDrafter:
    """One draft pass a step, and a tree of the given shape from its logits.

    Args:
        shape: Children per node at each level, like `[1, 3, 3, 3]`; levels beyond the heads are left out.
        heads: None drafts the base level only.
    """

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        cache: PartialCache,
        heads: LinearHeads | None,
        shape: Sequence[int],
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._cache = cache
        self._heads = heads
        num_levels = 1 + (len(heads.heads) if heads else 0)
        self._shape = list(shape)[:num_levels]

    @torch.inference_mode()
    def propose(self, tree: DraftTree, history: History) -> None:
        """Run the draft pass and add its candidates level by level."""
        levels = min(len(self._shape), tree.max_depth)
        if not levels:
            return
        root = DraftTree(tree.tokens[0], 0)
        position = len(history) - 1
        hidden = self._target.forward(root, position, self._cache).hidden  # [1, hidden]
        outputs = self._target.normed(hidden)
        if self._heads:
            outputs = torch.cat([outputs, self._heads(hidden[0])])[:levels]
        windows = history.windows(root, self._sampler.W).expand(levels, -1)
        positions = position + 1 + torch.arange(levels)
        ranked = self._sampler.rank(
            self._target.unembed(outputs), positions, windows, max(self._shape[:levels])
        )
        nodes = [0]
        for level, candidates in enumerate(ranked):
            source = HEADS_SOURCE if level else BASE_SOURCE
            nodes = [
                child
                for node in nodes
                for rank, token in enumerate(candidates[: self._shape[level]])
                if (child := tree.add(node, token, source, rank)) is not None
            ]

    def observe(self, committed: Committed) -> None:
        """Let the partial cache follow the full one."""
        if committed.cache.length > committed.begin:
            self._cache.update(committed.cache, committed.begin, committed.queries)
