"""What passes and levels take, and what is taken of those that were not made yet."""

from __future__ import annotations

import pytest

from swiftgen.decoding.costs import Costs, hopeful

SIZES = (1, 2, 4, 8)
BEFORE = {"1": 1.0, "2": 1.0, "4": 1.5, "8": 3.0}


def all_of(costs: Costs) -> list[float]:
    return [costs.seconds(size) for size in SIZES]


class TestPasses:
    def test_before_anything_was_measured_every_size_costs_the_same(self):
        assert all_of(Costs(SIZES, {})) == [1.0] * 4

    def test_the_shorter_of_the_first_two_counts_and_later_ones_move_it(self):
        costs = Costs(SIZES, {})
        for seconds in (9.0, 0.5):
            costs.observe(4, seconds)
        assert costs.seconds(4) == 0.5
        costs.observe(4, 0.3)
        assert costs.seconds(4) == pytest.approx(0.48)  # a tenth of the way
        for _ in range(200):
            costs.observe(4, 0.3)
        assert costs.seconds(4) == pytest.approx(0.3)

    def test_an_untried_size_costs_what_the_next_smaller_one_does(self):
        costs = Costs(SIZES, {})
        costs.observe(2, 0.2)
        costs.observe(8, 0.9)
        assert (costs.seconds(4), costs.seconds(1)) == (0.2, 0.2)

    def test_what_was_measured_before_says_how_much_more_an_untried_size_costs(self):
        costs = Costs(SIZES, BEFORE)
        assert all_of(costs) == [1.0, 1.0, 1.5, 3.0]
        costs.observe(2, 0.2)  # this run is five times faster
        assert all_of(costs) == pytest.approx([0.2, 0.2, 0.3, 0.6])
        costs.observe(4, 0.4)
        assert all_of(costs) == pytest.approx([0.2, 0.2, 0.4, 0.8])

    def test_no_size_seems_dearer_than_a_larger_one(self):
        assert all_of(Costs(SIZES, {"1": 1.0, "2": 1.8, "4": 1.4, "8": 2.0})) == [1.0, 1.4, 1.4, 2.0]
        costs = Costs(SIZES, BEFORE)
        costs.observe(2, 2.0)
        costs.observe(8, 1.5)
        assert all_of(costs) == [1.5] * 4

    def test_the_pass_that_holds_the_rows_counts(self):
        costs = Costs(SIZES, BEFORE)
        costs.observe(3, 0.5)
        costs.observe(99, 0.9)
        assert (costs.seconds(4), costs.seconds(8)) == (0.5, 0.9)

    def test_an_unused_size_falls_to_what_the_measurement_before_makes_of_the_smaller_one(self):
        costs = Costs(SIZES, {"1": 1.0, "2": 1.0, "4": 2.0, "8": 2.0})
        costs.observe(4, 9.0)
        for _ in range(10_000):
            costs.observe(2, 1.0)
        assert costs.seconds(4) == pytest.approx(2.0, rel=0.01)

    def test_an_outlier_counts_as_twice_the_usual_time(self):
        costs = Costs(SIZES, {})
        for seconds in (0.5, 0.5, 0.5, 600.0):
            costs.observe(4, seconds)
        assert costs.seconds(4) == pytest.approx(0.55)  # a tenth of the way to 1.0
        for _ in range(100):
            costs.observe(4, 600.0)
        assert costs.seconds(4) > 300  # if it stays like this it is no outlier

    def test_a_row_more_costs_its_share_of_the_next_size(self):
        costs = Costs((2, 4, 8), {"2": 1.0, "4": 1.5, "8": 3.5})
        rows = [costs.row_seconds(num_rows) for num_rows in (1, 2, 3, 4, 7, 8, 20)]
        assert rows == pytest.approx([0.0, 0.25, 0.25, 0.5, 0.5, 0.5, 0.5])
        assert Costs((8,), {}).row_seconds(3) == 0.0

    def test_few_measurements_are_taken_to_exaggerate(self):
        assert hopeful({"1": 1.0, "2": 1.5, "4": 3.0}) == {"1": 1.0, "2": 1.25, "4": 2.0}
        assert hopeful({}) == {}


class TestLevels:
    def test_an_unknown_level_is_a_share_of_the_smallest_pass(self):
        costs = Costs(SIZES, BEFORE)
        costs.observe(1, 0.5)
        assert costs.level_seconds("base", 0.6) == pytest.approx(0.3)

    def test_one_known_before_costs_what_it_did_by_the_speed_of_the_machine(self):
        costs = Costs(SIZES, {**BEFORE, "base": 0.2})
        assert costs.level_seconds("base", 0.6) == 0.2
        costs.observe(1, 3.0)
        assert costs.level_seconds("base", 0.6) == pytest.approx(0.6)

    def test_it_is_learnt_from_the_second_on_and_never_dearer_before(self):
        costs = Costs(SIZES, BEFORE)
        for seconds, expected in ((5.0, 0.6), (2.0, 2.0), (2.5, 2.05)):
            costs.observe_level("base", seconds)
            assert costs.level_seconds("base", 0.6) == pytest.approx(expected)

    def test_a_dear_one_that_is_not_used_becomes_cheaper(self):
        costs = Costs(SIZES, BEFORE)
        for _ in range(3):
            costs.observe_level("base", 5.0)
        seen = []
        for _ in range(3000):
            costs.forget_level("base", 0.6)
            seen.append(costs.level_seconds("base", 0.6))
        assert seen[0] == pytest.approx(5.0 - 0.002 * 4.4)
        assert seen[-1] == pytest.approx(0.6, abs=0.02)


def test_what_is_known_makes_the_same_costs():
    costs = Costs(SIZES, {**BEFORE, "heads": 0.1})
    assert costs.known() == {"heads": 0.1}  # nothing of the passes was measured
    costs.observe(1, 0.5)
    costs.observe_level("base", 0.3)
    again = Costs(SIZES, costs.known())
    assert all_of(again) == all_of(costs)
    levels = [again.level_seconds("base", 9.0), again.level_seconds("heads", 9.0)]
    assert levels == pytest.approx([0.3, 0.05])  # the machine is twice as fast as it was
