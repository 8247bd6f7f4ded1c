"""The planner: what it learns, which tree it keeps, and how often it tries a draft pass that does not pay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from swiftgen.planner import AcceptanceEstimates, PassCosts, Planner
from swiftgen.sampling import History
from swiftgen.tree import DraftTree

SIZES = (1, 2, 4, 8)


class ScriptedDrafter:
    """Stands for any drafter: adds the same paths every step, takes its time by a clock, and counts."""

    def __init__(self, paths: Sequence[Sequence[int]], source: str) -> None:
        self.paths, self.source = paths, source
        self.clock_s = 0.0
        self.takes_s = 0.0
        self.num_proposed = 0
        self.num_observed = 0

    def propose(self, tree: DraftTree, history: History) -> None:
        self.num_proposed += 1
        self.clock_s += self.takes_s
        for rank, path in enumerate(self.paths):
            tree.add_path(0, path, self.source, rank)

    def observe(self, committed: object) -> None:
        self.num_observed += 1


def planner(
    base: Sequence[Sequence[int]] | None = None,
    ngram: Sequence[Sequence[int]] | None = None,
    measured: bool = True,
    sizes: Sequence[int] = SIZES,
) -> Planner:
    drafters = (
        ScriptedDrafter(base, "base") if base is not None else None,
        ScriptedDrafter(ngram, "ngram") if ngram is not None else None,
    )
    return Planner(*drafters, sizes, measured)  # type: ignore[arg-type]


def draft(plan: Planner) -> DraftTree:
    return plan.draft(DraftTree(0, max_depth=9), History(1))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[step] for step in tree.path(node)[1:]) for node in range(len(tree))}


def flat_tree(num_nodes: int, source: str = "ngram") -> DraftTree:
    """A root with `num_nodes - 1` children."""
    tree = DraftTree(0, max_depth=9)
    for token in range(1, num_nodes):
        tree.add(0, token, source, rank=token - 1)
    return tree


def teach_costs(plan: Planner, seconds: dict[int, float]) -> None:
    """Let the planner see one step of each pass size in which every draft was wrong."""
    for size, cost in seconds.items():
        plan.observe(flat_tree(size), [0], cost, None)  # type: ignore[arg-type]


class TestAcceptanceEstimates:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
    def test_estimates_move_to_the_observed_rate(self, rate: float):
        estimates, rng = AcceptanceEstimates(), random.Random(0)
        tree = DraftTree(0, max_depth=9)
        tree.add(0, 1, "base")
        for _ in range(2000):
            estimates.observe(tree, [0, 1] if rng.random() < rate else [0])
        assert estimates.chance("base", 1, 0) == pytest.approx(rate, abs=0.15)

    def test_a_hit_raises_the_estimate_and_a_miss_lowers_it(self):
        estimates, tree = AcceptanceEstimates(), flat_tree(3, "base")
        best, second = (estimates.chance("base", 1, rank) for rank in (0, 1))
        estimates.observe(tree, [0, 2])
        assert estimates.chance("base", 1, 0) < best
        assert estimates.chance("base", 1, 1) > second
        assert 0 < estimates.chance("base", 1, 0) < 1
        assert 0 < estimates.chance("base", 1, 1) < 1

    def test_sources_depths_and_ranks_are_learnt_apart(self):
        estimates = AcceptanceEstimates()
        keys = [(s, d, r) for s in ("base", "heads", "ngram") for d in (1, 2) for r in (0, 1)]
        before = {key: estimates.chance(*key) for key in keys}
        tree = DraftTree(0, max_depth=9)
        tree.add(0, 1, "heads", rank=1)
        estimates.observe(tree, [0, 1])
        changed = [key for key in keys if estimates.chance(*key) != before[key]]
        assert changed == [("heads", 1, 1)]

    def test_drafts_below_a_wrong_one_teach_nothing(self):
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add_path(0, [1, 2], "base")
        before = estimates.chance("base", 2, 0)
        estimates.observe(tree, [0])
        assert estimates.chance("base", 2, 0) == before

    def test_a_node_is_as_likely_as_all_of_its_path(self):
        estimates, tree = AcceptanceEstimates(), DraftTree(0, max_depth=9)
        tree.add_path(0, [1, 2], "base")
        tree.add(1, 3, "ngram", rank=1)
        first = estimates.chance("base", 1, 0)
        assert estimates.chances(tree) == pytest.approx(
            [1, first, first * estimates.chance("base", 2, 0), first * estimates.chance("ngram", 2, 1)]
        )


class TestPassCosts:
    def test_the_first_measurement_is_taken_as_it_is_and_later_ones_move_it(self):
        costs = PassCosts(SIZES)
        costs.observe(4, 0.5)
        assert costs.seconds(4) == 0.5
        costs.observe(4, 0.3)
        assert 0.3 < costs.seconds(4) < 0.5
        for _ in range(200):
            costs.observe(4, 0.3)
        assert costs.seconds(4) == pytest.approx(0.3)

    def test_an_untried_size_costs_what_the_next_smaller_one_does(self):
        costs = PassCosts(SIZES)
        costs.observe(2, 0.2)
        costs.observe(8, 0.9)
        assert (costs.seconds(4), costs.seconds(1)) == (0.2, 0.2)


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
        # After a thousand hits of rank 0 and misses of rank 1, the chain of rank 0 is all but certain.
        plan = planner(ngram=[[1, 2, 3], [4, 5, 6]])
        full = DraftTree(0, max_depth=9)
        full.add_path(0, [1, 2, 3], "ngram", 0)
        full.add_path(0, [4, 5, 6], "ngram", 1)
        for _ in range(1000):
            plan.observe(full, [0, 1, 2, 3], 1.2, None)  # type: ignore[arg-type]
        teach_costs(plan, {1: 1.0, 2: 1.1, 4: 1.2})
        # 1 row: 1 token in 1.0 s; 2 rows: 2 in 1.1 s; 4 rows: 4 in 1.2 s; 8 rows bring no more
        plan.observe(flat_tree(8), [0], 2.0, None)  # type: ignore[arg-type]
        assert paths_of(draft(plan)) == {(), (1,), (1, 2), (1, 2, 3)}

    @pytest.mark.parametrize("seed", range(12))
    def test_no_subtree_promises_more_tokens_per_second(self, seed: int):
        rng = random.Random(seed)
        paths = [[rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))] for _ in range(4)]
        costs = dict(zip(SIZES, sorted(rng.uniform(1, 2) for _ in SIZES), strict=True))
        plan, estimates = planner(ngram=paths), AcceptanceEstimates()
        teach_costs(plan, costs)
        for size in costs:
            estimates.observe(flat_tree(size), [0])
        for _ in range(300):  # some ranks and depths turn out well
            seen = DraftTree(0, max_depth=9)
            for rank, path in enumerate(paths):
                seen.add_path(0, path, "ngram", rank)
            path = seen.walk([rng.choice([1, 2, 3]) for _ in range(len(seen))])
            size = next(s for s in (*SIZES, len(seen)) if s >= len(seen))
            plan.observe(seen, path, costs.get(size, 9.0), None)  # type: ignore[arg-type]
            estimates.observe(seen, path)

        full = DraftTree(0, max_depth=9)
        for rank, path in enumerate(paths):
            full.add_path(0, path, "ngram", rank)
        chances = estimates.chances(full)

        def rate(nodes: Sequence[int]) -> float:
            size = next(s for s in SIZES if s >= len(nodes))
            return sum(chances[node] for node in nodes) / costs[size]

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


class TestDraftPass:
    @pytest.fixture
    def plan(self, monkeypatch: pytest.MonkeyPatch) -> Planner:
        """Time passes only while its drafter drafts."""
        plan = planner(base=[[1]], ngram=[])
        clock = SimpleNamespace(perf_counter=lambda: plan._self_drafter.clock_s)
        monkeypatch.setattr("swiftgen.planner.time", clock)
        return plan

    def decode(self, plan: Planner, num_steps: int, takes_s: float) -> int:
        """Steps with a draft pass, which takes `takes_s` and is always right; a verify pass takes 1 s."""
        drafter = plan._self_drafter
        assert isinstance(drafter, ScriptedDrafter)
        drafter.takes_s = takes_s
        before = drafter.num_proposed
        for _ in range(num_steps):
            begin_s = drafter.clock_s
            tree = draft(plan)
            seconds = drafter.clock_s - begin_s + 1.0
            plan.observe(tree, tree.walk([1] * len(tree)), seconds, None)  # type: ignore[arg-type]
        return drafter.num_proposed - before

    def test_one_that_does_not_pay_is_tried_at_a_bounded_rate(self, plan: Planner):
        assert 5 <= self.decode(plan, 1000, takes_s=9.0) <= 60  # the text may change, but looking is cheap

    def test_one_that_pays_is_made_nearly_every_step(self, plan: Planner):
        assert 940 <= self.decode(plan, 1000, takes_s=0.1) < 1000  # the other way is looked at too

    def test_one_that_stops_paying_is_given_up_and_found_again_when_it_pays(self, plan: Planner):
        assert self.decode(plan, 500, takes_s=0.1) > 460
        self.decode(plan, 200, takes_s=9.0)
        assert self.decode(plan, 320, takes_s=9.0) <= 20
        self.decode(plan, 5000, takes_s=0.1)
        assert self.decode(plan, 320, takes_s=0.1) >= 300

    def test_the_paper_makes_one_every_step(self, plan: Planner):
        plan._measured = False
        assert self.decode(plan, 200, takes_s=9.0) == 200

    def test_drafters_see_the_prompt_and_every_step_even_those_without_a_draft_pass(self, plan: Planner):
        plan.read(None)  # type: ignore[arg-type]
        self.decode(plan, 100, takes_s=9.0)
        for drafter in (plan._self_drafter, plan._ngram_drafter):
            assert isinstance(drafter, ScriptedDrafter)
            assert drafter.num_observed == 101
