"""A step costs as much in a long text as in a short one; attention and the KV cache alone may grow."""

from __future__ import annotations

import sys
import time

import pytest

from support.upkeep import STEP_TOKENS, committed, made_up_text, upkeep_parts
from swiftgen.decoding.drafters.lookup import NUM_SLOTS, LookupDrafter

SHORT, LONG = 2_000, 60_000
MOST_TIMES_AS_LONG = 4.0  # caches of the processor, and tables that fill
SLACK_S = 20e-6


@pytest.mark.parametrize("part", list(upkeep_parts(1)))
def test_what_follows_a_text_takes_the_same_time_at_any_length(part: str):
    text = made_up_text(LONG)
    follow = upkeep_parts(LONG)[part]

    def mean_s(begin: int, end: int) -> float:
        """Of a step between two places; processor time, so that other programs do not count."""
        begin_s = time.thread_time()
        for place in range(begin, end, STEP_TOKENS):
            follow(text[place : place + STEP_TOKENS])
        return (time.thread_time() - begin_s) / ((end - begin) / STEP_TOKENS)

    mean_s(0, SHORT // 2)
    short_s = mean_s(SHORT // 2, SHORT)
    mean_s(SHORT, LONG - 2 * SHORT)
    assert mean_s(LONG - 2 * SHORT, LONG) < MOST_TIMES_AS_LONG * short_s + SLACK_S


def test_looking_back_keeps_twelve_bytes_a_token_beside_its_tables():
    drafter = LookupDrafter()
    drafter.observe(committed(made_up_text(LONG)))
    links = [drafter._ids, *drafter._before.values()]
    assert sum(map(sys.getsizeof, links)) < 12 * LONG * 9 / 8 + 1_000  # arrays keep an eighth in reserve
    assert sum(map(sys.getsizeof, drafter._latest.values())) < 2 * 4 * NUM_SLOTS * 9 / 8 + 1_000
    assert set(vars(drafter)) == {"_ids", "_before", "_latest"}
