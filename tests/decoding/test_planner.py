"""The planner: what it learns, which tree it keeps, and how often it tries a way that does not pay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from swiftgen.decoding.drafters.base import Pace
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import (
    FIRST_PROBE,
    LAST_PROBE,
    PROBE_STEPS,
    AcceptanceEstimates,
    PassCosts,
    Planner,
)
from swiftgen.decoding.stopwatch import Stopwatch
from swiftgen.forward.tree import DraftTree

SIZES = (1, 2, 4, 8)


class Clock:
    """Stands still until it is set forward."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stopwatch = Stopwatch(lambda: self.now_s)


CLOCK = Clock()
"""Of `planner` and `teach`."""


class ScriptedDrafter:
    """Stands for any drafter: adds the same paths every step, each half as likely as the one before."""

    def __init__(self, paths: Sequence[Sequence[int]], source: str) -> None:
        self.paths, self.source = paths, source
        self.num_proposed = 0
        self.num_observed = 0

    num_passes = 0

    def propose(self, tree: DraftTree, history: History) -> None:
        self.num_proposed += 1
        add_paths(tree, self.paths, self.source)

    def observe(self, committed: object) -> None:
        self.num_observed += 1


def add_paths(tree: DraftTree, paths: Sequence[Sequence[int]], source: str) -> None:
    for rank, path in enumerate(paths):
        tree.add_path(0, path, source, 0.5 / 2**rank)


def planner(
    base: Sequence[Sequence[int]] | None = None,
    ngram: Sequence[Sequence[int]] | None = None,
    measured: bool = True,
) -> Planner:
    """One way to draft: with these paths of one drafter or two."""
    way = [
        ScriptedDrafter(paths, source)
        for paths, source in ((base, "base"), (ngram, "ngram"))
        if paths is not None
    ]
    return Planner([way], SIZES, measured, stopwatch=CLOCK.stopwatch)


def draft(plan: Planner) -> DraftTree:
    return plan.draft(DraftTree(0, max_depth=9), History(1))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[step] for step in tree.path(node)[1:]) for node in range(len(tree))}


def flat_tree(num_nodes: int, source: str = "ngram") -> DraftTree:
    """A root with `num_nodes - 1` children."""
    tree = DraftTree(0, max_depth=9)
    for token in range(1, num_nodes):
        tree.add(0, token, source, 0.5 / 2 ** (token - 1))
    return tree


def teach(plan: Planner, tree: DraftTree, path: Sequence[int], seconds: float) -> None:
    """Let the planner see a step that verified this tree and took so long."""
    draft(plan)
    CLOCK.now_s += seconds
    plan.observe(tree, path, None)  # type: ignore[arg-type]


def teach_costs(plan: Planner, seconds: dict[int, float]) -> None:
    """Let the planner see one step of each pass size in which every draft was wrong."""
    for size, cost in seconds.items():
        teach(plan, flat_tree(size), [0], cost)


class TestAcceptanceEstimates:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
    def test_estimates_move_to_the_observed_rate(self, rate: float):
        estimates, rng = AcceptanceEstimates(), random.Random(0)
        tree = DraftTree(0, max_depth=9)
        tree.add(0, 1, "base", 0.4)
        for _ in range(2000):
            estimates.observe(tree, [0, 1] if rng.random() < rate else [0])
        assert estimates.chance("base", 1, 0.4) == pytest.approx(rate, abs=0.15)

    def test_an_estimate_begins_with_what_the_drafter_thinks(self):
        for drafted in (0.01, 0.3, 0.999):
            assert AcceptanceEstimates().chance("heads", 2, drafted) == drafted

    def test_a_hit_raises_the_estimate_and_a_miss_lowers_it(self):
        estimates, tree = AcceptanceEstimates(), flat_tree(3, "base")
        estimates.observe(tree, [0, 2])
        # 0.03 of the way from 0.5 to 0, and from 0.25 to 1
        assert estimates.chance("base", 1, 0.5) == pytest.approx(0.485)
        assert estimates.chance("base", 1, 0.25) == pytest.approx(0.2725)

    def test_sources_depths_and_chances_are_learnt_apart(self):
        estimates = AcceptanceEstimates()
        keys = [(s, d, c) for s in ("base", "heads", "ngram") for d in (1, 2) for c in (0.2, 0.5, 0.8)]
        before = {key: estimates.chance(*key) for key in keys}
        tree = DraftTree(0, max_depth=9)
        tree.add(0, 1, "heads", 0.8)
        estimates.observe(tree, [0, 1])
        changed = [key for key in keys if estimates.chance(*key) != before[key]]
        assert changed == [("heads", 1, 0.8)]

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
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add(0, 1, "heads", seen)
        estimates.observe(tree, [0])
        for drafted in (seen, *alike):
            assert estimates.chance("heads", 1, drafted) == pytest.approx(seen - 0.03 * seen)
        for drafted in apart:
            assert estimates.chance("heads", 1, drafted) == drafted

    def test_drafts_below_a_wrong_one_teach_nothing(self):
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add_path(0, [1, 2], "base")
        before = estimates.chance("base", 2, 0.5)
        estimates.observe(tree, [0])
        assert estimates.chance("base", 2, 0.5) == before

    def test_a_node_is_as_likely_as_all_of_its_path(self):
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add_path(0, [1, 2], "base", 0.6)
        tree.add(1, 3, "ngram", 0.1)
        assert estimates.chances(tree) == pytest.approx([1, 0.6, 0.36, 0.06])
        estimates.observe(tree, [0, 1, 3])
        first, second, third = 0.6 + 0.03 * 0.4, 0.6 - 0.03 * 0.6, 0.1 + 0.03 * 0.9
        assert estimates.chances(tree) == pytest.approx([1, first, first * second, first * third])


