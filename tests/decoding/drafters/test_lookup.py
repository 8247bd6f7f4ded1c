"""Drafts from what stood in the text before."""

from __future__ import annotations

import random

import pytest

from support.upkeep import committed
from swiftgen.decoding.drafters import lookup
from swiftgen.decoding.drafters.lookup import (
    KEY_LENGTHS,
    MAX_DRAFT,
    MAX_MATCH,
    NUM_LOOKED_AT,
    NUM_PLACES,
    NUM_SLOTS,
    LookupDrafter,
)
from swiftgen.decoding.history import History
from swiftgen.forward.tree import DraftTree


def drafted(text: list[int], max_depth: int = 100) -> DraftTree:
    drafter = LookupDrafter()
    drafter.observe(committed(text))
    tree = DraftTree(text[-1], max_depth)
    drafter.propose(tree, History(1))
    return tree


def chains(tree: DraftTree) -> list[list[int]]:
    leaves = [node for node in range(len(tree)) if not tree.children(node)]
    return [[tree.tokens[node] for node in tree.path(leaf)[1:]] for leaf in leaves]


def test_what_followed_before_is_drafted():
    # 1 2 3 stood before 4 5 6; the draft is as long as twice the match and two more.
    assert chains(drafted([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])) == [[4, 5, 6, 9, 1, 2, 3]]


def test_a_text_without_repetition_has_no_drafts():
    assert len(drafted(list(range(50)))) == 1
    assert len(drafted([7])) == 1
    assert len(drafted([7, 7])) == 1


def test_one_token_is_no_match():
    assert len(drafted([1, 2, 3, 9, 2])) == 1


def test_the_longest_match_is_surest_and_the_others_are_rivals():
    text = [9, 1, 2, 3, 4, 50, 51, 8, 3, 4, 60, 61, 9, 1, 2, 3, 4]
    tree = drafted(text)
    first, *_ = chains(tree)
    assert first[:2] == [50, 51]
    assert tree.chances[1] == max(tree.chances[1:2])
    assert {tree.tokens[node] for node in tree.children(0)} == {
        50
    }  # found by four tokens: 60 is not asked for


def test_two_tokens_are_asked_for_where_four_find_nothing():
    tree = drafted([1, 2, 60, 5, 1, 2, 70, 6, 1, 2])
    assert [tree.tokens[node] for node in tree.children(0)] == [70, 60]  # the later place first
    one, other = tree.children(0)
    assert tree.chances[one] > tree.chances[other]


def test_a_longer_match_makes_surer_drafts():
    tail = list(range(100, 160))
    chances = []
    for length in (2, 5, 20, 40):
        tree = drafted([*range(90, 100 - 1), *tail[:length], 1, 2, 3, 999, *tail[:length]])
        assert tree.tokens[1] == 1
        chances.append(tree.chances[1])
    assert chances == sorted(chances)
    assert 0.3 < chances[0] < 0.5
    assert chances[-1] > 0.9


def test_a_draft_ends_with_the_text_and_with_the_levels_allowed():
    assert chains(drafted([1, 2, 3, 1, 2])) == [[3, 1, 2]]
    assert chains(drafted([1, 2, 3, 1, 2], max_depth=2)) == [[3, 1]]
    assert len(drafted([1, 2, 3, 1, 2], max_depth=0)) == 1


def test_a_repeated_token_is_drafted_again_and_again():
    (chain,) = chains(drafted([5] * 200))
    assert set(chain) == {5}
    assert 1 <= len(chain) <= MAX_DRAFT


@pytest.mark.parametrize("num_slots", [NUM_SLOTS, 64])
@pytest.mark.parametrize("alphabet", [2, 5, 40])
def test_places_and_matches_are_those_of_a_search(
    alphabet: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lookup, "NUM_SLOTS", num_slots)  # few, so that keys share them
    monkeypatch.setattr(lookup, "_MAX_LINKS", 400)
    rng = random.Random(alphabet)
    text = [rng.randrange(alphabet) for _ in range(400)]
    drafter = LookupDrafter()
    for end in range(1, len(text) + 1):
        drafter.observe(committed([text[end - 1]]))
        seen = text[:end]
        expected: list[int] = []
        for length in KEY_LENGTHS:
            if not expected and end >= length:
                places = [p for p in range(length, end) if seen[p - length : p] == seen[-length:]]
                expected = places[::-1][:NUM_LOOKED_AT]
        assert drafter._places() == expected
        for place in expected:
            match = next((n for n in range(place) if seen[place - 1 - n] != seen[end - 1 - n]), place)
            assert drafter._match(place) == min(match, MAX_MATCH)


def test_there_is_a_bound_for_the_nodes():
    rng = random.Random(1)
    for _ in range(50):
        text = [rng.randrange(3) for _ in range(rng.randrange(2, 300))]
        assert len(drafted(text * 3)) - 1 <= LookupDrafter.max_nodes
    assert LookupDrafter.max_nodes == NUM_PLACES * MAX_DRAFT
