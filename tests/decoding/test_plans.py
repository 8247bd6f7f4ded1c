"""Plans: what follows from their records, and the drafters they are built of."""

from __future__ import annotations

import pytest

from support.tiny import ready_heads, sampler, ticking, tiny_target
from swiftgen.decoding.drafters.base import Drafter
from swiftgen.decoding.drafters.heads import HeadsDrafter
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.plans import draft_cache_tokens, max_tree_rows, new_planner
from swiftgen.decoding.stopwatch import Stopwatch
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.settings.plans import PLAN_NAMES, PLANS, plan_name
from swiftgen.settings.presets import load_preset

NAMES = {HeadsDrafter: "heads", LookupDrafter: "lookup", NgramDrafter: "ngram", SelfDrafter: "self"}


class TestRecords:
    def test_their_names_are_listed_for_people(self):
        assert PLAN_NAMES == "auto, none, paper, heads, lookup or self"
        assert [plan.name for plan in PLANS.values()] == [*PLANS]

    def test_an_old_name_stands_for_the_present_one(self):
        assert plan_name("ngram") == "lookup"
        assert [plan_name(name) for name in PLANS] == [*PLANS]
        with pytest.raises(ValueError, match="allowed is auto, none"):
            plan_name("fast")

    def test_only_heads_alone_need_heads(self):
        assert [name for name, plan in PLANS.items() if plan.needs_heads] == ["heads"]

    def test_draft_passes_use_the_partial_cache(self):
        assert {name for name, plan in PLANS.items() if plan.uses_partial_cache} == {"auto", "paper", "self"}

    def test_what_a_plan_reads(self):
        of_a_pass = {"heads", "kv_budget", "sink", "refresh"}
        assert {name: plan.reads for name, plan in PLANS.items()} == {
            "auto": of_a_pass,
            "none": set(),
            "paper": of_a_pass | {"tree", "k", "ngram"},
            "heads": {"heads"},
            "lookup": set(),
            "self": of_a_pass,
        }


def built(draft: str, has_heads: bool, **settings: object) -> tuple[Planner, list[list[Drafter]]]:
    """A planner and the drafters of its ways."""
    preset = load_preset(None, {"draft": draft, **settings})
    heads = ready_heads("recurrent") if has_heads else None
    planner = new_planner(preset, tiny_target(), sampler(), heads, 1, 400, Estimates((1, 2)))
    return planner, [list(way) for way in planner._ways]


class TestBuilding:
    @pytest.mark.parametrize(
        ("draft", "has_heads", "expected"),
        [
            ("none", False, [[]]),
            ("none", True, [[]]),
            ("paper", False, [["self", "ngram"]]),
            ("paper", True, [["self", "ngram"]]),
            ("heads", True, [[], ["heads"]]),
            ("lookup", False, [["lookup"]]),
            ("ngram", True, [["lookup"]]),
            ("self", False, [[], ["self"]]),
            ("self", True, [[], ["self"]]),
            ("auto", False, [["lookup"], ["lookup", "self"]]),
            ("auto", True, [["lookup"], ["lookup", "heads"], ["lookup", "self"]]),
        ],
    )
    def test_the_ways_of_a_plan(self, draft: str, has_heads: bool, expected: list[list[str]]):
        planner, ways = built(draft, has_heads)
        assert [[NAMES[type(drafter)] for drafter in way] for way in ways] == expected
        assert (planner._estimates is not None) is (draft != "paper")

    def test_ways_share_their_drafters(self):
        _, (by_lookup, by_heads, by_pass) = built("auto", True)
        assert by_heads[0] is by_pass[0] is by_lookup[0]

    def test_a_draft_pass_goes_on_with_heads_if_there_are_any(self):
        for draft in ("paper", "self", "auto"):
            for has_heads in (False, True):
                _, ways = built(draft, has_heads)
                (passes,) = {drafter for way in ways for drafter in way if isinstance(drafter, SelfDrafter)}
                assert (passes._heads is not None) is has_heads

    def test_the_paper_drafts_its_tree_and_nothing_is_weighed(self):
        _, ((passes, _),) = built("paper", True, tree=[2, 3])
        assert isinstance(passes, SelfDrafter)
        assert passes._heads is not None
        assert (passes._width, passes._heads._widths) == (2, [3])
        assert (passes._level, passes._heads._level, passes._heads._beam) == (None, None, None)

    @pytest.mark.parametrize(
        ("draft", "num_nodes"),
        [
            ("none", 0),
            ("paper", 40 + 20 * 3),
            ("heads", 64),
            ("lookup", 3 * 48),
            ("self", 16 * 4 + 64),
            ("auto", 3 * 48 + 16 * 4 + 64),
        ],
    )
    def test_the_room_of_the_widest_tree(self, draft: str, num_nodes: int):
        preset = load_preset(None, {"draft": draft, "tree": [1, 3, 3, 3], "k": 20, "ngram": 4})
        assert max_tree_rows(preset) == 1 + num_nodes + BLOCK_TOKENS

    @pytest.mark.parametrize("draft", PLANS)
    def test_the_partial_cache_of_the_plan(self, draft: str):
        preset = load_preset(None, {"draft": draft, "kv_budget": 64})
        assert draft_cache_tokens(preset) == (64 if draft in ("auto", "paper", "self") else 0)


class TestStopwatch:
    def test_a_span_lasts_until_it_is_asked_for(self):
        now_s = 5.0
        elapsed = Stopwatch(lambda: now_s).start()
        now_s = 7.5
        assert elapsed() == 2.5
        now_s = 8.0
        assert elapsed() == 3.0

    def test_what_rank_0_measured_counts(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("swiftgen.decoding.stopwatch.of_leader", lambda seconds: seconds + 100)
        assert ticking().start()() == 101.0
