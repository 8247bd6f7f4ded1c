"""Tree attention against plain softmax over the visible keys, and the kernels of the prefix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from support.tiny import random_tree, shuffled
from swiftgen.forward.attention import (
    SPLIT_PREFIX_TOKENS,
    PrefixKernel,
    TreePass,
    cpu_prefix,
    new_tree_pass,
    sdpa_prefix,
    tree_attention,
)
from swiftgen.forward.cache import BLOCK_TOKENS, CacheShape, FullCache
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.tree import DraftTree

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
GROUP = NUM_HEADS // NUM_KV_HEADS
SCALING = 0.3
# Rounding of one number, and what a softmax over 1,000 keys may lose on top of it.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def filled_cache(num_tokens: int, dtype: torch.dtype) -> FullCache:
    cache = FullCache(CacheShape(2, NUM_KV_HEADS, HEAD_DIM, dtype, CPU), num_tokens + 64)
    generator = torch.Generator().manual_seed(num_tokens)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    cache.length = num_tokens
    return cache


def random_rows(num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a pass, as transformers hands them over: `[1, heads, T, D]`, not contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def rows(num_heads: int) -> Tensor:
        tensor = torch.randn(1, num_rows, num_heads, HEAD_DIM, generator=generator)
        return tensor.to(dtype).transpose(1, 2)

    return rows(NUM_HEADS), rows(NUM_KV_HEADS), rows(NUM_KV_HEADS)


def attend(
    tree: DraftTree,
    rows: tuple[Tensor, Tensor, Tensor],
    cache: FullCache | PartialCache,
    kernel: PrefixKernel,
    first: int = 0,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, TreePass]:
    """One layer of one pass over rows `first` and up; the output is `[T, H, D]`."""
    num_rows = rows[0].shape[2]
    visible = tree.visibility(first + num_rows)[first:]
    positions = torch.tensor((tree.depths + [0] * num_rows)[: first + num_rows]) + cache.length
    tree_pass = new_tree_pass(cache, [None, window], visible, positions, GROUP, kernel)
    module = SimpleNamespace(layer_idx=1)
    out, weights = tree_attention(module, *rows, None, scaling=SCALING, tree_pass=tree_pass, softcap=softcap)
    assert weights is None
    assert out.dtype == rows[0].dtype
    return out[0], tree_pass


def reference(
    tree: DraftTree,
    rows: tuple[Tensor, Tensor, Tensor],
    cache: FullCache,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax over the committed tokens and the row's ancestors, in float64, keys repeated: `[T, H, D]`."""
    query, key, value = (tensor[0].double() for tensor in rows)
    keys = torch.cat([cache.keys[1, :, : cache.length].double(), key], dim=1).repeat_interleave(GROUP, 0)
    values = torch.cat([cache.values[1, :, : cache.length].double(), value], dim=1).repeat_interleave(
        GROUP, 0
    )
    seen = torch.zeros(query.shape[1], keys.shape[1], dtype=torch.bool)
    seen[:, : cache.length] = True
    for row in range(query.shape[1]):
        for node in tree.path(row) if row < len(tree) else [row]:
            seen[row, cache.length + node] = True
    depths = torch.tensor((tree.depths + [0] * len(seen))[: len(seen)])
    positions = torch.cat([torch.arange(cache.length), depths + cache.length])
    if window is not None:
        seen &= positions > (depths + cache.length - window).unsqueeze(1)
    scores = query @ keys.transpose(1, 2) * SCALING  # [H, T, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