class TestPassCosts:
    def test_before_anything_was_measured_every_size_costs_the_same(self):
        assert [PassCosts(SIZES).seconds(size) for size in SIZES] == [1.0] * 4

    def test_the_first_measurement_is_taken_as_it_is_and_later_ones_move_it(self):
        costs = PassCosts(SIZES)
        costs.observe(4, 0.5)
        assert costs.seconds(4) == 0.5
        costs.observe(4, 0.3)
        assert costs.seconds(4) == pytest.approx(0.48)  # a tenth of the way
        for _ in range(200):
            costs.observe(4, 0.3)
        assert costs.seconds(4) == pytest.approx(0.3)

    def test_an_untried_size_costs_what_the_next_smaller_one_does(self):
        costs = PassCosts(SIZES)
        costs.observe(2, 0.2)
        costs.observe(8, 0.9)
        assert (costs.seconds(4), costs.seconds(1)) == (0.2, 0.2)

    def test_what_was_measured_before_says_how_much_more_an_untried_size_costs(self):
        costs = PassCosts(SIZES, before=[1.0, 1.0, 1.5, 3.0])
        assert [costs.seconds(size) for size in SIZES] == [1.0, 1.0, 1.5, 3.0]
        costs.observe(2, 0.2)  # this run is five times faster
        assert [costs.seconds(size) for size in SIZES] == pytest.approx([0.2, 0.2, 0.3, 0.6])
        costs.observe(4, 0.4)
        assert [costs.seconds(size) for size in SIZES] == pytest.approx([0.2, 0.2, 0.4, 0.8])

    def test_an_unused_size_falls_to_what_the_measurement_before_makes_of_the_smaller_one(self):
        costs = PassCosts(SIZES, before=[1.0, 1.0, 2.0, 2.0])
        costs.observe(4, 9.0)
        for _ in range(10_000):
            costs.observe(2, 1.0)
        assert costs.seconds(4) == pytest.approx(2.0, rel=0.01)

    def test_an_outlier_counts_as_twice_the_usual_time(self):
        costs = PassCosts(SIZES)
        costs.observe(4, 0.5)
        costs.observe(4, 600.0)
        assert costs.seconds(4) == pytest.approx(0.55)  # a tenth of the way to 1.0
        for _ in range(100):
            costs.observe(4, 600.0)
        assert costs.seconds(4) > 300  # if it stays like this it is no outlier

    def test_the_cost_of_a_size_that_is_not_used_falls_towards_that_of_the_next_smaller_one(self):
        costs = PassCosts(SIZES)
        costs.observe(8, 5.0)
        costs.observe(1, 1.0)  # from here on 8 is not used
        assert costs.seconds(8) == 5.0  # there was no smaller one to compare with
        seen = []
        for _ in range(3):
            costs.observe(1, 1.0)
            seen.append(costs.seconds(8))
        # each step by 0.002 of what it costs more than the next smaller known size
        assert seen == pytest.approx([1 + 4 * 0.998, 1 + 4 * 0.998**2, 1 + 4 * 0.998**3])
        assert costs.seconds(1) == 1.0
        for _ in range(5000):
            costs.observe(1, 1.0)
        assert costs.seconds(8) == pytest.approx(1.0, abs=0.01)

    def test_a_size_that_is_cheaper_than_the_next_smaller_one_stays_so(self):
        costs = PassCosts(SIZES)
        costs.observe(4, 0.5)
        costs.observe(2, 0.8)
        for _ in range(50):
            costs.observe(2, 0.8)
        assert costs.seconds(4) == 0.5

    def test_the_size_in_use_is_not_forgotten(self):
        costs = PassCosts(SIZES)
        costs.observe(1, 1.0)
        for _ in range(500):
            costs.observe(8, 3.0)
        assert costs.seconds(8) == pytest.approx(3.0)
        assert costs.seconds(1) == 1.0


