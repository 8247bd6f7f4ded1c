"""The draft tree: merging, the walk, subtrees, and who sees whom."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from swiftgen.forward.tree import DraftTree


def small_tree() -> DraftTree:
    """Root 9 with the drafts 5-6-7, 5-8 and 6-7; nodes 1 to 6 in this order."""
    tree = DraftTree(9, max_depth=3)
    tree.add_path(0, [5, 6, 7], "base", 0.75)
    tree.add_path(0, [5, 8], "ngram", 0.25)
    tree.add_path(0, [6, 7], "ngram", 0.125)
    return tree


def random_tree(seed: int, num_nodes: int, max_depth: int = 5, vocab_size: int = 7) -> DraftTree:
    rng = random.Random(seed)
    tree = DraftTree(rng.randrange(vocab_size), max_depth)
    while len(tree) < num_nodes:
        tree.add(rng.randrange(len(tree)), rng.randrange(vocab_size), "base")
    return tree


def test_a_new_tree_is_the_bare_root():
    tree = DraftTree(9, max_depth=3)
    assert (len(tree), tree.depth) == (1, 0)
    assert (tree.tokens, tree.parents, tree.depths, tree.sources) == ([9], [-1], [0], ["root"])
    assert tree.chances == [1.0]  # the root is certain


def test_drafts_that_begin_alike_share_their_nodes():
    tree = small_tree()
    assert tree.tokens == [9, 5, 6, 7, 8, 6, 7]
    assert tree.parents == [-1, 0, 1, 2, 1, 0, 5]
    assert tree.depths == [0, 1, 2, 3, 2, 1, 2]
    assert tree.depth == 3


def test_a_shared_node_has_the_source_and_chance_of_the_surer_drafter():
    tree = small_tree()
    assert tree.sources == ["root", "base", "base", "base", "ngram", "ngram", "ngram"]
    assert tree.chances == [1.0, 0.75, 0.75, 0.75, 0.25, 0.125, 0.125]
    for source, chance in [("heads", 0.75), ("ngram", 0.1)]:
        assert tree.add(0, 5, source, chance) == 1
        assert (tree.sources[1], tree.chances[1], len(tree)) == ("base", 0.75, 7)
    assert tree.add(0, 5, "heads", 0.9) == 1
    assert (tree.sources[1], tree.chances[1], len(tree)) == ("heads", 0.9, 7)


def test_the_same_token_below_different_parents_is_different_nodes():
    tree = small_tree()
    assert tree.child(2, 7) == 3
    assert tree.child(5, 7) == 6


def test_children_come_in_the_order_they_were_added():
    tree = small_tree()
    tree.add(0, 1, "base")
    assert tree.children(0) == [1, 5, 7]
    assert tree.children(1) == [2, 4]
    assert tree.children(3) == []


def test_nothing_is_added_below_the_depth_limit():
    tree = DraftTree(9, max_depth=2)
    tree.add_path(0, [1, 2, 3, 4], "base")
    assert tree.tokens == [9, 1, 2]
    assert tree.add(2, 3, "base") is None
    assert tree.add(1, 3, "base") == 3
    assert len(tree) == 4


def test_a_limit_of_zero_allows_only_the_root():
    tree = DraftTree(9, max_depth=0)
    tree.add_path(0, [1, 2], "base")
    assert tree.add(0, 1, "base") is None
    assert (len(tree), tree.children(0)) == (1, [])


def test_a_path_runs_from_the_root_to_the_node():
    tree = small_tree()
    assert tree.path(0) == [0]
    assert tree.path(3) == [0, 1, 2, 3]
    assert tree.path(6) == [0, 5, 6]


@pytest.mark.parametrize(
    ("picks", "accepted"),
    [
        ([5, 6, 7, 0, 0, 0, 0], [0, 1, 2, 3]),  # a whole draft
        ([5, 6, 1, 0, 0, 0, 0], [0, 1, 2]),  # the last token is wrong
        ([5, 8, 7, 0, 0, 0, 0], [0, 1, 4]),  # the other branch
        ([6, 6, 7, 0, 0, 7, 0], [0, 5, 6]),  # picks of nodes off the path do not count
        ([1, 6, 7, 0, 0, 7, 0], [0]),  # right tokens below a wrong one do not count
        ([7, 6, 7, 0, 0, 7, 0], [0]),  # 7 was drafted, but not below the root
    ],
)
def test_a_walk_follows_the_picks_until_no_child_carries_one(picks: list[int], accepted: list[int]):
    assert small_tree().walk(picks) == accepted


def test_a_walk_equals_a_search_for_the_drafted_part_of_the_text():
    for seed in range(50):
        tree = random_tree(seed, num_nodes=30, vocab_size=4)
        rng = random.Random(1000 + seed)
        picks = [rng.randrange(4) for _ in range(len(tree))]
        # Every node whose path agrees with the pick of each ancestor is on the accepted path.
        agreeing = [
            node
            for node in range(len(tree))
            if all(tree.tokens[b] == picks[a] for a, b in itertools.pairwise(tree.path(node)))
        ]
        assert tree.walk(picks) == agreeing


def test_a_kept_subtree_is_renumbered():
    kept = small_tree().keep([6, 0, 4, 1, 5])
    assert kept.tokens == [9, 5, 8, 6, 7]
    assert kept.parents == [-1, 0, 1, 0, 3]
    assert kept.depths == [0, 1, 2, 1, 2]
    assert kept.sources == ["root", "base", "ngram", "ngram", "ngram"]
    assert kept.chances == [1.0, 0.75, 0.25, 0.125, 0.125]
    assert kept.walk([6, 0, 0, 7, 0]) == [0, 3, 4]


def test_keeping_the_root_alone_leaves_the_original_untouched():
    tree = small_tree()
    kept = tree.keep([0])
    assert (kept.tokens, kept.max_depth) == ([9], 3)
    kept.add(0, 1, "base")
    assert len(tree) == 7


def test_keep_refuses_a_node_without_its_parent():
    with pytest.raises(KeyError):
        small_tree().keep([0, 3])


def slow_visibility(tree: DraftTree, num_rows: int) -> list[list[bool]]:
    """Row by row: follow the parents up to the root."""
    rows = []
    for row in range(num_rows):
        seen = {row}
        node = row if row < len(tree) else -1
        while node >= 0:
            seen.add(node)
            node = tree.parents[node]
        rows.append([column in seen for column in range(num_rows)])
    return rows


def test_a_row_sees_itself_and_its_ancestors():
    expected = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],  # padding
    ]
    assert torch.equal(small_tree().visibility(8), torch.tensor(expected, dtype=torch.bool))


@pytest.mark.parametrize("num_rows", [1, 13, 20, 32])
def test_visibility_equals_a_slow_reference_with_padding_and_with_rows_left_out(num_rows: int):
    for seed in range(20):
        tree = random_tree(seed, num_nodes=20)
        assert tree.visibility(num_rows).tolist() == slow_visibility(tree, num_rows)
