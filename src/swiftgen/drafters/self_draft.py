"""Drafts by the target itself: a pass over the root with the partial KV cache, then the draft heads.

Paper, sections 3.2 and 3.4. The logits of the pass predict the next token, the heads those after it.
Candidates are ranked with the noise the target will use, so the first one is what the target would pick
if the partial cache told it everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swiftgen.cache import PartialCache
from swiftgen.drafters.base import Committed
from swiftgen.drafters.heads import HeadsDrafter, ReadyHeads
from swiftgen.sampling import History, Sampler
from swiftgen.target import Target
from swiftgen.tree import DraftTree

SOURCE = "base"


class SelfDrafter:
    """One draft pass a step, and a tree of the given shape from it.

    Args:
        heads: None drafts the first level only.
        shape: Children per node at each level, like `[1, 3, 3, 3]`; levels beyond the heads are left out.
        beam, floor: As `HeadsDrafter` has them.
    """

    num_passes = 1

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        cache: PartialCache,
        heads: ReadyHeads | None,
        shape: Sequence[int],
        beam: int | None = None,
        floor: float = 0.0,
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._cache = cache
        self._width = shape[0]
        self._heads = HeadsDrafter(target, sampler, heads, shape[1:], beam, floor) if heads else None

    @torch.inference_mode()
    def propose(self, tree: DraftTree, history: History) -> None:
        """Run the draft pass and add its candidates level by level."""
        if not tree.max_depth:
            return
        root = DraftTree(tree.tokens[0], 0)
        hidden = self._target.forward(root, len(history) - 1, self._cache).hidden  # [1, hidden]
        windows = history.windows(root, self._sampler.W)
        (candidates,) = self._sampler.rank(
            self._target.logits(hidden), torch.tensor([len(history)]), windows, self._width
        )
        nodes = [
            node
            for token, confidence in candidates
            if (node := tree.add(0, token, SOURCE, confidence)) is not None
        ]
        if self._heads:
            self._heads.grow(tree, history, nodes, hidden[0])

    def observe(self, committed: Committed) -> None:
        """Let the partial cache follow the full one."""
        if committed.queries is not None and committed.cache.length > committed.begin:
            self._cache.update(committed.cache, committed.begin, committed.queries)