class TestBestSubtree:
    def test_without_drafters_every_step_is_plain_AR(self):
        tree = draft(planner())
        assert tree.tokens == [0]

    def test_the_paper_verifies_all_that_was_drafted(self):
        plan = planner(base=[[1, 2, 3]], ngram=[[1, 2], [4, 5, 6]], measured=False)
        teach_costs(plan, {1: 1.0, 2: 50.0, 4: 100.0, 8: 900.0})
        assert len(draft(plan)) == 7

    def test_the_bare_root_is_verified_where_drafts_cost_more_than_they_bring(self):
        plan = planner(ngram=[[1, 2, 3], [4]])
        teach_costs(plan, {1: 1.0, 2: 3.0, 4: 5.0, 8: 9.0})
        assert draft(plan).tokens == [0]

    def test_all_is_verified_where_rows_are_free(self):
        plan = planner(ngram=[[1, 2, 3], [4, 5, 6], [7]])
        teach_costs(plan, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
        assert len(draft(plan)) == 8

    def test_never_more_than_the_largest_pass_is_verified(self):
        plan = planner(ngram=[[i, i, i] for i in range(1, 9)])
        assert len(draft(plan)) <= 8
        teach_costs(plan, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
        assert len(draft(plan)) == 8

    def test_the_likeliest_drafts_are_kept(self):
        # After a thousand hits of the first chain and misses of the second, the first is all but certain.
        plan = planner(ngram=[[1, 2, 3], [4, 5, 6]])
        full = DraftTree(0, max_depth=9)
        add_paths(full, [[1, 2, 3], [4, 5, 6]], "ngram")
        for _ in range(1000):
            teach(plan, full, [0, 1, 2, 3], 1.2)
        teach_costs(plan, {1: 1.0, 2: 1.1, 4: 1.2})
        # 1 row: 1 token in 1.0 s; 2 rows: 2 in 1.1 s; 4 rows: 4 in 1.2 s; 8 rows bring no more
        teach(plan, flat_tree(8), [0], 2.0)
        assert paths_of(draft(plan)) == {(), (1,), (1, 2), (1, 2, 3)}

    @pytest.mark.parametrize("seed", range(12))
    def test_no_subtree_promises_more_tokens_per_second(self, seed: int):
        rng = random.Random(seed)
        paths = [[rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))] for _ in range(4)]
        costs = dict(zip(SIZES, sorted(rng.uniform(1, 2) for _ in SIZES), strict=True))
        plan, estimates, known = planner(ngram=paths), AcceptanceEstimates(), PassCosts(SIZES)
        teach_costs(plan, costs)
        for size in costs:
            estimates.observe(flat_tree(size), [0])
            known.observe(size, costs[size])
        for _ in range(300):  # some paths and depths turn out well
            seen = DraftTree(0, max_depth=9)
            add_paths(seen, paths, "ngram")
            path = seen.walk([rng.choice([1, 2, 3]) for _ in range(len(seen))])
            size = next((s for s in SIZES if s >= len(seen)), 8)  # a larger tree counts for the largest pass
            teach(plan, seen, path, costs[size])
            estimates.observe(seen, path)
            known.observe(size, costs[size])

        full = DraftTree(0, max_depth=9)
        add_paths(full, paths, "ngram")
        chances = estimates.chances(full)

        def rate(nodes: Sequence[int]) -> float:
            size = next(s for s in SIZES if s >= len(nodes))
            return sum(chances[node] for node in nodes) / known.seconds(size)

        closed = [
            (0, *nodes)
            for count in range(min(len(full), 8))
            for nodes in itertools.combinations(range(1, len(full)), count)
            if all(full.parents[node] in (0, *nodes) for node in nodes)
        ]
        kept = [next(n for n in range(len(full)) if path_of(full, n) == p) for p in paths_of(draft(plan))]
        assert all(full.parents[node] in kept for node in kept if node)
        assert rate(kept) == pytest.approx(max(map(rate, closed)), rel=1e-6)


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[step] for step in tree.path(node)[1:])


