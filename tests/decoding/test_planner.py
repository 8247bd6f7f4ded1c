"""The planner: which way to draft it takes, and which part of the tree it keeps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.estimates import Estimates, Prior
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.stopwatch import Stopwatch
from swiftgen.forward.tree import DraftTree

SIZES = (1, 2, 4, 8)


class Fixed(Estimates):
    """Estimates that learn no time: of passes by their size, and what a second is worth."""

    def __init__(self, seconds: Sequence[float], tokens_per_s: float) -> None:
        self._price = tokens_per_s
        super().__init__(SIZES)
        self.costs._seconds = dict(zip(SIZES, seconds, strict=True))

    def _set_price(self) -> None:
        self.tokens_per_s = self._price

    def begin(self, context_tokens: int) -> None:
        """Costs stay."""


class ScriptedDrafter:
    """A drafter without levels: the same paths every step, each half as likely as the one before."""

    def __init__(self, paths: Sequence[Sequence[int]], source: str = "ngram") -> None:
        self.paths, self.source = paths, source
        self.num_proposed = self.num_observed = 0

    def propose(self, tree: DraftTree, history: History) -> None:
        self.num_proposed += 1
        for rank, path in enumerate(self.paths):
            tree.add_path(0, path, self.source, 0.5 / 2**rank)

    def promise(self) -> float:
        return 0.0

    def observe(self, committed: object) -> None:
        self.num_observed += 1


def draft(plan: Planner) -> DraftTree:
    return plan.draft(DraftTree(0, max_depth=9), History(1))


def kept(paths: Sequence[Sequence[int]], seconds: Sequence[float], tokens_per_s: float = 1.0) -> DraftTree:
    """What is verified of these paths."""
    return draft(Planner([[ScriptedDrafter(paths)]], Fixed(seconds, tokens_per_s)))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {path_of(tree, node) for node in range(len(tree))}


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[step] for step in tree.path(node)[1:])


class TestBestSubtree:
    def test_without_drafters_every_step_is_plain_AR(self):
        assert draft(Planner([[]], Estimates(SIZES))).tokens == [0]

    def test_the_paper_verifies_all_that_was_drafted(self):
        ways = [[ScriptedDrafter([[1, 2, 3]], "base"), ScriptedDrafter([[1, 2], [4, 5, 6]])], []]
        assert len(draft(Planner(ways))) == 7

    def test_the_bare_root_is_verified_where_drafts_cost_more_than_they_bring(self):
        assert kept([[1, 2, 3], [4]], [1.0, 3.0, 5.0, 9.0]).tokens == [0]
        assert kept([[1, 2, 3], [4]], [1.0, 1.2, 1.3, 1.5], tokens_per_s=9.0).tokens == [0]

    def test_a_tie_goes_to_fewer_rows(self):
        assert kept([[1]], [1.0, 1.49, 2.0, 3.0]).tokens == [0]  # half a token in 0.49 s
        assert kept([[1]], [1.0, 1.47, 2.0, 3.0]).tokens == [0, 1]

    def test_all_is_verified_where_rows_are_free(self):
        assert len(kept([[1, 2, 3], [4, 5, 6], [7]], [1.0] * 4)) == 8

    def test_never_more_than_the_largest_pass_is_verified(self):
        assert len(kept([[i, i, i] for i in range(1, 9)], [1.0] * 4)) == 8

    def test_the_likeliest_drafts_are_kept(self):
        # One token in 1.0 s; 0.5 more in 0.3 s; 0.25 + 0.25 (a path's second, the next path's first) in 0.3 s
        assert paths_of(kept([[1, 2], [3, 4]], [1.0, 1.3, 1.6, 2.5])) == {(), (1,), (1, 2), (3,)}

    @pytest.mark.parametrize("seed", range(12))
    def test_no_subtree_promises_more(self, seed: int):
        rng = random.Random(seed)
        paths = [[rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))] for _ in range(4)]
        seconds, price = sorted(rng.uniform(1, 2) for _ in SIZES), rng.uniform(0.1, 1)
        estimates = Fixed(seconds, price)
        drafter = ScriptedDrafter(paths)
        full = DraftTree(0, max_depth=9)
        drafter.propose(full, History(1))
        for _ in range(300):  # some paths and depths turn out well
            estimates.acceptance.observe(full, [rng.choice([1, 2, 3]) for _ in range(4)])
        chances = estimates.acceptance.chances(full)

        def surplus(nodes: Sequence[int]) -> float:
            size = next(s for s in SIZES if s >= len(nodes))
            return sum(chances[node] for node in nodes) - price * estimates.costs.seconds(size)

        closed = [
            (0, *nodes)
            for count in range(min(len(full), 8))
            for nodes in itertools.combinations(range(1, len(full)), count)
            if all(full.parents[node] in (0, *nodes) for node in nodes)
        ]
        tree = draft(Planner([[drafter]], estimates))
        nodes = [next(n for n in range(len(full)) if path_of(full, n) == p) for p in paths_of(tree)]
        assert all(full.parents[node] in nodes for node in nodes if node)
        assert surplus(nodes) >= max(map(surplus, closed)) - 0.02 - 1e-9


class Machine:
    """Decodes with a planner by a clock of its own: only levels and verify passes take time.

    A pass takes a second, and 0.1 s more for each row beyond the first. Each source drafts chains of levels.

    Args:
        level_s: Seconds of a level, by source.
        hit: How often a level is right, by source.
    """

    def __init__(
        self, level_s: dict[str, float], hit: dict[str, float], ways: Sequence[Sequence[str]]
    ) -> None:
        self.now_s, self.level_s, self.hit = 0.0, level_s, hit
        self._random = random.Random(0)
        self.estimates = Estimates(SIZES, (1.0, 1.1, 1.3, 1.7), stopwatch=Stopwatch(lambda: self.now_s))
        self.drafters = {source: LevelDrafter(self, source) for source in level_s}
        self.plan = Planner([[self.drafters[source] for source in way] for way in ways], self.estimates)
        self.num_tokens = 0

    def decode(self, num_steps: int) -> list[str]:
        """The sources that were asked in some more steps."""
        asked = []
        for _ in range(num_steps):
            self.asked = ""
            tree = self.plan.draft(DraftTree(0, max_depth=20), History(1))
            asked.append(self.asked)
            source = self.asked or "base"
            picks = [1 if self._random.random() < self.hit[source] else 2 for _ in range(len(tree))]
            path = tree.walk(picks)
            token_ids = [1] * (len(path) - 1) + [picks[path[-1]]]
            self.now_s += 1.0 + 0.1 * (len(tree) - 1)
            self.plan.observe(tree, path, Committed(token_ids, None, 0, None, None))  # type: ignore[arg-type]
            self.num_tokens += len(token_ids)
        return asked

    def rate(self, num_steps: int) -> float:
        """Tokens a second; plain decoding writes one."""
        tokens, begin_s = self.num_tokens, self.now_s
        self.decode(num_steps)
        return (self.num_tokens - tokens) / (self.now_s - begin_s)


class LevelDrafter:
    """Drafts a chain of the token 1, level by level."""

    def __init__(self, machine: Machine, source: str) -> None:
        self._machine, self._source = machine, source
        self._level = machine.estimates.level(source, Prior(share=0.3, hit=0.8, best_hit=0.95))
        self.num_observed = 0

    def propose(self, tree: DraftTree, history: History) -> None:
        self._machine.asked = self._source
        node, chance = 0, 1.0
        while node == 0 or self._level.is_worth(chance, len(tree)):
            elapsed = self._level.start()
            self._machine.now_s += self._machine.level_s[self._source]
            child = tree.add(node, 1, self._source, 0.8)
            if child is None:
                return
            node, own = child, self._level.chance(tree, child)
            chance *= own
            self._level.observe(elapsed(), own)

    def promise(self) -> float:
        return self._level.promise(16)

    def observe(self, committed: object) -> None:
        self.num_observed += 1


def machine(level_s: float, hit: float) -> Machine:
    """One source, or nothing."""
    return Machine({"base": level_s}, {"base": hit}, [["base"], []])


class TestWays:
    @pytest.mark.parametrize(
        ("level_s", "hit", "least"),
        [
            (0.2, 0.9, 1.6),  # four levels: 4.1 tokens in 2.2 s
            (0.5, 0.9, 1.15),  # two levels: 2.7 tokens in 2.2 s
            (0.7, 0.9, 0.98),  # hardly anything to gain
            (0.2, 0.2, 0.97),  # learnt at the price of some twenty levels
            (3.0, 1.0, 0.98),
        ],
    )
    def test_it_is_near_the_best_from_the_start_and_never_loses(
        self, level_s: float, hit: float, least: float
    ):
        assert machine(level_s, hit).rate(400) >= least

    def test_levels_that_pay_are_made_nearly_every_step(self):
        assert 380 < machine(0.2, 0.9).decode(400).count("base") < 400  # plain decoding is looked at too

    def test_levels_that_do_not_pay_are_hardly_tried(self):
        assert machine(3.0, 1.0).decode(1000).count("base") <= 20

    def test_a_tie_goes_to_plain_decoding(self):
        machine_ = machine(0.83, 0.95)  # 1.95 tokens in 1.93 s
        machine_.decode(300)
        assert machine_.decode(300).count("base") <= 75

    def test_one_that_brings_less_than_it_promises_is_given_up(self, monkeypatch: pytest.MonkeyPatch):
        boaster = ScriptedDrafter([[2]])
        monkeypatch.setattr(boaster, "promise", lambda: 0.2)
        plan = Planner([[boaster], []], Fixed([1.0] * 4, 0.1))
        for _ in range(300):
            plan.observe(draft(plan), [0], Committed([1], None, 0, None, None))  # type: ignore[arg-type]
        assert 10 < boaster.num_proposed < 200

    def test_one_that_stops_paying_is_given_up_and_found_again_when_it_pays(self):
        machine_ = machine(0.2, 0.9)
        assert machine_.decode(300).count("base") > 280
        machine_.hit["base"] = 0.05
        machine_.decode(200)
        assert machine_.decode(300).count("base") <= 30
        machine_.hit["base"] = 0.95
        machine_.decode(5000)
        assert machine_.decode(300).count("base") >= 280

    def test_a_single_slow_level_changes_nothing(self):
        machine_ = machine(0.2, 0.9)
        machine_.decode(200)
        machine_.level_s["base"] = 600.0  # the machine slept
        machine_.decode(1)
        machine_.level_s["base"] = 0.2
        assert machine_.decode(40).count("base") >= 35

    def test_of_two_ways_the_better_is_taken(self):
        two = Machine({"base": 0.3, "heads": 0.1}, {"base": 0.9, "heads": 0.5}, [["base"], ["heads"], []])
        two.decode(200)
        asked = two.decode(200)
        assert asked.count("base") > 150  # 3.4 tokens in 2.2 s, against 1.5 in 1.2 s
        two.level_s["base"] = 0.9
        two.decode(400)
        assert two.decode(200).count("heads") > 150

    def test_what_is_drafted_already_can_be_enough(self):
        sure, other = ScriptedDrafter([[1] * 8]), ScriptedDrafter([[2]], "base")
        estimates = Fixed([1.0] * 4, 0.1)
        plan = Planner([[sure, other]], estimates)
        draft(plan)
        assert other.num_proposed == 1  # unsure at first
        estimates.acceptance.known[("ngram", 1, 0)] = 0.95
        draft(plan)
        assert (sure.num_proposed, other.num_proposed) == (2, 1)

    def test_the_only_way_is_taken_every_step(self):
        assert Machine({"base": 9.0}, {"base": 0.0}, [["base"]]).decode(200) == ["base"] * 200

    def test_drafters_see_the_prompt_and_every_step_once_whatever_the_way(self):
        two = Machine({"base": 0.2, "heads": 9.0}, {"base": 0.9, "heads": 0.5}, [["base"], ["heads"], []])
        two.plan.read(Committed([1], None, 0, None, None))  # type: ignore[arg-type]
        two.decode(100)
        assert [drafter.num_observed for drafter in two.drafters.values()] == [101] * 2
