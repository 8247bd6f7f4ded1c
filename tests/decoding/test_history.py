"""The text so far, and the windows of tree nodes on it."""

from __future__ import annotations

import random

import pytest
import torch

from support.sampling import VOCAB_SIZE, random_history, random_tree
from swiftgen.forward.tree import DraftTree


class TestHistory:
    def test_it_keeps_what_was_written(self):
        history = random_history([4, 5, 6])
        assert (len(history), history.last(2), history.last(9)) == (3, [5, 6], [4, 5, 6])
        history.extend([7])
        assert history.last(1) == [7]

    @pytest.mark.parametrize("W", [1, 2, 4, 8, 50])
    def test_a_window_holds_the_last_tokens_with_those_of_the_path(self, W: int):
        for seed in range(20):
            rng = random.Random(100 + seed)
            text = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 3, 8, 40]))]
            tree = random_tree(seed, text[-1])
            windows = random_history(text).windows(tree, W)
            assert windows.shape[0] == len(tree)
            for node in range(len(tree)):
                seen = text + [tree.tokens[step] for step in tree.path(node)[1:]]
                assert set(windows[node].tolist()) == set(seen[-W:])

    @pytest.mark.parametrize("W", [2**31, 2**63, 10**30])
    def test_a_window_longer_than_the_text_is_all_of_it(self, W: int):
        history, tree = random_history([1, 2, 3]), random_tree(0, 3)
        assert torch.equal(history.windows(tree, W), history.windows(tree, 3 + tree.depth))

    def test_a_window_by_hand(self):
        tree = DraftTree(3, max_depth=2)
        tree.add_path(0, [8, 9], "base")
        windows = random_history([1, 2, 3]).windows(tree, 2)
        assert [set(row) for row in windows.tolist()] == [{2, 3}, {3, 8}, {8, 9}]

    @pytest.mark.parametrize("W", [0, 1, 3, 50])
    def test_windows_of_some_nodes_are_those_of_all_nodes(self, W: int):
        for seed in range(20):
            text = [seed, 1, 2, 3, 4]
            history, tree = random_history(text), random_tree(seed, text[-1])
            nodes = random.Random(seed).sample(range(len(tree)), 6)
            some, every = history.windows(tree, W, nodes), history.windows(tree, W)
            assert some.shape[0] == 6
            for row, node in enumerate(nodes):
                assert set(some[row].tolist()) == set(every[node].tolist())
