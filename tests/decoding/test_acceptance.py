"""How likely drafts are: what is learnt of them, and from what."""

from __future__ import annotations

import random

import pytest

from swiftgen.decoding.acceptance import AcceptanceEstimates, calibrated
from swiftgen.forward.tree import DraftTree

FIRST = 1 / 5  # of the way that the first outcome moves an estimate


def tree_of(*drafts: tuple[int, str, float]) -> DraftTree:
    """A root with children: token, source, chance."""
    tree = DraftTree(0, max_depth=9)
    for token, source, chance in drafts:
        tree.add(0, token, source, chance)
    return tree


class TestAcceptanceEstimates:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
    def test_estimates_move_to_the_observed_rate(self, rate: float):
        estimates, rng = AcceptanceEstimates(), random.Random(0)
        for _ in range(2000):
            estimates.observe(tree_of((1, "base", 0.4)), [1 if rng.random() < rate else 2])
        assert estimates.chance("base", 1, 0.4) == pytest.approx(rate, abs=0.15)

    def test_an_estimate_begins_with_what_the_drafter_thinks(self):
        for drafted in (0.01, 0.3, 0.999):
            assert AcceptanceEstimates().chance("heads", 2, drafted) == drafted

    def test_a_hit_raises_the_estimate_and_a_miss_lowers_it(self):
        estimates = AcceptanceEstimates()
        estimates.observe(tree_of((1, "base", 0.5), (2, "base", 0.25)), [2])
        assert estimates.chance("base", 1, 0.5) == pytest.approx(0.5 - FIRST * 0.5)
        assert estimates.chance("base", 1, 0.25) == pytest.approx(0.25 + FIRST * 0.75)

    def test_the_first_outcomes_move_it_more_than_later_ones(self):
        estimates, moved = AcceptanceEstimates(), []
        for _ in range(60):
            before = estimates.chance("base", 1, 0.5)
            estimates.observe(tree_of((1, "base", 0.5)), [2])
            moved.append((before - estimates.chance("base", 1, 0.5)) / before)
        assert moved[:3] == pytest.approx([1 / 5, 1 / 6, 1 / 7])
        assert moved[-1] == pytest.approx(0.03)

    def test_a_deeper_estimate_begins_with_that_of_the_depth_above(self):
        estimates = AcceptanceEstimates()
        estimates.observe(tree_of((1, "base", 0.5)), [1])
        known = estimates.chance("base", 1, 0.5)
        assert known > 0.5
        assert [estimates.chance("base", depth, 0.5) for depth in (2, 3, 9)] == [known] * 3
        chain = DraftTree(0, max_depth=9)
        chain.add_path(0, [1, 2], "base", 0.5)
        estimates.observe(chain, [1, 3])
        assert estimates.chance("base", 2, 0.5) < known < estimates.chance("base", 1, 0.5)

    def test_sources_and_chances_are_learnt_apart(self):
        estimates = AcceptanceEstimates()
        keys = [(s, 1, c) for s in ("base", "heads", "ngram") for c in (0.2, 0.5, 0.8)]
        before = {key: estimates.chance(*key) for key in keys}
        estimates.observe(tree_of((1, "heads", 0.8)), [1])
        assert [key for key in keys if estimates.chance(*key) != before[key]] == [("heads", 1, 0.8)]

    @pytest.mark.parametrize(
        ("seen", "alike", "apart"),
        [
            (0.5, (0.42, 0.58), (0.41, 0.59)),  # odds of 1, up to a factor of sqrt(2)
            (2 / 3, (0.59, 0.73), (0.58, 0.74)),  # odds of 2
            (1 / 3, (0.27, 0.41), (0.26, 0.42)),
            (0.99, (0.98, 0.999, 1.0), (0.97,)),  # above 2^5.5 : 1 nothing is told apart
            (0.01, (0.02, 0.001, 0.0), (0.03,)),
        ],
    )
    def test_drafts_of_similar_odds_share_an_estimate(
        self, seen: float, alike: tuple[float, ...], apart: tuple[float, ...]
    ):
        estimates = AcceptanceEstimates()
        estimates.observe(tree_of((1, "heads", seen)), [2])
        for drafted in (seen, *alike):
            assert estimates.chance("heads", 1, drafted) == pytest.approx(seen - FIRST * seen)
        for drafted in apart:
            assert estimates.chance("heads", 1, drafted) == drafted

    def test_drafts_below_a_wrong_one_teach_nothing(self):
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add_path(0, [1, 2], "base")
        estimates.observe(tree, [5, 2])
        assert {depth for _, depth, _ in estimates.known} == {1}

    def test_the_chance_of_a_node_is_that_of_its_whole_path(self):
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add(0, 1, "base", 0.5)
        tree.add(1, 2, "heads", 0.2)
        tree.add(0, 3, "ngram", 0.1)
        assert estimates.chances(tree) == pytest.approx([1.0, 0.5, 0.1, 0.1])

    def test_what_was_known_before_comes_first(self):
        estimates = AcceptanceEstimates({("base", 1, 0): 0.9})
        assert estimates.chance("base", 1, 0.5) == 0.9


def test_a_share_becomes_a_chance():
    assert calibrated(0.5, 0.0) == 0.5
    assert calibrated(0.9, 0.0) == pytest.approx(1 / (1 + 9**-0.4))
    assert calibrated(0.5, 1.4) == pytest.approx(0.802, abs=1e-3)
    assert 0 < calibrated(0.0, -1.5) < calibrated(1.0, -1.5) < 1
