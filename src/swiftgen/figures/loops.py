"""Finds out when a text has begun to go round in a circle, at a constant cost per token.

A run of period p is a stretch of tokens in which every token but the first p equals the one p before it.
The rule:

- A run is a loop when it has at least two full cycles, and MIN_REPEATED_TOKENS tokens or more that
  equal the ones a period before. Laughter, rows of dots, a refrain and the edge of a table are shorter;
  what goes on for so long in a loop costs the reader a paragraph before it is noticed.
- It is noticed before it is two and a half periods long; if the period is below 36 tokens, before it has
  54 repeated tokens.
- The period is the smallest one, up to MAX_PERIOD_TOKENS. One different token ends the loop. Of two loops
  that run at the same time, one within the cycle of the other, the one that began first counts.

For each size K of a geometric series with the ratio 4/3, the last K tokens are searched for every K/8
tokens at most, among those up to K tokens before them. If the text is in a loop whose period p is in
(3K/4, K], they hold a full cycle, and a full cycle that is not itself a repetition occurs in the loop at
multiples of p alone: the search finds p and nothing else. It compares the tokens themselves, so nothing
is missed or made up by a hash. Searching K tokens takes time in proportion to K, and is done
every K/8 tokens, so a token costs a constant number of steps for each of the 27 sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PERIOD_TOKENS = 65_536
MIN_REPEATED_TOKENS = 48

_TOKEN_BYTES = 4
_KEPT_TOKENS = 3 * MAX_PERIOD_TOKENS  # two periods to search, and what a hidden run may have grown to
_CHECK_TOKENS = MIN_REPEATED_TOKENS // 8


@dataclass(frozen=True)
class Loop:
    """A loop the text is in.

    Args:
        period: tokens of one cycle.
        start: number of tokens before the first cycle.
        num_repeated: tokens so far that equal the one a period before; the first cycle is not counted.
    """

    period: int
    start: int
    num_repeated: int


@dataclass(frozen=True)
class _Search:
    """Looks for periods from `shortest` to `size` with the last `size` tokens, every `interval` tokens."""

    size: int
    shortest: int
    interval: int


def _searches() -> tuple[_Search, ...]:
    sizes = [MAX_PERIOD_TOKENS]
    while sizes[-1] > MIN_REPEATED_TOKENS:
        sizes.append(max(MIN_REPEATED_TOKENS, -(-3 * sizes[-1] // 4)))
    sizes.reverse()
    return tuple(
        _Search(size, smaller + 1, size // MIN_REPEATED_TOKENS * _CHECK_TOKENS)
        for smaller, size in zip([0, *sizes], sizes, strict=False)
    )


_SEARCHES = _searches()


class LoopDetector:
    """Follows a growing token sequence and says which loop it is in; see the module for the rule.

    What it finds does not depend on how the tokens come in blocks. It keeps the last tokens, at
    most 1 MiB.

    Attributes:
        num_found: loops found so far.
    """

    def __init__(self) -> None:
        self._tokens = bytearray()  # the last tokens, little-endian uint32
        self._num_tokens = 0
        self._period = 0  # 0: the text is in no loop
        self._start = 0
        self._longest_ended: Loop | None = None
        self.num_found = 0

    @property
    def current(self) -> Loop | None:
        """The loop that the last token belongs to."""
        if not self._period:
            return None
        return Loop(self._period, self._start, self._num_tokens - self._start - self._period)

    @property
    def longest(self) -> Loop | None:
        """The loop so far with the most repeated tokens; one that goes on or has ended."""
        loops = [loop for loop in (self._longest_ended, self.current) if loop is not None]
        return max(loops, key=lambda loop: loop.num_repeated, default=None)

    def update(self, token_ids: Iterable[int]) -> Loop | None:
        """Appends tokens to the sequence.

        Args:
            token_ids: numbers below 2^32.

        Returns:
            The loop that was found at one of them, as it stands at the last; None if none was, or if it
            has ended again.
        """
        is_new = False
        for token_id in token_ids:
            token = token_id.to_bytes(_TOKEN_BYTES, "little")
            ended = 0
            if self._period and token != self._token_before(self._period):
                self._longest_ended = self.longest
                ended, self._period = self._period, 0
                is_new = False
            self._tokens += token
            self._num_tokens += 1
            if ended or self._num_tokens % _CHECK_TOKENS == 0:
                is_new |= self._look(hidden_below=ended)
        return self.current if is_new else None

    def _token_before(self, distance: int) -> bytearray:
        """The token `distance` tokens before the next one."""
        begin = len(self._tokens) - _TOKEN_BYTES * distance
        return self._tokens[begin : begin + _TOKEN_BYTES]

    def _look(self, hidden_below: int) -> bool:
        """Makes the searches that are due, and those for what a loop of period `hidden_below` has hidden."""
        num_found = self.num_found
        for search in _SEARCHES:
            if search.size + search.shortest > self._num_tokens:
                break
            if self._num_tokens % search.interval and search.size >= hidden_below:
                continue
            if self._period and self._num_tokens - self._start >= 2 * search.size:
                continue  # the search could only find multiples of the period, or what began later
            period = self._find(search)
            if period and self._began_first(period):
                self._start = self._start_of(period, self._num_tokens - search.size - period)
                self._period = period
                self.num_found += 1
        if len(self._tokens) > _TOKEN_BYTES * (_KEPT_TOKENS + MAX_PERIOD_TOKENS):
            del self._tokens[: -_TOKEN_BYTES * _KEPT_TOKENS]
        return self.num_found > num_found

    def _find(self, search: _Search) -> int:
        """The distance of the last tokens from an earlier occurrence of them; 0 if there is none."""
        size = _TOKEN_BYTES * search.size
        begin = len(self._tokens) - size
        needle = self._tokens[begin:]
        low = max(0, begin - size)
        high = begin + size - _TOKEN_BYTES * search.shortest
        # Of several occurrences, only the nearest is a period; with shortest > 1 there is but one in a loop.
        # rfind may take the square of the size, find does not.
        is_near = search.shortest == 1
        at = self._tokens.rfind(needle, low, high) if is_near else self._tokens.find(needle, low, high)
        while at > 0 and at % _TOKEN_BYTES:  # across the borders of tokens
            low, high = (low, at + size - 1) if is_near else (at + 1, high)
            at = self._tokens.rfind(needle, low, high) if is_near else self._tokens.find(needle, low, high)
        return 0 if at < 0 else (begin - at) // _TOKEN_BYTES

    def _began_first(self, period: int) -> bool:
        """Whether a run of `period` that goes on now began before the loop that is known."""
        if not self._period:
            return True
        if not self._start:
            return False
        begin, distance = self._offset(self._start - 1), _TOKEN_BYTES * period
        return self._tokens[begin + distance :] == self._tokens[begin:-distance]

    def _start_of(self, period: int, start: int) -> int:
        """The position at which a run began that is known to go on since `start`."""
        offset, distance = self._offset(start), _TOKEN_BYTES * period
        while offset:
            before = offset - _TOKEN_BYTES
            if self._tokens[before:offset] != self._tokens[before + distance : offset + distance]:
                break
            offset = before
        return self._num_tokens + (offset - len(self._tokens)) // _TOKEN_BYTES

    def _offset(self, position: int) -> int:
        """Where the token at a position is kept, in bytes."""
        return len(self._tokens) - _TOKEN_BYTES * (self._num_tokens - position)
