"""Drafts by reuse: the most frequent n-grams of the text that start with a given token.

Paper, section 3.3: for each level-1 candidate, the k most frequent 4-grams of the prompt and the output
so far that begin with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from random import Random

from swiftgen.drafters.base import Committed
from swiftgen.sampling import History
from swiftgen.tree import DraftTree

SOURCE = "ngram"
Gram = tuple[int, ...]


class NgramTable:
    """Counts of all n-grams, and for each first token the k most frequent ones at hand.

    Among equally frequent n-grams the choice is random but fixed by the seed. An update costs O(log k)
    comparisons, however long the text is.

    Args:
        n, k: Length of the n-grams, and how many are kept at hand for a first token.
    """

    def __init__(self, n: int, k: int, seed: int) -> None:
        self._k = k
        self._random = Random(seed)
        self._window: deque[int] = deque(maxlen=n)
        self._entries: dict[Gram, tuple[int, float]] = {}  # (-count, lot): smaller is better
        self._best: dict[int, list[tuple[tuple[int, float], Gram]]] = {}

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
        best = self._best.setdefault(gram[0], [])
        if old:
            place = bisect_left(best, (old, gram))
            if place < len(best) and best[place][1] == gram:
                del best[place]
        insort(best, (new, gram))
        del best[self._k :]


class NgramDrafter:
    """Hangs n-grams below the level-1 candidates."""

    num_passes = 0

    def __init__(self, n: int, k: int, seed: int) -> None:
        self._table = NgramTable(n, k, seed)

    def propose(self, tree: DraftTree, history: History) -> None:
        """Add up to k chains of n - 1 tokens below each level-1 node."""
        for start in tree.children(0):
            for continuation in self._table.most_frequent(tree.tokens[start]):
                tree.add_path(start, continuation, SOURCE, chance=0.0)  # a candidate stays one of the pass

    def observe(self, committed: Committed) -> None:
        """Count what was written."""
        self._table.extend(committed.token_ids)
