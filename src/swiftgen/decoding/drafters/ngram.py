"""Drafts by reuse: the most frequent n-grams of the text that start with a given token.

Paper, section 3.3: for each level-1 candidate, the k most frequent 4-grams of the prompt and the output
so far that begin with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from random import Random

from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.history import History
from swiftgen.forward.tree import DraftTree

SOURCE = "ngram"
MAX_GRAMS = 2**17
"""Different n-grams that are counted; a text of so many tokens has no more."""
Gram = tuple[int, ...]
Rank = tuple[int, float]
"""Minus the count, then a lot: smaller is better."""


class NgramTable:
    """Counts of all n-grams, and for each first token the k most frequent ones at hand.

    Among equally frequent n-grams the choice is random but fixed by the seed. An update costs O(log k)
    comparisons, however long the text is. When there are more than `MAX_GRAMS`, the rarer half is forgotten,
    of equally frequent ones those that came first.

    Args:
        n, k: Length of the n-grams, and how many are kept at hand for a first token.
    """

    def __init__(self, n: int, k: int, seed: int) -> None:
        self._k = k
        self._random = Random(seed)
        self._window: deque[int] = deque(maxlen=n)
        self._entries: dict[Gram, Rank] = {}
        self._best: dict[int, list[tuple[Rank, Gram]]] = {}

    def extend(self, token_ids: Iterable[int]) -> None:
        """Count the n-grams that end with these tokens."""
        for token in token_ids:
            self._window.append(token)
            if len(self._window) == self._window.maxlen:
                self._count(tuple(self._window))

    def most_frequent(self, first_token: int) -> list[Gram]:
        """The continuations (without the first token) of the k most frequent n-grams, best first."""
        return [gram[1:] for _, gram in self._best.get(first_token, ())]

    def _count(self, gram: Gram) -> None:
        old = self._entries.get(gram)
        new = (old[0] - 1, old[1]) if old else (-1, self._random.random())
        self._entries[gram] = new
        self._keep_at_hand(gram, old, new)
        if len(self._entries) > MAX_GRAMS:
            self._forget()

    def _keep_at_hand(self, gram: Gram, old: Rank | None, new: Rank) -> None:
        best = self._best.setdefault(gram[0], [])
        if old:
            place = bisect_left(best, (old, gram))
            if place < len(best) and best[place][1] == gram:
                del best[place]
        insort(best, (new, gram))
        del best[self._k :]

    def _forget(self) -> None:
        rarest_first = sorted(self._entries, key=lambda gram: -self._entries[gram][0])
        for gram in rarest_first[: len(rarest_first) // 2]:
            del self._entries[gram]
        self._best.clear()
        for gram, rank in self._entries.items():
            self._keep_at_hand(gram, None, rank)


class NgramDrafter:
    """Hangs n-grams below the level-1 candidates."""

    def __init__(self, n: int, k: int, seed: int) -> None:
        self._k = k
        self._table = NgramTable(n, k, seed)

    def propose(self, tree: DraftTree, history: History) -> None:
        """Add up to k chains of n - 1 tokens below each level-1 node."""
        for start in tree.children(0):
            for continuation in self._table.most_frequent(tree.tokens[start]):
                tree.add_path(start, continuation, SOURCE, chance=0.0)  # a candidate stays one of the pass

    def promise(self) -> float:
        """It takes no time."""
        return 0.0

    def observe(self, committed: Committed) -> None:
        """Count what was written."""
        if self._k:
            self._table.extend(committed.token_ids)