class Machine:
    """Decodes with a planner by a clock of its own: only drafting and verifying take time.

    Every draft is right. A verify pass takes a second, whatever its size.

    Args:
        takes_s: Seconds that each drafter takes; several may stand in one way and one in several ways.
    """

    def __init__(
        self,
        ways: Sequence[Sequence[str]],
        takes_s: dict[str, float],
        measured: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self.clock, self.takes_s = Clock(), takes_s
        self.drafters = {name: ScriptedDrafter([[1]], name) for name in takes_s}
        drafters = [[self.drafters[name] for name in way] for way in ways]
        self.plan = Planner(drafters, SIZES, measured, pace=pace, stopwatch=self.clock.stopwatch)
        self.ways: list[str] = []
        """The way of each step: the names of the drafters that were asked."""

    def decode(self, num_steps: int) -> list[str]:
        """The ways of some more steps."""
        for _ in range(num_steps):
            before = {name: drafter.num_proposed for name, drafter in self.drafters.items()}
            tree = self._draft(before)
            path = tree.walk([1] * len(tree))
            self.clock.now_s += 1.0
            self.plan.observe(tree, path, None)  # type: ignore[arg-type]
        return self.ways[-num_steps:]

    def _draft(self, before: dict[str, int]) -> DraftTree:
        machine = self

        class Ticking(DraftTree):
            """Time passes when a drafter adds to the tree."""

            def add_path(self, parent, tokens, source, chance=0.5) -> None:  # type: ignore[no-untyped-def]
                machine.clock.now_s += machine.takes_s[source]
                super().add_path(parent, tokens, source, chance)

        tree = self.plan.draft(Ticking(0, max_depth=9), History(1))
        asked = [name for name, drafter in self.drafters.items() if drafter.num_proposed > before[name]]
        self.ways.append("+".join(asked))
        return tree


def runs_of(ways: Sequence[str]) -> list[tuple[str, int]]:
    """Consecutive steps of one way, with their number."""
    return [(way, len(list(steps))) for way, steps in itertools.groupby(ways)]


class TestWays:
    """Two tokens a step are slower than plain AR if drafting takes 9 s, and faster if it takes 0.1 s."""

    def machine(self, takes_s: float, measured: bool = True) -> Machine:
        return Machine([["base"], []], {"base": takes_s}, measured)

    def test_every_way_is_tried_before_one_is_chosen_the_simplest_first(self):
        takes_s = {"heads": 0.1, "base": 0.5, "ngram": 0.0}
        machine = Machine([["heads", "ngram"], ["base", "ngram"], ["ngram"]], takes_s)
        ways = machine.decode(40)
        assert runs_of(ways[:24]) == [("ngram", 8), ("heads+ngram", 8), ("base+ngram", 8)]
        assert runs_of(ways[24:]) == [("ngram", 16)]

    def test_of_equally_fast_ways_the_simplest_is_taken(self):
        machine = Machine([["base", "ngram"], ["ngram"]], {"base": 0.0, "ngram": 0.0})
        assert runs_of(machine.decode(40)) == [("ngram", 8), ("base+ngram", 8), ("ngram", 24)]

    def test_one_that_does_not_pay_is_tried_at_a_bounded_rate(self):
        machine = self.machine(takes_s=9.0)
        # the text may change, but looking is cheap
        assert 5 <= machine.decode(1000).count("base") <= 60

    def test_one_that_pays_is_made_nearly_every_step(self):
        machine = self.machine(takes_s=0.1)
        assert 940 <= machine.decode(1000).count("base") < 1000  # the other way is looked at too

    def test_one_that_stops_paying_is_given_up_and_found_again_when_it_pays(self):
        machine = self.machine(takes_s=0.1)
        assert machine.decode(500).count("base") > 460
        machine.takes_s["base"] = 9.0
        machine.decode(200)
        assert machine.decode(320).count("base") <= 20
        machine.takes_s["base"] = 0.1
        machine.decode(5000)
        assert machine.decode(320).count("base") >= 300

    def test_trials_are_short_and_the_first_comes_soon(self):
        runs = runs_of(self.machine(takes_s=9.0).decode(400))
        assert runs[:2] == [("", PROBE_STEPS), ("base", PROBE_STEPS)]
        assert runs[2] == ("", pytest.approx(FIRST_PROBE, abs=1))
        assert runs[3] == ("base", PROBE_STEPS)

    def test_the_steps_between_two_trials_double_up_to_a_limit(self):
        runs = runs_of(self.machine(takes_s=9.0).decode(16_000))
        assert {num for way, num in runs[:-1] if way == "base"} == {PROBE_STEPS}
        gaps = [num for way, num in runs[2:-1] if way == ""]
        assert len(gaps) > 6
        for gap, following in itertools.pairwise(gaps):
            assert following == pytest.approx(min(2 * gap, LAST_PROBE), abs=2)
        assert gaps[-1] == gaps[-2] == pytest.approx(LAST_PROBE, abs=1)

    def test_a_way_that_is_nearly_as_fast_is_tried_often(self):
        # 2 tokens in 2.1 s, against 1 in 1.0 s: 95 % of the speed
        runs = runs_of(self.machine(takes_s=1.1).decode(1000))
        gaps = [num for way, num in runs[2:-1] if way == ""]
        assert len(gaps) > 20
        assert gaps == pytest.approx([FIRST_PROBE] * len(gaps), abs=1)

    def test_a_single_slow_step_changes_nothing(self):
        machine = self.machine(takes_s=0.1)
        machine.decode(400)
        machine.takes_s["base"] = 600.0  # the machine slept
        while machine.decode(1) != ["base"]:
            pass
        machine.takes_s["base"] = 0.1
        assert machine.decode(40).count("base") >= 32

    def with_draft_pass(self, takes_s: dict[str, float]) -> Machine:
        """A pass of the check at start took a second, as verify passes do here."""
        machine = Machine([["heads"], ["base"], []], takes_s)
        machine.drafters["base"].num_passes = 1
        return machine

    def test_a_draft_pass_is_not_tried_where_one_token_more_could_not_pay_for_it(self):
        # Heads: 2 tokens in 1.1 s. With a token and a pass more: 3 in 2.1 s.
        machine = self.with_draft_pass({"heads": 0.1, "base": 1.0})
        assert {*machine.decode(500)} == {"", "heads"}

    def test_a_draft_pass_is_tried_where_it_could_pay(self):
        # Heads: 2 tokens in 3 s, slower than nothing drafted. The draft pass: 2 tokens in 1.2 s.
        machine = self.with_draft_pass({"heads": 2.0, "base": 0.2})
        assert machine.decode(500).count("base") > 400

    def test_what_is_drafted_already_can_be_enough(self):
        machine = Machine([["ngram", "heads"]], {"ngram": 0.0, "heads": 0.1})
        machine.drafters["ngram"].paths = [[1] * 8]
        machine.decode(300)
        assert machine.ways[:1] == ["ngram+heads"]  # unsure at first
        assert machine.ways[-1:] == ["ngram"]

    def test_drafters_are_told_how_fast_the_fastest_way_is(self):
        pace = Pace()
        machine = Machine([["base"], []], {"base": 0.25}, pace=pace)
        machine.decode(200)
        assert pace.tokens_per_s == pytest.approx(2 / 1.25)

    def test_the_paper_makes_a_draft_pass_every_step(self):
        machine = self.machine(takes_s=9.0, measured=False)
        assert machine.decode(200).count("base") == 200

    def test_the_only_way_is_taken_every_step(self):
        machine = Machine([["base"]], {"base": 9.0})
        assert machine.decode(200).count("base") == 200

    def test_drafters_see_the_prompt_and_every_step_once_whatever_the_way(self):
        takes_s = {"heads": 0.1, "base": 9.0, "ngram": 0.0}
        machine = Machine([["heads", "ngram"], ["base", "ngram"], ["ngram"], []], takes_s)
        machine.plan.read(None)  # type: ignore[arg-type]
        assert set(machine.decode(100)) == {"", "ngram", "heads+ngram", "base+ngram"}
        assert [drafter.num_observed for drafter in machine.drafters.values()] == [101] * 3