CONTEXTS = [0, 1, 100, 127, 128, 200, SPLIT_PREFIX_TOKENS - 1, SPLIT_PREFIX_TOKENS, SPLIT_PREFIX_TOKENS + 333]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", [cpu_prefix, sdpa_prefix])
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_a_tree_attends_like_softmax_over_the_visible_keys(
    num_context: int, kernel: PrefixKernel, dtype: torch.dtype
):
    tree, rows = random_tree(num_context, num_nodes=13), random_rows(16, dtype)  # 3 rows of padding
    cache = filled_cache(num_context, dtype)
    expected = reference(tree, rows, cache)
    actual, _ = attend(tree, rows, cache, kernel)
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_a_tree_in_two_passes_attends_like_in_one():
    tree, rows = random_tree(3, num_nodes=16), random_rows(16, torch.float32)
    whole, _ = attend(tree, rows, filled_cache(150, torch.float32), cpu_prefix)
    cache = filled_cache(150, torch.float32)
    first, _ = attend(tree, tuple(x[:, :, :10] for x in rows), cache, cpu_prefix)
    second, _ = attend(tree, tuple(x[:, :, 10:] for x in rows), cache, cpu_prefix, first=10)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [cpu_prefix, sdpa_prefix])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 3, 100, 128, 129, 300, 1000, 5000])
@pytest.mark.parametrize("num_context", [2, 127, 128, 250, 700])
def test_a_row_sees_its_window(num_context: int, window: int, softcap: float | None, kernel: PrefixKernel):
    tree, rows = random_tree(num_context, num_nodes=13), random_rows(16, torch.float32)
    cache = filled_cache(num_context, torch.float32)
    expected = reference(tree, rows, cache, window, softcap)
    actual, _ = attend(tree, rows, cache, kernel, window=window, softcap=softcap)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_windowed_tree_in_two_passes_attends_like_in_one():
    tree, rows = random_tree(3, num_nodes=16), random_rows(16, torch.float32)
    whole, _ = attend(tree, rows, filled_cache(150, torch.float32), cpu_prefix, window=4)
    cache = filled_cache(150, torch.float32)
    first, _ = attend(tree, tuple(x[:, :, :10] for x in rows), cache, cpu_prefix, window=4)
    second, _ = attend(tree, tuple(x[:, :, 10:] for x in rows), cache, cpu_prefix, first=10, window=4)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_context", [5000, 5127])
