"""The KV caches: compaction of accepted rows, block boundaries, and what the draft pass gets to see."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from swiftgen.forward.cache import BLOCK_TOKENS, CacheShape, CacheView, FullCache
from swiftgen.forward.partial_cache import PartialCache

SHAPE = CacheShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
GROUP = 2


def rows(tokens: list[int], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values whose first number names the token; all others name head and layer too."""
    token = torch.tensor(tokens, dtype=torch.float32).view(1, -1, 1)
    head = torch.arange(SHAPE.num_kv_heads).view(-1, 1, 1)
    keys = (token + 0.1 * head + 0.01 * layer).repeat(1, 1, SHAPE.head_dim)
    keys[:, :, 0] = token[0, :, 0]
    return keys, -keys


def store(cache: FullCache | PartialCache, tokens: list[int], first_row: int = 0) -> CacheView:
    """Write rows as a pass does."""
    view = cache.view(len(tokens), first_row)
    for layer in range(SHAPE.num_layers):
        keys, values = rows(tokens, layer)
        view.tail_keys[layer, :, -len(tokens) :] = keys
        view.tail_values[layer, :, -len(tokens) :] = values
    return view


def append(cache: FullCache, tokens: list[int]) -> None:
    store(cache, tokens)
    cache.commit(range(len(tokens)))


def full_cache(num_tokens: int, capacity: int = 400) -> FullCache:
    """Tokens 0, 1, 2, ... in their places, as chains of a prefill."""
    cache = FullCache(SHAPE, capacity)
    for begin in range(0, num_tokens, BLOCK_TOKENS):
        append(cache, list(range(begin, min(num_tokens, begin + BLOCK_TOKENS))))
    return cache


def assert_holds(cache: FullCache, tokens: list[int]) -> None:
    assert cache.length == len(tokens)
    for layer in range(SHAPE.num_layers):
        keys, values = rows(tokens, layer)
        assert torch.equal(cache.keys[layer, :, : cache.length], keys)
        assert torch.equal(cache.values[layer, :, : cache.length], values)


class TestFullCache:
    @pytest.mark.parametrize("accepted", [[0], [0, 3], [0, 2, 5], [0, 1, 2, 5], [0, 1, 2, 3, 4, 5]])
    def test_accepted_rows_are_moved_together_in_every_layer_and_head(self, accepted: list[int]):
        cache = full_cache(5)
        store(cache, [10, 11, 12, 13, 14, 15])
        cache.commit(accepted)
        assert_holds(cache, [0, 1, 2, 3, 4, *(10 + row for row in accepted)])

    def test_the_next_tree_overwrites_what_was_dropped(self):
        cache = full_cache(2)
        store(cache, [10, 11, 12])
        cache.commit([0])
        store(cache, [20, 21])
        cache.commit([0, 1])
        assert_holds(cache, [0, 1, 10, 20, 21])

    def test_a_path_at_the_front_stays_where_it_is(self):
        cache = full_cache(3)
        store(cache, [10, 11, 12, 13])
        cache.commit(range(2))
        assert_holds(cache, [0, 1, 2, 10, 11])

    def test_a_tree_in_several_parts_is_committed_as_one(self):
        cache = full_cache(4)
        store(cache, [10, 11, 12])
        store(cache, [13, 14, 99], first_row=3)
        cache.commit([0, 2, 4])
        assert_holds(cache, [0, 1, 2, 3, 10, 12, 14])

    def test_later_parts_see_the_rows_of_the_earlier_ones(self):
        cache = full_cache(4)
        first = store(cache, [10, 11])
        second = store(cache, [12], first_row=2)
        assert first.tail_keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 10, 11]
        assert second.tail_keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 10, 11, 12]

    @pytest.mark.parametrize(
        ("num_tokens", "num_prefix"),
        [(0, 0), (1, 0), (127, 0), (128, 128), (129, 128), (255, 128), (256, 256), (300, 256)],
    )
    def test_prefix_and_tail_meet_at_the_last_block_boundary(self, num_tokens: int, num_prefix: int):
        cache = full_cache(num_tokens)
        assert (cache.num_prefix_tokens, cache.num_tail_tokens) == (num_prefix, num_tokens - num_prefix)
        view = store(cache, [900, 901])
        for layer in range(SHAPE.num_layers):
            keys, values = rows([*range(num_tokens), 900, 901], layer)
            assert torch.equal(view.prefix_keys[layer], keys[:, :num_prefix])
            assert torch.equal(view.prefix_values[layer], values[:, :num_prefix])
            assert torch.equal(view.tail_keys[layer], keys[:, num_prefix:])
            assert torch.equal(view.tail_values[layer], values[:, num_prefix:])

    def test_rows_beyond_the_boundary_do_not_move_it_before_they_are_committed(self):
        cache = full_cache(127)
        view = store(cache, [900, 901, 902])
        assert (view.prefix_keys.shape[2], view.tail_keys.shape[2]) == (0, 130)
        cache.commit([0])
        assert (cache.num_prefix_tokens, cache.num_tail_tokens) == (128, 0)

    def test_rows_beyond_the_capacity_are_refused(self):
        cache = full_cache(398)
        cache.view(2, 0)
        with pytest.raises(AssertionError, match="no room"):
            cache.view(3, 0)

    def test_bytes_of_keys_and_values_are_counted(self):
        # 2 (keys, values) x 2 layers x 3 heads x 400 tokens x 4 numbers x 4 bytes
        assert full_cache(1).num_bytes == 2 * 2 * 3 * 400 * 4 * 4


