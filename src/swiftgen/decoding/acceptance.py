"""How likely drafts are right: what drafters think of them, and what has become of their like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from swiftgen.forward.tree import DraftTree

_MEMORY = 0.03  # weight of the newest outcome, once there are many
_PRIOR_WEIGHT = 4.0  # outcomes that a first guess counts for
_MAX_DEPTH = 4  # levels from here on share their estimates


class AcceptanceEstimates:
    """Chance that a drafted token is the target's pick, given that its parent was.

    Candidates of the same source and depth that their drafter thinks about equally likely share an
    estimate. It begins with that of the depth above, and the first with what the drafter thinks.

    Args:
        known: Estimates to begin with, by source, depth and grade.
    """

    def __init__(self, known: Mapping[tuple[str, int, int], float] | None = None) -> None:
        self.known = dict(known or {})
        self._weights: dict[tuple[str, int, int], float] = {}

    def chance(self, source: str, depth: int, drafted: float) -> float:
        """Estimate for a candidate that its drafter gives the chance `drafted`."""
        grade = _grade(drafted)
        for above in range(min(depth, _MAX_DEPTH), 0, -1):
            if (found := self.known.get((source, above, grade))) is not None:
                return found
        return drafted

    def chances(self, tree: DraftTree) -> list[float]:
        """Chance of each node to be on the accepted path; the root is certain."""
        chances = [1.0]
        for node in range(1, len(tree)):
            own = self.chance(tree.sources[node], tree.depths[node], tree.chances[node])
            chances.append(chances[tree.parents[node]] * own)
        return chances

    def observe(self, tree: DraftTree, token_ids: Sequence[int]) -> None:
        """Learn from what was written below the root of a tree, verified or not."""
        parent: int | None = 0
        for token in token_ids:
            if parent is None:
                return
            for child in tree.children(parent):
                self._learn(tree, child, tree.tokens[child] == token)
            parent = tree.child(parent, token)

    def _learn(self, tree: DraftTree, node: int, was_right: bool) -> None:
        source, depth, drafted = tree.sources[node], tree.depths[node], tree.chances[node]
        key = source, min(depth, _MAX_DEPTH), _grade(drafted)
        weight = self._weights.get(key, _PRIOR_WEIGHT) + 1.0
        before = self.chance(source, depth, drafted)
        self.known[key] = before + max(_MEMORY, 1.0 / weight) * (was_right - before)
        self._weights[key] = weight


def _grade(chance: float) -> int:
    """Chances by their odds, a factor of two each; all above 64:1 and below 1:64 are alike."""
    odds = chance / max(1.0 - chance, 1e-9)
    return round(min(6.0, max(-6.0, math.log2(max(odds, 1e-9)))))


def calibrated(share: float, bias: float) -> float:
    """How likely a candidate is right that has this share among its like, noise included.

    Measured in decoding: the odds grow with the power 0.4 of the odds of the share.

    Args:
        bias: Logarithm of the odds where the share is one half.
    """
    share = min(max(share, 1e-3), 1 - 1e-3)
    return 1 / (1 + math.exp(-bias - 0.4 * math.log(share / (1 - share))))
