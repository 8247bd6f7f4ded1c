"""Drafts by looking back: what followed where the last tokens stood before, longest match first.

Prompt lookup over prompt and output. Places are found by the last few tokens, through chains of earlier
occurrences as in LZ77, and a match is then measured backwards: constant work per token and per step, however
long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from swiftgen.drafters.base import Committed
from swiftgen.sampling import History
from swiftgen.tree import DraftTree

SOURCE = "lookup"
KEY_LENGTHS = (4, 2)
"""A place is found by this many last tokens; the shorter only where the longer finds none."""
NUM_PLACES, NUM_LOOKED_AT, MAX_MATCH = 3, 16, 64
MAX_DRAFT = 48
"""Tokens drafted from one place, about twice the match at most."""
_RIVAL = 0.3  # chance of what followed at the second place, against the first


class LookupDrafter:
    """Drafts below the root."""

    num_passes = 0
    max_nodes = NUM_PLACES * MAX_DRAFT

    def __init__(self) -> None:
        self._ids = array("q")
        self._latest: dict[tuple[int, ...], int] = {}
        self._before = {length: array("q") for length in KEY_LENGTHS}

    def propose(self, tree: DraftTree, history: History) -> None:
        """Add a chain for each of the best places."""
        matches = sorted(((self._match(place), place) for place in self._places()), reverse=True)
        for rank, (match, place) in enumerate(matches[:NUM_PLACES]):
            parent = 0
            for ahead, token in enumerate(self._ids[place : place + min(MAX_DRAFT, 2 * match + 2)]):
                known = match + ahead
                chance = known / (known + 3.0) * (_RIVAL if rank and not ahead else 1.0)
                node = tree.add(parent, token, SOURCE, chance)
                if node is None:
                    break
                parent = node

    def observe(self, committed: Committed) -> None:
        """Remember what was written."""
        for token in committed.token_ids:
            self._ids.append(token)
            for length, before in self._before.items():
                key = tuple(self._ids[-length:])
                before.append(self._latest.get(key, 0))
                if len(key) == length:
                    self._latest[key] = len(self._ids)

    def _places(self) -> list[int]:
        """Positions of tokens that may follow, the latest first: the last tokens stand before each."""
        for length in KEY_LENGTHS:
            if places := list(self._chain(self._before[length])):
                return places
        return []

    def _chain(self, before: Sequence[int]) -> Iterator[int]:
        place = len(self._ids)
        for _ in range(NUM_LOOKED_AT):
            place = before[place - 1] if place else 0
            if not place:
                return
            yield place

    def _match(self, place: int) -> int:
        """How many tokens before `place` are those at the end of the text."""
        ids, end = self._ids, len(self._ids)
        for length in range(min(MAX_MATCH, place)):
            if ids[place - 1 - length] != ids[end - 1 - length]:
                return length
        return min(MAX_MATCH, place)