def queries(seed: int) -> Tensor:
    """`[num_layers, num_kv_heads, group, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE.num_layers, SHAPE.num_kv_heads, GROUP, SHAPE.head_dim, generator=generator)


def noise_cache(num_tokens: int, capacity: int = 400) -> FullCache:
    """Random keys; the first number of a value names its token."""
    cache = FullCache(SHAPE, capacity)
    generator = torch.Generator().manual_seed(5)
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
    cache.values.copy_(torch.arange(capacity).view(1, 1, -1, 1).expand(cache.values.shape))
    cache.length = num_tokens
    return cache


def held(partial: PartialCache, layer: int, head: int) -> list[int]:
    """Tokens in the order of their slots; their keys must have come along."""
    view = partial.view(1, 0)
    return [int(token) for token in view.prefix_values[layer, head, :, 0]]


def by_importance(full: FullCache, layer: int, head: int, asked: Tensor, num_sinks: int) -> list[int]:
    """All tokens but the sinks, most important first: a slow reference in Python numbers."""
    scores = []
    for token in range(num_sinks, full.length):
        key = full.keys[layer, head, token].tolist()
        score = sum(
            sum(a * b for a, b in zip(asked[layer][head, member].tolist(), key, strict=True))
            for member in range(GROUP)
        )
        scores.append((-score, token))
    return [token for _, token in sorted(scores)]


PLACES = [(layer, head) for layer in range(2) for head in range(3)]


class TestSelection:
    BUDGET, SINKS = 12, 3

    def selected(self, num_tokens: int = 50) -> tuple[PartialCache, FullCache, Tensor]:
        full, asked = noise_cache(num_tokens), queries(1)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS)
        partial.update(full, 0, asked)
        return partial, full, asked

    def test_sinks_and_the_most_important_tokens_are_kept(self):
        partial, full, asked = self.selected()
        for layer, head in PLACES:
            expected = [0, 1, 2, *by_importance(full, layer, head, asked, self.SINKS)[:9]]
            assert held(partial, layer, head) == expected
            assert torch.equal(partial.keys[layer, head], full.keys[layer, head, expected])

    def test_every_layer_and_head_chooses_for_itself(self):
        partial, _, _ = self.selected()
        assert len({tuple(held(partial, *place)) for place in PLACES}) == len(PLACES)

    def test_scores_are_summed_over_the_query_heads_of_a_group(self):
        partial, full, asked = self.selected()
        alone = torch.cat([asked[:, :, :1], torch.zeros_like(asked[:, :, 1:])], dim=2)
        assert held(partial, 0, 0)[3:] != by_importance(full, 0, 0, alone, self.SINKS)[:9]

    def test_a_sink_stays_however_unimportant_it_is(self):
        full, asked = noise_cache(50), queries(1)
        full.keys[0, 0, :3] = -100 * asked[0][0].sum(0)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS)
        partial.update(full, 0, asked)
        assert held(partial, 0, 0)[:3] == [0, 1, 2]

    def test_new_tokens_replace_the_least_important_first(self):
        partial, full, asked = self.selected()
        order = by_importance(full, 1, 2, asked, self.SINKS)[:9]
        full.length = 52
        partial.update(full, 50, queries(2))
        assert held(partial, 1, 2) == [0, 1, 2, *order[:7], 51, 50]
        full.length = 53
        partial.update(full, 52, queries(3))
        assert held(partial, 1, 2) == [0, 1, 2, *order[:6], 52, 51, 50]
        assert torch.equal(partial.keys[1, 2], full.keys[1, 2, held(partial, 1, 2)])
        assert partial.num_selections == 1

    def test_it_selects_again_exactly_when_the_selected_ones_are_used_up(self):
        partial, full, _ = self.selected()
        for length in range(51, 60):  # nine selected tokens are replaced one by one
            full.length = length
            partial.update(full, length - 1, queries(length))
            assert partial.num_selections == 1
        assert sorted(held(partial, 0, 1)) == [0, 1, 2, *range(50, 59)]
        full.length = 60
        partial.update(full, 59, queries(60))
        assert partial.num_selections == 2
        assert held(partial, 0, 1)[3:] == by_importance(full, 0, 1, queries(60), self.SINKS)[:9]

    def test_it_selects_again_when_a_step_needs_more_than_are_left(self):
        partial, full, _ = self.selected()
        full.length = 58
        partial.update(full, 50, queries(2))  # one selected token is left
        assert partial.num_selections == 1
        full.length = 60
        partial.update(full, 58, queries(3))
        assert partial.num_selections == 2

    @pytest.mark.parametrize("importance", [True, False])
    def test_a_context_shorter_than_the_budget_is_kept_whole_and_in_order(self, importance: bool):
        full = noise_cache(5)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS, importance)
        assert held(partial, 0, 0) == []
        for begin, length in ((0, 5), (5, 6), (6, 11), (11, 12)):
            full.length = length
            partial.update(full, begin, queries(length))
            for layer, head in PLACES:
                assert held(partial, layer, head) == list(range(length))
        assert torch.equal(partial.keys, full.keys[:, :, :12])
        assert partial.num_selections == 0

    def test_the_first_selection_comes_when_the_context_outgrows_the_budget(self):
        full = noise_cache(11)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS)
        partial.update(full, 0, queries(1))
        full.length = 13
        partial.update(full, 11, queries(2))
        assert partial.num_selections == 1
        assert held(partial, 0, 0) == [0, 1, 2, *by_importance(full, 0, 0, queries(2), self.SINKS)[:9]]

    def test_sinks_never_fill_the_whole_budget(self):
        full = noise_cache(30)
        partial = PartialCache(SHAPE, budget=4, num_sinks=9)
        partial.update(full, 0, queries(1))
        for length in range(31, 35):
            full.length = length
            partial.update(full, length - 1, queries(length))
            assert held(partial, 0, 0)[:3] == [0, 1, 2]
            # Room for one: selected anew when it has been replaced, then replaced, and so on.
        assert partial.num_selections == 3

    def test_the_rows_of_a_draft_pass_are_their_own_tail_and_are_not_kept(self):
        partial, _, _ = self.selected()
        before = [tuple(held(partial, *place)) for place in PLACES]
        view = store(partial, [700, 701])
        assert partial.num_tail_tokens == 0
        assert view.prefix_keys.shape[2] == self.BUDGET
        for layer in range(SHAPE.num_layers):
            keys, values = rows([700, 701], layer)
            assert torch.equal(view.tail_keys[layer], keys)
            assert torch.equal(view.tail_values[layer], values)
        assert not (partial.keys >= 700).any()
        assert [tuple(held(partial, *place)) for place in PLACES] == before
        assert partial.length == self.BUDGET


class TestSlidingWindow:
    BUDGET, SINKS = 10, 3

    @pytest.mark.parametrize("num_prompt_tokens", [1, 2, 4, 9, 10, 11, 30])
    def test_sinks_and_the_most_recent_tokens_are_kept(self, num_prompt_tokens: int):
        full = noise_cache(num_prompt_tokens)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS, by_importance=False)
        partial.update(full, 0, queries(0))
        rng = random.Random(num_prompt_tokens)
        while full.length < 200:
            begin = full.length
            full.length += rng.randint(1, 5)
            partial.update(full, begin, queries(0))
            window = range(max(self.SINKS, full.length - self.BUDGET + self.SINKS), full.length)
            expected = [*range(min(self.SINKS, full.length)), *window]
            for layer, head in PLACES:
                tokens = held(partial, layer, head)
                assert sorted(tokens) == expected
                assert torch.equal(
                    partial.keys[layer, head, : partial.length], full.keys[layer, head, tokens]
                )

    def test_a_window_that_slides_is_not_selected_again(self):
        full = noise_cache(30)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS, by_importance=False)
        partial.update(full, 0, queries(0))
        for length in range(31, 200):
            full.length = length
            partial.update(full, length - 1, queries(0))
        assert partial.num_selections == 1

    def test_more_new_tokens_than_the_window_holds_start_it_afresh(self):
        full = noise_cache(12)
        partial = PartialCache(SHAPE, self.BUDGET, self.SINKS, by_importance=False)
        partial.update(full, 0, queries(0))
        full.length = 40
        partial.update(full, 12, queries(0))
        assert sorted(held(partial, 0, 0)) == [0, 1, 2, *range(33, 40)]


def test_bytes_of_the_partial_cache_are_counted():
    # 2 (keys, values) x 2 layers x 3 heads x 10 tokens x 4 numbers x 4 bytes
    assert PartialCache(SHAPE, 10, 2).num_bytes == 2 * 2 * 3 * 10 * 4 * 4
