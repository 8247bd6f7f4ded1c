"""Loops that were planted are found in time, and nothing else is, by comparison with a slow reference."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftgen.figures.loops import MAX_PERIOD_TOKENS, MIN_REPEATED_TOKENS, Loop, LoopDetector

LATEST_REPEATED_TOKENS = 54  # of a loop with a short period: noticed before


def random_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(49_152) for _ in range(num_tokens)]


def english_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    """Few words very often and many seldom, phrases that come again, and the same sentence twice at times."""
    phrases = [
        [int(rng.paretovariate(0.6)) % 30_000 for _ in range(rng.randrange(1, 12))] for _ in range(300)
    ]
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += rng.choice(phrases) * rng.choice([1, 1, 1, 1, 2])
    return tokens[:num_tokens]


def found_at_once(detector: LoopDetector, tokens: list[int]) -> list[tuple[int, Loop]]:
    """Feeds single tokens; the loops, each with the index of the token at which it was found."""
    found = ((i, detector.update([token])) for i, token in enumerate(tokens))
    return [(i, loop) for i, loop in found if loop is not None]


# --- planted loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [random_tokens, english_tokens])
@pytest.mark.parametrize("period", [1, 7, 36, 300, 3_000])
def test_a_planted_loop_is_found_within_two_and_a_half_periods(make, period: int) -> None:  # type: ignore[no-untyped-def]
    for seed in range(5):
        rng = random.Random(seed)
        start = rng.randrange(12_000)
        before = [*make(rng, start), 50_000]  # no token of the cycle, so that the start is known
        cycle = make(rng, period)
        tokens = before + cycle * (3 + 60 // period)
        found = found_at_once(LoopDetector(), tokens)
        assert len(found) == 1
        index, loop = found[0]
        assert (loop.period, loop.start) == (period, start + 1)
        latest = max(2.5 * period, period + LATEST_REPEATED_TOKENS)
        assert loop.period + loop.num_repeated == index + 1 - loop.start <= latest


def test_a_loop_of_the_longest_period_is_found() -> None:
    rng = random.Random(2)
    cycle = random_tokens(rng, MAX_PERIOD_TOKENS)
    detector = LoopDetector()
    detector.update(random_tokens(rng, 1_000))
    assert detector.update(cycle * 2) is None
    loop = detector.update(cycle[: MAX_PERIOD_TOKENS // 2])
    assert loop == Loop(MAX_PERIOD_TOKENS, 1_000, MAX_PERIOD_TOKENS + MAX_PERIOD_TOKENS // 2)


def test_a_loop_of_a_list_whose_lines_differ_in_one_of_two_tokens() -> None:
    # Every stretch of 20 tokens occurs on several lines, so its nearest occurrence is no period.
    lines = [[1, *range(10, 30), 40 + a, *range(50, 70), 80 + b, 2] for a in range(3) for b in range(3)]
    random.Random(3).shuffle(lines)
    cycle = [token for line in lines for token in line]
    found = found_at_once(LoopDetector(), [9, 9, 9, *cycle * 3])
    assert [(loop.period, loop.start) for _, loop in found] == [(len(cycle), 3)]


def test_a_loop_goes_on_until_a_token_differs_and_another_one_begins() -> None:
    detector = LoopDetector()
    assert detector.update([8, 9] + [1, 2, 3] * 30) == Loop(3, 2, 87)
    assert detector.update([1]) is None  # reported once
    assert detector.current == Loop(3, 2, 88)
    detector.update([1])
    assert detector.current is None
    cycle = random_tokens(random.Random(0), 100)
    detector.update(cycle)
    assert detector.update(cycle * 2) == Loop(100, 94, 200)


def test_of_two_loops_at_a_time_the_one_that_began_first_counts() -> None:
    cycle = [*range(10, 40), *[5] * 60]  # a loop of one token within a loop of 90
    found = found_at_once(LoopDetector(), cycle * 4)
    assert [(loop.period, loop.start) for _, loop in found] == [(1, 30), (1, 120), (90, 0)]
    detector = LoopDetector()
    detector.update(cycle * 4 + [5] * 10)  # the outer loop ends, the inner one goes on
    assert detector.current == Loop(1, 300, 69)


def test_a_loop_is_found_in_time_while_another_one_goes_on_within_it() -> None:
    cycle = random_tokens(random.Random(8), 100) + [5] * 2_900
    found = found_at_once(LoopDetector(), (cycle * 3)[:7_500])
    assert [(loop.period, loop.start) for _, loop in found] == [(1, 100), (1, 3_100), (1, 6_100), (3_000, 0)]


def test_a_loop_that_another_one_has_hidden_is_known_as_soon_as_that_one_ends() -> None:
    rng = random.Random(9)
    cycle = random_tokens(rng, 1_000)
    inner, between = (cycle * 3)[:2_600], random_tokens(rng, 100)
    detector = LoopDetector()
    detector.update((inner + between) * 3 + inner)
    assert detector.current == Loop(2_700, 0, 8_000)
    detector.update([inner[600]])  # the inner loop goes on where the outer one does not
    assert detector.current == Loop(1_000, 8_100, 1_601)


def test_what_is_found_does_not_depend_on_the_blocks() -> None:
    rng = random.Random(1)
    tokens = english_tokens(rng, 2_000) + english_tokens(rng, 200) * 3 + [7] * 70 + english_tokens(rng, 500)
    singly, in_blocks = LoopDetector(), LoopDetector()
    singly_found = [loop for _, loop in found_at_once(singly, tokens)]
    found = []
    while tokens:
        num_tokens = rng.randrange(1, 7)
        found.append(in_blocks.update(tokens[:num_tokens]))
        del tokens[:num_tokens]
    assert [(loop.period, loop.start) for loop in found if loop] == [
        (loop.period, loop.start) for loop in singly_found
    ]
    assert len(singly_found) == 2


# --- what is no loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2] * 24 + [3],  # ha ha ha
        [4] * MIN_REPEATED_TOKENS,
        [token for i in range(200) for token in (1, 2, 3, 100 + i, 4, 5, 6, 7)],  # a numbered list
        [*range(300), *range(300)][:-1],  # not yet two cycles
        [*range(300), 999, *range(300), *range(298), 998, *range(300)],  # each cycle with a slip
    ],
    ids=["laughter", "dots", "numbered list", "not yet", "slips"],
)
def test_what_is_no_loop_is_not_reported(tokens: list[int]) -> None:
    assert found_at_once(LoopDetector(), tokens) == []


def test_no_loop_is_found_in_text_without_one() -> None:
    for make in (random_tokens, english_tokens):
        assert found_at_once(LoopDetector(), make(random.Random(4), 50_000)) == []


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 53])
def test_tokens_are_compared_and_not_their_bytes(num_bytes: int) -> None:
    data = random.Random(6).randbytes(num_bytes) * 400
    cycle = [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in range(len(data) // 4)]
    period = num_bytes if num_bytes % 2 else num_bytes // 2
    found = found_at_once(LoopDetector(), cycle)
    assert [loop.period for _, loop in found] == [period]

    data = random.Random(7).randbytes(240)
    shifted = b"".join([data, b"?", data, b"???"])  # the same bytes across the borders of tokens
    tokens = [int.from_bytes(shifted[at : at + 4], "little") for at in range(0, len(shifted), 4)]
    assert found_at_once(LoopDetector(), tokens) == []


def test_an_empty_block() -> None:
    detector = LoopDetector()
    assert detector.update([]) is None
    assert detector.current is None


# --- against a slow reference ------------------------------------------------------------------------

words = st.lists(st.integers(0, 2), min_size=1, max_size=8)
nested = st.recursive(
    words,
    lambda inner: st.one_of(
        st.builds(lambda word, times: word * times, inner, st.integers(2, 70)),
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda word, at: [*word[at:], 3, *word[:at]], inner, st.integers(0, 99)),
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(nested, min_size=1, max_size=5))
def test_the_loop_of_every_moment_is_that_of_the_rule(pieces: list[list[int]]) -> None:
    tokens = np.array([token for piece in pieces for token in piece[:500]][:1_000])
    periods = np.arange(1, len(tokens) + 1)
    repeated = np.zeros(len(tokens), dtype=int)  # by period - 1: how many tokens equal the one before it
    detector = LoopDetector()
    for i, token in enumerate(tokens.tolist()):
        equal = tokens[i::-1][1:] == token  # the tokens before, nearest first
        repeated[:i] = np.where(equal, repeated[:i] + 1, 0)
        detector.update([token])
        starts = i + 1 - periods - repeated
        loop = detector.current
        is_due = repeated >= np.maximum(1.5 * periods, LATEST_REPEATED_TOKENS)
        if loop is None:
            assert not is_due.any()
            continue
        assert loop.num_repeated == repeated[loop.period - 1] >= max(loop.period, MIN_REPEATED_TOKENS)
        assert loop.start == starts[loop.period - 1]
        assert (starts[: loop.period - 1] > loop.start).all()  # it is the smallest period
        assert (starts[is_due] >= loop.start).all()  # none began before


# --- cost --------------------------------------------------------------------------------------------


def test_a_million_tokens_are_quick_and_leave_little_behind() -> None:
    rng = random.Random(5)
    phrases = english_tokens(rng, 50_000)
    detector, sizes, spent_s = LoopDetector(), [], []
    for _ in range(20):
        rng.shuffle(phrases)
        begin_s = time.thread_time()
        detector.update(phrases)
        spent_s.append(time.thread_time() - begin_s)
        sizes.append(len(detector._tokens))
    assert max(sizes) <= 2**20
    assert sum(spent_s) < 20  # it is 5; a token of the smallest model takes 10,000 times as long
    assert min(spent_s[-5:]) < 3 * min(spent_s[:5])  # no dearer at the end than at the beginning
