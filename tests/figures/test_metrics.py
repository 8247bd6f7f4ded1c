"""Run figures against values computed by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from swiftgen.decoding.decode import StepEvent
from swiftgen.figures.distinct import DistinctN
from swiftgen.figures.metrics import RunMetrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def step(
    token_ids: Sequence[int],
    sources: Sequence[str] = (),
    draft_depth: int = 0,
    stop_reason: str | None = None,
) -> StepEvent:
    return StepEvent(
        token_ids=tuple(token_ids),
        sources=tuple(sources),
        draft_depth=draft_depth,
        num_rows=1 + draft_depth,
        context_tokens=50,
        kv_bytes=2048,
        draft_s=0.25,
        verify_s=0.5,
        sample_s=0.125,
        text="",
        stop_reason=stop_reason,
    )


def test_acceptance_is_accepted_over_offered_levels() -> None:
    metrics = RunMetrics()
    metrics.observe(step([1, 2, 3], ["base", "heads"], draft_depth=4))
    metrics.observe(step([4], draft_depth=4))
    metrics.observe(step([5, 6], ["ngram"], draft_depth=2))
    metrics.observe(step([7]))
    snapshot = metrics.snapshot()
    assert snapshot.num_accepted == 3
    assert snapshot.num_drafted == 10
    assert snapshot.acceptance_rate == pytest.approx(0.3)
    assert snapshot.tokens_per_step == pytest.approx(7 / 4)
    assert snapshot.wins == {"base": 1, "heads": 1, "ngram": 1}
    assert (snapshot.draft_s, snapshot.verify_s, snapshot.sample_s) == (1.0, 2.0, 0.5)


def test_acceptance_now_is_that_of_the_last_thousand_tokens() -> None:
    metrics = RunMetrics(written=[9] * 5000)
    assert metrics.snapshot().acceptance_rate_now is None
    for number, (accepted, rate) in enumerate(
        [(4, 1.0), (4, 1.0), (0, 2 / 3), (0, 2 / 4), (0, 1 / 4), (0, 0.0)]
    ):
        for _ in range(50):  # steps of five tokens, 250 together
            metrics.observe(step([number] * 5, ["base"] * accepted, draft_depth=4))
        assert metrics.snapshot().acceptance_rate_now == pytest.approx(rate)
    assert metrics.snapshot().acceptance_rate == pytest.approx(1 / 3)


def test_speed_now_and_average_and_prefill_time() -> None:
    clock = Clock()
    metrics = RunMetrics(clock)
    clock.now_s += 7
    metrics.start()  # loading took 7 s and does not count
    clock.now_s += 3 + 0.875  # prefill, then the first step (draft + verify + sample = 0.875 s)
    metrics.observe(step([1]))
    first = metrics.snapshot()
    assert first.prefill_s == pytest.approx(3)
    assert first.decode_s == pytest.approx(0.875)
    for _ in range(9):  # ten slow tokens in all, one a second
        clock.now_s += 1
        metrics.observe(step([1]))
    for _ in range(5):  # then ten a second
        clock.now_s += 1
        metrics.observe(step(range(10)))
    last = metrics.snapshot()
    assert last.tokens_per_s == pytest.approx(60 / 14.875)
    assert last.tokens_per_s_now == pytest.approx(10)
    assert last.other_s == pytest.approx(14.875 - 15 * 0.875)


def test_nothing_observed_yet() -> None:
    snapshot = RunMetrics(Clock()).snapshot()
    assert snapshot.num_tokens == 0
    assert snapshot.acceptance_rate is snapshot.tokens_per_step is snapshot.tokens_per_s is None
    assert snapshot.tokens_per_s_now is None
    assert snapshot.decode_s == 0
    assert snapshot.distinct == (1, 1, 1, 1)


def test_plain_decoding_has_no_acceptance_rate() -> None:
    metrics = RunMetrics()
    metrics.observe(step([1], stop_reason="length"))
    assert metrics.snapshot().acceptance_rate is None
    assert metrics.snapshot().stop_reason == "length"


def test_the_window_of_the_speed_stays_small() -> None:
    clock = Clock()
    metrics = RunMetrics(clock)
    for _ in range(5000):
        clock.now_s += 0.01
        metrics.observe(step([1]))
    assert len(metrics._window) < 510
    assert metrics.snapshot().tokens_per_s_now == pytest.approx(100)


def test_json_is_one_plain_line() -> None:
    metrics = RunMetrics()
    metrics.observe(step([1, 2], ["base"], draft_depth=3))
    data = json.loads(json.dumps(metrics.snapshot().to_json()))
    assert data["acceptance_rate"] == 0.333333
    assert data["distinct"] == [1.0, 1.0, 1.0, 1.0]
    assert data["wins"] == {"base": 1}


def test_distinct_by_hand() -> None:
    distinct = DistinctN()
    distinct.update([1, 2, 1, 2, 1, 3])
    # 1-grams {1,2,3} of 6; 2-grams {12,21,13} of 5; 3-grams {121,212,213} of 4; 4-grams all of 3.
    assert distinct.values == (3 / 6, 3 / 5, 3 / 4, 3 / 3)


def test_distinct_equals_sets_of_tuples_and_does_not_depend_on_the_blocks() -> None:
    rng = random.Random(0)
    token_ids = [rng.choice([0, 1, 2, 128_000, 2**32 - 1]) for _ in range(3000)]
    expected = tuple(
        len({tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)}) / (len(token_ids) - n + 1)
        for n in range(1, 5)
    )
    distinct = DistinctN()
    while token_ids:
        size = rng.randrange(1, 7)
        distinct.update(token_ids[:size])
        del token_ids[:size]
    assert distinct.values == expected


def test_distinct_keeps_at_most_24_bytes_for_a_unique_ngram() -> None:
    distinct = DistinctN()
    distinct.update(range(50_000))
    assert distinct.values == (1, 1, 1, 1)
    assert num_bytes_of(distinct) / (4 * 50_000) <= 24


def num_bytes_of(distinct: DistinctN) -> int:
    return sum(table.itemsize * len(table) for seen in distinct._seen for table in seen._tables)


def test_distinct_is_exact_up_to_200_000_tokens() -> None:
    distinct = DistinctN()
    distinct.update(range(190_000))
    distinct.update([7] * 10_000)
    assert distinct.values == (190_000 / 200_000, *(190_001 / (200_000 - n) for n in (1, 2, 3)))


def test_distinct_stays_close_in_four_mebibytes_for_each_n(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "swiftgen.figures.distinct._PART_KEYS", 64
    )  # of 1,024: as if 800,000 tokens were 12,800,000
    rng = random.Random(1)
    token_ids = [rng.randrange(400) for _ in range(150_000)]
    distinct = DistinctN()
    distinct.update(token_ids)
    for n, value in enumerate(distinct.values, start=1):
        grams = list(zip(*(token_ids[i:] for i in range(n)), strict=False))
        assert value == pytest.approx(len(set(grams)) / len(grams), rel=0.03)  # three standard errors
        assert value <= 1
    assert num_bytes_of(distinct) <= 4 * 2**22 * 64 / 1024
