"""A step does as much in a long text as in a short one; attention and the KV cache alone may grow.

What it does is counted, since times differ from run to run: lines of Python, and bytes that it needs for a
moment. tests/tools/bench_length.py measures the times.
"""

from __future__ import annotations

import statistics
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import pytest

from support.upkeep import STEP_TOKENS, committed, made_up_text, upkeep_parts
from swiftgen.decoding.drafters.lookup import NUM_SLOTS, LookupDrafter

SHORT, LONG = 2_000, 60_000
MOST_TIMES_AS_MUCH = 3.0  # tables that fill
SLACK_LINES, SLACK_BYTES = 10, 1_000


def num_lines(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object):  # type: ignore[no-untyped-def]
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def num_bytes(call: Callable[[], object]) -> int:
    """Most that a call holds at a time, beside what was there."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("part", list(upkeep_parts(1)))
def test_what_follows_a_text_does_as_much_at_any_length(part: str):
    text = made_up_text(LONG)
    follow = upkeep_parts(LONG)[part]

    def steps(begin: int, end: int) -> list[Callable[[], object]]:
        return [
            lambda place=place: follow(text[place : place + STEP_TOKENS])
            for place in range(begin, end, STEP_TOKENS)
        ]

    def work(begin: int, end: int) -> tuple[float, float]:
        """Lines (mean) and bytes (median: lists grow by leaps) of a step between two places."""
        calls = steps(begin, end)
        lines = statistics.mean(num_lines(call) for call in calls[::2])
        return lines, statistics.median(num_bytes(call) for call in calls[1::2])

    for step in steps(0, SHORT // 2):
        step()
    short_lines, short_bytes = work(SHORT // 2, SHORT)
    for step in steps(SHORT, LONG - SHORT):
        step()
    long_lines, long_bytes = work(LONG - SHORT, LONG)
    assert 0 < long_lines < MOST_TIMES_AS_MUCH * short_lines + SLACK_LINES
    assert 0 < long_bytes < MOST_TIMES_AS_MUCH * short_bytes + SLACK_BYTES


def test_looking_back_keeps_twelve_bytes_a_token_beside_its_tables():
    drafter = LookupDrafter()
    drafter.observe(committed(made_up_text(LONG)))
    links = [drafter._ids, *drafter._before.values()]
    assert sum(map(sys.getsizeof, links)) < 12 * LONG * 9 / 8 + 1_000  # arrays keep an eighth in reserve
    assert sum(map(sys.getsizeof, drafter._latest.values())) < 2 * 4 * NUM_SLOTS * 9 / 8 + 1_000
    assert set(vars(drafter)) == {"_ids", "_before", "_latest"}