def test_a_window_is_all_that_is_read(num_context: int):
    cache = filled_cache(num_context, torch.float32)
    view = cache.view(4, 0, window=300)
    assert view.edge_keys is not None
    num_read = view.prefix_keys.shape[2] + view.edge_keys.shape[2]
    assert num_read == 299  # before the block, by its first row
    assert view.edge_keys.shape[2] < BLOCK_TOKENS


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_context", [0, 90, 300, 1200])
def test_the_order_of_drafts_in_memory_changes_no_bit_of_a_row(
    num_context: int, dtype: torch.dtype, window: int | None
):
    tree, rows = random_tree(num_context, num_nodes=32), random_rows(32, dtype)
    expected, _ = attend(tree, rows, filled_cache(num_context, dtype), sdpa_prefix, window=window)
    for seed in range(3):
        other, places = shuffled(tree, seed)
        assert places != list(range(32))
        moved = tuple(torch.empty_like(x).index_copy_(2, torch.tensor(places), x) for x in rows)
        actual, _ = attend(other, moved, filled_cache(num_context, dtype), sdpa_prefix, window=window)
        assert torch.equal(actual[places], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_wrong_siblings_change_no_bit_of_a_chain(dtype: torch.dtype):
    chain = DraftTree(0, max_depth=6)
    chain.add_path(0, [1, 2, 3], "base")
    rows = random_rows(16, dtype)
    expected, _ = attend(chain, rows, filled_cache(200, dtype), sdpa_prefix)
    crowd = DraftTree(0, max_depth=6)
    crowd.add_path(0, [1, 2, 3], "base")
    crowd.add_path(1, [50, 51, 52, 53], "base")
    crowd.add_path(0, [60, 61, 62], "base")
    actual, _ = attend(crowd, rows, filled_cache(200, dtype), sdpa_prefix)
    assert torch.equal(actual[:4], expected[:4])
    assert not torch.equal(actual[4:11], expected[4:11])  # the crowd is not padding


def test_queries_are_handed_out_by_kv_head_and_group():
    tree, rows = random_tree(1, num_nodes=5), random_rows(5, torch.float32)
    _, tree_pass = attend(tree, rows, filled_cache(10, torch.float32), cpu_prefix)
    queries = tree_pass.stacked_queries()
    assert queries.shape == (1, NUM_KV_HEADS, GROUP, 5, HEAD_DIM)
    for head in range(NUM_HEADS):
        assert torch.equal(queries[0, head // GROUP, head % GROUP], rows[0][0, head])


def test_rows_are_stored_in_the_layer_of_the_module():
    cache = filled_cache(10, torch.float32)
    rows = random_rows(4, torch.float32)
    other_layer = cache.keys[0].clone(), cache.values[0].clone()
    attend(random_tree(1, num_nodes=4), rows, cache, cpu_prefix)
    assert torch.equal(cache.keys[1, :, 10:14], rows[1][0])
    assert torch.equal(cache.values[1, :, 10:14], rows[2][0])
    assert torch.equal(cache.keys[0], other_layer[0])
    assert torch.equal(cache.values[0], other_layer[1])


def test_prefix_parts_and_tail_are_merged_by_their_log_sum_exps():
    # The row sees itself: weight 1, value 5. Parts of the prefix: weight 3, value 1 and weight 4, value 2.
    # (1 x 5 + 3 x 1 + 4 x 2) / (1 + 3 + 4) = 2
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
        out = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(NUM_KV_HEADS, -1, GROUP, HEAD_DIM)
        lse = torch.tensor([3.0, 4.0]).log().view(1, 2, 1).expand(NUM_KV_HEADS, -1, GROUP)
        return out, lse

    rows = (torch.zeros(1, NUM_HEADS, 1, HEAD_DIM), *(torch.full((1, 2, 1, HEAD_DIM), 5.0),) * 2)
    out, _ = attend(DraftTree(0, 0), rows, filled_cache(128, torch.float32), kernel)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


def test_huge_scores_do_not_overflow():
    tree, (query, key, value) = random_tree(1, num_nodes=8), random_rows(8, torch.float32)
    rows = (query * 300, key, value)
    cache = filled_cache(150, torch.float32)
    expected = reference(tree, rows, cache)
    for kernel in (cpu_prefix, sdpa_prefix):
        actual, _ = attend(tree, rows, cache, kernel)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


def prefix_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("hqd,hnd->hqn", q.double(), k.double()) * scale
    lse = scores.exp().sum(-1).log()
    return torch.einsum("hqn,hnd->hqd", scores.softmax(-1), v.double()), lse


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the parts of a prefix: `[Hkv, S, R, D]`, `[Hkv, S, R]` -> `[Hkv, R, D]`, `[Hkv, R]`."""
    weights = torch.softmax(lse.double(), dim=1)
    return (weights.unsqueeze(-1) * out.double()).sum(1), torch.logsumexp(lse.double(), dim=1)


def random_prefix(num_keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 rows; keys and values as a view of a longer cache, which is what a pass hands over."""
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(NUM_KV_HEADS, GROUP * 4, HEAD_DIM, generator=generator).to(dtype)
    k, v = torch.randn(2, NUM_KV_HEADS, num_keys + 50, HEAD_DIM, generator=generator).to(dtype)
    return q, k[:, :num_keys], v[:, :num_keys]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_keys", [1, 128, 777, 1023, 1024, 1152, 4096])
def test_both_kernels_compute_the_same_prefix(num_keys: int, dtype: torch.dtype):
    prefix = random_prefix(num_keys, dtype)
    expected, expected_lse = prefix_reference(*prefix, SCALING)
    for kernel in (cpu_prefix, sdpa_prefix):
        out, lse = merged(*kernel(*prefix, SCALING))
        torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_keys", [1025, 1111])
def test_a_partial_cache_of_any_length_is_a_prefix(num_keys: int):
    """A draft pass hands over whatever the partial cache holds, not whole blocks."""
    prefix = random_prefix(num_keys, torch.float32)
    out, lse = merged(*cpu_prefix(*prefix, SCALING))
    expected, expected_lse = prefix_reference(*prefix, SCALING)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
