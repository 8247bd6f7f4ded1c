"""What a level promises, what time is worth, and what outlives a run."""

from __future__ import annotations

import pytest

from swiftgen.decoding.estimates import Estimates, Known, Level, Prior
from swiftgen.forward.tree import DraftTree

SIZES = (1, 2, 4)
PRIOR = Prior(share=0.25, hit=0.8, best_hit=0.95)


def estimates_of(known: Known | None = None, pass_seconds: tuple[float, ...] = (1.0, 1.2, 1.6)) -> Estimates:
    """Passes are hoped to take 1.0, 1.1 and 1.3 s."""
    return Estimates(SIZES, pass_seconds, known)


def plain_steps(estimates: Estimates, number: int, seconds: float = 1.0) -> None:
    for _ in range(number):
        estimates.end(num_tokens=1, num_rows=1, draft_s=0.0, seconds=seconds)


class TestPrice:
    def test_time_is_worth_at_least_what_plain_decoding_writes_in_it(self):
        estimates = estimates_of()
        assert estimates.tokens_per_s == 1.0
        plain_steps(estimates, 20, 0.5)
        assert estimates.tokens_per_s == pytest.approx(2.0)
        for _ in range(20):
            estimates.end(num_tokens=1, num_rows=2, draft_s=4.0, seconds=5.0)
        assert estimates.tokens_per_s == pytest.approx(2.0)

    def test_it_follows_the_speed_of_late(self):
        estimates = estimates_of()
        plain_steps(estimates, 100)
        for _ in range(300):
            estimates.end(num_tokens=3, num_rows=3, draft_s=0.2, seconds=1.5)
        assert estimates.tokens_per_s == pytest.approx(2.0, rel=0.02)

    def test_a_step_in_which_the_machine_slept_is_worth_four(self):
        estimates = estimates_of()
        plain_steps(estimates, 100)
        for _ in range(100):
            estimates.end(num_tokens=2, num_rows=2, draft_s=0.0, seconds=1.0)
        before = estimates.tokens_per_s
        estimates.end(num_tokens=2, num_rows=2, draft_s=600.0, seconds=601.0)
        assert estimates.tokens_per_s > 0.93 * before


class TestLevel:
    def level(self) -> tuple[Estimates, Level]:
        """A level costs 0.25 s, the second row 0.1 s, the third and fourth 0.1 s each."""
        estimates = estimates_of()
        return estimates, estimates.level("base", PRIOR)

    def test_a_promise_is_what_levels_add_less_their_price(self):
        _, level = self.level()
        assert [level.price(1), level.price(3)] == pytest.approx([0.35] * 2)
        surpluses = [0.8**depth - 0.35 for depth in range(1, 5)]
        assert level.promise(1) == pytest.approx(surpluses[0])
        assert level.promise(4) == pytest.approx(sum(surpluses))
        level.hit = 0.5
        assert level.promise(16) == pytest.approx(0.15)  # the second level would lose
        level.hit = 0.3
        assert level.promise(16) == 0.0

    def test_a_level_is_worth_what_its_parents_promise_times_the_hit_rate(self):
        _, level = self.level()
        assert level.is_worth(0.36 / 0.8, 1)
        assert not level.is_worth(0.34 / 0.8, 1)

    def test_what_others_of_a_level_add_is_less_the_price_of_their_rows(self):
        _, level = self.level()
        assert level.gain([0.5, 0.3, 0.05], 1) == pytest.approx(0.1 + 0.4 + 0.2)
        assert level.gain([0.5], 1) == pytest.approx(0.5)
        assert level.gain([1.0, 1.0], 1) == 1.0

    def test_the_chance_of_a_node_is_the_estimate(self):
        estimates, level = self.level()
        tree = DraftTree(0, max_depth=3)
        node = tree.add(0, 1, "base", 0.5)
        assert node is not None
        assert level.chance(tree, node) == 0.5
        estimates.acceptance.observe(tree, [1])
        assert level.chance(tree, node) > 0.5

    def test_hits_are_learnt_and_time_but_for_the_first_after_a_pause(self):
        estimates, level = self.level()
        for _ in range(200):
            level.observe(0.1, 0.6)
        assert level.hit == pytest.approx(0.6, abs=0.01)
        assert estimates.costs.level_seconds("base", PRIOR.share) == pytest.approx(0.1)
        for _ in range(2):
            level.end_step()
        level.observe(9.0, 0.6)
        assert estimates.costs.level_seconds("base", PRIOR.share) == pytest.approx(0.1)

    def test_without_being_asked_it_hopes_for_the_best(self):
        _, level = self.level()
        level.hit = 0.2
        for _ in range(5000):
            level.end_step()
        assert 0.85 < level.hit < 0.95

    def test_those_of_a_source_are_one(self):
        estimates, level = self.level()
        assert estimates.level("base", PRIOR) is level


class TestContexts:
    def test_costs_are_learnt_by_the_order_of_the_length(self):
        estimates = estimates_of()
        for context_tokens, seconds in ((100, 1.0), (1000, 3.0)):
            estimates.begin(context_tokens)
            plain_steps(estimates, 5, seconds)
        assert estimates.costs.seconds(1) == 3.0
        estimates.begin(128)
        assert estimates.costs.seconds(1) == 1.0
        estimates.begin(129)
        assert estimates.costs.seconds(1) == 1.0  # not known, so that of the shorter context

    def test_what_levels_cost_with_another_context_is_not_taken_for_known(self):
        known = Known(costs={13: {"1": 4.0, "2": 4.0, "4": 5.0, "base": 2.0}})
        shorter, longer = estimates_of(known), estimates_of(known)
        shorter.begin(100)
        longer.begin(20_000)
        assert (shorter.costs.seconds(1), longer.costs.seconds(1)) == (4.0, 4.0)
        assert shorter.costs.level_seconds("base", 0.1) == pytest.approx(0.4)
        assert longer.costs.level_seconds("base", 0.1) == pytest.approx(0.4)


def test_a_run_begins_with_what_the_one_before_knew():
    first = estimates_of()
    level = first.level("base", PRIOR)
    first.begin(100)
    plain_steps(first, 5, 0.5)
    for _ in range(5):
        level.observe(0.1, 0.3)
    tree = DraftTree(0, max_depth=3)
    tree.add(0, 1, "base", 0.5)
    first.acceptance.observe(tree, [2])

    second = estimates_of(first.known())
    second.begin(90)
    assert second.costs.seconds(1) == 0.5
    assert second.costs.level_seconds("base", PRIOR.share) == pytest.approx(0.1)
    assert second.level("base", PRIOR).hit == (level.hit + PRIOR.hit) / 2  # this text may be another
    assert second.acceptance.chance("base", 1, 0.5) == first.acceptance.chance("base", 1, 0.5)


def test_what_a_run_had_no_use_for_is_kept():
    known = Known({9: {"1": 0.5}}, {("heads", 1, 0): 0.4}, {"heads": 0.3})
    assert estimates_of(known).known() == known
