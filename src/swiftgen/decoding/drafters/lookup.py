"""Drafts by looking back: what followed where the last tokens stood before, longest match first.

Prompt lookup over prompt and output. Places are found by the last few tokens, through chains of earlier
occurrences as in LZ77, and a match is then measured backwards: constant work per token and per step, however
long the text is. Memory: the text and two links a token, 12 bytes together, and tables of a fixed size, in
which several keys may share a slot: a chain then leads past places of other keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.history import History
from swiftgen.forward.tree import DraftTree

SOURCE = "lookup"
KEY_LENGTHS = (4, 2)
"""A place is found by this many last tokens; the shorter only where the longer finds none."""
NUM_PLACES, NUM_LOOKED_AT, MAX_MATCH = 3, 16, 64
NUM_SLOTS = 2**18
"""Of the table with the latest place of each key."""
MAX_DRAFT = 48
"""Tokens drafted from one place, about twice the match at most."""
_MAX_LINKS = 4 * NUM_LOOKED_AT
_RIVAL = 0.3  # chance of what followed at the second place, against the first


class LookupDrafter:
    """Drafts what followed the last tokens where the text had them before."""

    max_nodes = NUM_PLACES * MAX_DRAFT

    def __init__(self) -> None:
        self._ids = array("i")
        self._latest = {length: array("i", bytes(4 * NUM_SLOTS)) for length in KEY_LENGTHS}
        self._before = {length: array("i") for length in KEY_LENGTHS}

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

    def promise(self) -> float:
        """It takes hardly any time."""
        return 0.0

    def observe(self, committed: Committed) -> None:
        """Remember what was written."""
        for token in committed.token_ids:
            self._ids.append(token)
            for length, before in self._before.items():
                latest = self._latest[length]
                slot = hash(tuple(self._ids[-length:])) % NUM_SLOTS  # the same in every process
                before.append(latest[slot])
                if len(self._ids) >= length:
                    latest[slot] = len(self._ids)

    def _places(self) -> list[int]:
        """Positions of tokens that may follow, the latest first: the last tokens stand before each."""
        for length in KEY_LENGTHS:
            key = self._ids[-length:]
            found = (place for place in self._chain(length) if self._ids[place - length : place] == key)
            if places := list(islice(found, NUM_LOOKED_AT)):
                return places
        return []

    def _chain(self, length: int) -> Iterator[int]:
        before, place = self._before[length], len(self._ids)
        for _ in range(_MAX_LINKS):
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
