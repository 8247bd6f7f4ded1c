"""Drafters: counts of n-grams, and the draft pass with its heads."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from swiftgen.cache import PartialCache
from swiftgen.drafters.base import Committed
from swiftgen.drafters.ngram import NgramDrafter, NgramTable
from swiftgen.drafters.self_draft import SelfDrafter
from swiftgen.heads import LinearHeads
from swiftgen.planner import Planner
from swiftgen.sampling import History, Sampler
from swiftgen.tree import DraftTree
from tiny import HIDDEN_SIZE, ar_planner, new_cache, random_heads, run, sampler, tiny_target

PROMPT = [5, 17, 3, 5, 17, 8, 60]


def random_text(seed: int, num_tokens: int, alphabet: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(num_tokens)]


def committed(token_ids: list[int]) -> Committed:
    """As an n-gram drafter sees it."""
    return Committed(token_ids, cache=None, begin=0, queries=())  # type: ignore[arg-type]


class TestNgramTable:
    @pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 4), (4, 5), (4, 100)])
    def test_the_most_frequent_are_those_of_a_full_count(self, n: int, k: int):
        table, text = NgramTable(n, k, seed=1), random_text(n * k, 300)
        written = 0
        while written < len(text):
            table.extend(text[written : written + 7])
            written = min(written + 7, len(text))
            counts = Counter(tuple(text[i : i + n]) for i in range(written - n + 1))
            for first in range(3):
                grams = {gram: count for gram, count in counts.items() if gram[0] == first}
                found = [(first, *rest) for rest in table.most_frequent(first)]
                assert len(found) == len(set(found)) == min(k, len(grams))
                # Which of equally frequent ones are chosen is open, but not how frequent the chosen are.
                assert [grams[gram] for gram in found] == sorted(grams.values(), reverse=True)[:k]

    def test_counts_by_hand(self):
        table = NgramTable(3, 2, seed=0)
        table.extend([1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 5, 5])
        # 1 2 4 twice, 1 2 3 and 1 5 5 once each
        assert table.most_frequent(1)[0] == (2, 4)
        assert table.most_frequent(1)[1] in [(2, 3), (5, 5)]
        assert table.most_frequent(9) == []

    def test_an_ngram_spans_the_border_between_two_steps(self):
        table = NgramTable(3, 5, seed=0)
        for step in ([1], [2], [3, 4]):
            table.extend(step)
        assert table.most_frequent(1) == [(2, 3)]
        assert table.most_frequent(2) == [(3, 4)]

    def test_an_ngram_that_was_dropped_comes_back_with_its_whole_count(self):
        table = NgramTable(2, 1, seed=0)
        table.extend([1, 2, 1, 2, 9])  # 1 2 leads with two
        table.extend([1, 3, 9, 1, 3, 9])  # a tie at two, whichever leads
        table.extend([1, 3])
        assert table.most_frequent(1) == [(3,)]

    def test_ties_are_broken_by_the_seed(self):
        text = [token for i in range(2, 40) for token in (1, i)]  # 38 successors of 1, once each

        def chosen(seed: int) -> list[tuple[int, ...]]:
            table = NgramTable(2, 5, seed)
            table.extend(text)
            return table.most_frequent(1)

        assert chosen(3) == chosen(3)
        assert len({tuple(chosen(seed)) for seed in range(5)}) == 5
        assert len({gram for seed in range(30) for gram in chosen(seed)}) > 30  # no place is preferred

    def test_the_list_at_hand_is_never_longer_than_k(self):
        table = NgramTable(3, 4, seed=0)
        for token in random_text(1, 2000, alphabet=6):
            table.extend([token])
            assert max(map(len, table._best.values()), default=0) <= 4
        assert len(table._entries) > 150  # there was much to choose from


class TestNgramDrafter:
    def drafted(self, below_root: bool) -> DraftTree:
        drafter = NgramDrafter(3, 5, seed=0, below_root=below_root)
        drafter.observe(committed([7, 8, 9, 1, 2, 3]))
        drafter.observe(committed([7, 8, 9, 7]))
        tree = DraftTree(7, max_depth=5)
        tree.add_path(0, [1, 5], "base")
        tree.add(0, 9, "base", rank=1)
        drafter.propose(tree, History(1))
        return tree

    def test_chains_hang_below_every_first_candidate(self):
        tree = self.drafted(below_root=False)
        paths = {tuple(tree.tokens[step] for step in tree.path(node)[1:]) for node in range(1, len(tree))}
        expected = {(1,), (1, 5), (1, 2), (1, 2, 3), (9,), (9, 1), (9, 1, 2)}
        assert paths == expected
        assert [tree.sources[node] for node in tree.children(1)] == ["base", "ngram"]

    def test_chains_hang_below_the_root_if_asked_to(self):
        tree = self.drafted(below_root=True)
        (start,) = [node for node in tree.children(0) if tree.sources[node] == "ngram"]
        assert tree.tokens[start] == 8
        assert tree.child(start, 9) is not None

    def test_without_a_draft_pass_only_the_root_starts_chains(self):
        drafter = NgramDrafter(2, 3, seed=0, below_root=False)
        drafter.observe(committed([1, 2, 1, 2]))
        tree = DraftTree(1, max_depth=5)
        drafter.propose(tree, History(1))
        assert len(tree) == 1

    def test_ranks_count_the_chains_of_a_place_by_frequency(self):
        drafter = NgramDrafter(2, 3, seed=0, below_root=True)
        drafter.observe(committed([1, 2, 1, 3, 1, 3, 1, 4, 1, 4, 1, 4, 1]))
        tree = DraftTree(1, max_depth=5)
        drafter.propose(tree, History(1))
        assert tree.tokens == [1, 4, 3, 2]
        assert tree.ranks == [0, 0, 1, 2]


def draft(heads: LinearHeads | None, shape: list[int], sample: Sampler, max_depth: int = 9) -> DraftTree:
    """The tree of one draft pass after the prompt, with a partial cache that holds all of it."""
    target = tiny_target()
    cache = new_cache(target, len(PROMPT))
    prefill = target.prefill(PROMPT[:-1], cache)
    assert prefill is not None
    partial = PartialCache(target.cache_shape, budget=100, num_sinks=2)
    drafter = SelfDrafter(target, sample, partial, heads, shape)
    drafter.observe(Committed(PROMPT, cache, 0, prefill.queries_at(-1)))
    history = History(100)
    history.extend(PROMPT)
    tree = DraftTree(PROMPT[-1], max_depth)
    drafter.propose(tree, history)
    return tree


class TestSelfDrafter:
    def test_the_shape_of_the_paper_gives_a_full_tree(self):
        tree = draft(random_heads(), [1, 3, 3, 3], sampler())
        assert len(tree) == 1 + 1 + 3 + 9 + 27
        for node in range(len(tree)):
            assert len(tree.children(node)) == ([1, 3, 3, 3, 0][tree.depths[node]])
            if node:
                assert tree.sources[node] == ("base" if tree.depths[node] == 1 else "heads")
                assert tree.ranks[node] == tree.children(tree.parents[node]).index(node)

    def test_without_heads_only_the_first_level_is_drafted(self):
        tree = draft(None, [2, 3, 3, 3], sampler())
        assert (len(tree), tree.depth, tree.ranks) == (3, 1, [0, 0, 1])

    def test_levels_beyond_the_heads_are_left_out(self):
        assert draft(random_heads(), [1, 1, 1, 1, 2, 2], sampler()).depth == 4

    def test_levels_beyond_the_block_are_left_out(self):
        assert len(draft(random_heads(), [1, 3, 3, 3], sampler(), max_depth=2)) == 1 + 1 + 3
        assert len(draft(random_heads(), [1, 3, 3, 3], sampler(), max_depth=0)) == 1

    def test_no_draft_pass_is_made_where_nothing_may_be_drafted(self, monkeypatch: pytest.MonkeyPatch):
        target = tiny_target()
        drafter = SelfDrafter(target, sampler(), PartialCache(target.cache_shape, 100, 2), None, [1])
        monkeypatch.setattr(target, "forward", lambda *_: pytest.fail("a pass was made"))
        drafter.propose(DraftTree(5, max_depth=0), History(1))

    def test_tokens_that_cannot_occur_are_not_drafted(self):
        assert len(draft(None, [3], sampler(top_k=2))) == 3

    def test_untrained_heads_predict_what_the_base_predicts(self):
        heads = LinearHeads(HIDDEN_SIZE, 3, tiny_target().config.rms_norm_eps)
        tree = draft(heads, [3, 3, 3, 3], sampler(temperature=0.0))
        best = [tree.tokens[node] for node in tree.children(0)]
        assert len(set(best)) == 3
        for node in range(len(tree)):
            if tree.depths[node] < 4:
                assert [tree.tokens[child] for child in tree.children(node)] == best

    def test_a_level_is_drafted_with_the_noise_of_its_own_position(self):
        # The same logits at every level, so only the noise differs: sample each level again by hand.
        heads = LinearHeads(HIDDEN_SIZE, 3, tiny_target().config.rms_norm_eps)
        tree = draft(heads, [1, 1, 1, 1], sampler(temperature=1.0))
        target = tiny_target()
        cache = new_cache(target, len(PROMPT))
        target.prefill(PROMPT[:-1], cache)
        hidden = target.forward(DraftTree(PROMPT[-1], 0), len(PROMPT) - 1, cache).hidden
        logits = target.logits(hidden).expand(4, -1).clone()
        positions = len(PROMPT) + torch.arange(4)
        expected = sampler(temperature=1.0).pick(logits, positions, torch.zeros(4, 1, dtype=torch.int64))
        assert tree.tokens[1:] == expected
        assert len(set(expected)) > 1

    def test_a_partial_cache_that_holds_everything_drafts_what_the_target_picks(self):
        target, sample = tiny_target(), sampler(temperature=1.0, theta=1.2, W=30)
        partial = PartialCache(target.cache_shape, budget=1000, num_sinks=4)
        drafter = SelfDrafter(target, sample, partial, None, [1])
        planner = Planner(drafter, None, target.pass_sizes, measured=False)
        actual = run(target, planner, sample, PROMPT, 200)
        expected = run(target, ar_planner(target), sampler(temperature=1.0, theta=1.2, W=30), PROMPT, 200)
        assert actual.token_ids == expected.token_ids
        assert len(set(actual.token_ids)) > 20
        depths = sum(event.draft_depth for event in actual.events)
        assert depths > 90  # two tokens a step
        assert sum(event.num_accepted for event in actual.events) >= depths - 1  # a rounding may flip one

    def test_the_partial_cache_follows_the_text(self):
        target, sample = tiny_target(), sampler()
        partial = PartialCache(target.cache_shape, budget=1000, num_sinks=4)
        planner = Planner(
            SelfDrafter(target, sample, partial, None, [1]), None, target.pass_sizes, measured=False
        )
        done = run(target, planner, sample, PROMPT, 30)
        length = len(PROMPT) + 29  # the last token has no key yet
        assert partial.length == length
        assert torch.equal(partial.keys[:, :, :length], done.keys)
        assert torch.equal(partial.values[:, :, :length], done.values)

    def test_a_prompt_of_one_token_has_nothing_to_look_back_at(self):
        target, sample = tiny_target(), sampler()
        partial = PartialCache(target.cache_shape, budget=20, num_sinks=4)
        planner = Planner(
            SelfDrafter(target, sample, partial, None, [1]), None, target.pass_sizes, measured=False
        )
        expected = run(target, ar_planner(target), sampler(), [5], 40)
        assert run(target, planner, sample, [5], 40).same_bits(expected)
