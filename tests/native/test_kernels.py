"""The native CPU kernels: against plain PyTorch in float64, and the bits of a row whatever surrounds it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from support.tiny import random_tree, shuffled
from swiftgen.forward.attention import seen_keys
from swiftgen.forward.cache import CacheShape, FullCache
from swiftgen.forward.native_pass import NativePass, layer_kinds
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.passes import Heads as LayerHeads
from swiftgen.forward.tree import DraftTree
from swiftgen.native.build import kernels_for
from swiftgen.native.structs import ACTIVATIONS, Norm

CPU = torch.device("cpu")
KERNELS = kernels_for("auto", CPU, torch.float32, 64)
if KERNELS is None:
    pytest.skip("this machine cannot build the native kernels", allow_module_level=True)

NUM_LAYERS, LAYER, NUM_KV_HEADS = 3, 1, 2
EPS = 1e-6
ROTARY_BASE = 10_000
# Rounding of one number, and what a softmax over thousands of keys may lose on top of it.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
CONTEXTS = [0, 90, 300, 430, 710, 1200, 1700, 3000]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model."""

    dtype: torch.dtype
    group: int = 3
    head_dim: int = 16
    has_norms: bool = True
    window: int | None = None
    cap: float = 0.0

    @property
    def num_heads(self) -> int:
        return NUM_KV_HEADS * self.group

    @property
    def scaling(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(NUM_LAYERS, NUM_KV_HEADS, self.head_dim, self.dtype, CPU)

    def norms(self) -> tuple[Tensor, Tensor, float] | None:
        """Weights for query and key heads, and epsilon."""
        q, k = 1 + 0.3 * random_numbers((2, self.head_dim), seed=8)
        return (q.to(self.dtype), k.to(self.dtype), EPS) if self.has_norms else None

    def random_rows(self, num_rows: int, seed: int = 0) -> Tensor:
        """Queries, keys and values before RoPE, sharper than usual: `[T, (H + 2 Hkv) * D]`."""
        width = (self.num_heads + 2 * NUM_KV_HEADS) * self.head_dim
        return (1.5 * random_numbers((num_rows, width), seed)).to(self.dtype)

    def filled_cache(self, num_tokens: int) -> FullCache:
        """Random keys and values; NaN wherever nothing has been written."""
        cache = FullCache(self.cache_shape, num_tokens + 300)
        for seed, tensor in enumerate((cache.keys, cache.values)):
            tensor.copy_(1.5 * random_numbers(tensor.shape, seed + 40))
            tensor[:, :, num_tokens:] = float("nan")
        cache.length = num_tokens
        return cache


def random_numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the two halves of a head, float64 `[T, D]`."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    halves = positions.double().unsqueeze(1) * frequencies
    both = torch.cat([halves, halves], dim=1)
    return both.cos(), both.sin()


def positions_of(tree: DraftTree, cache: FullCache | PartialCache, first: int, num_rows: int) -> Tensor:
    depths = tree.depths[first : first + num_rows]
    return cache.length + torch.tensor(depths + [0] * (num_rows - len(depths)))


@dataclass
class Done:
    """What one layer of a pass has left behind."""

    out: Tensor  # [T, H * D]
    queries: Tensor  # [Hkv, G, T, D]


def attend(
    heads: Heads,
    tree: DraftTree,
    rows: Tensor,
    cache: FullCache | PartialCache,
    first: int = 0,
    rotary_dim: int | None = None,
) -> Done:
    """One layer of one pass over rows `first` and up; those beyond the tree are padding."""
    assert KERNELS is not None
    num_rows = len(rows)
    visible = tree.visibility(first + num_rows)[first:]
    positions = positions_of(tree, cache, 0, first + num_rows)
    view = cache.view(num_rows, first, heads.window)
    seen = seen_keys(view, visible, positions, heads.window)
    kinds = layer_kinds([heads.window] * NUM_LAYERS, [""] * NUM_LAYERS)
    native = NativePass(KERNELS, kinds, [view], [seen], heads.num_heads)
    rotary_dim = rotary_dim or heads.head_dim
    cos, sin = (x.float() for x in angles(positions[first:], rotary_dim))
    half = rotary_dim // 2
    signed_sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=1)
    rotary = cos.unsqueeze(1).contiguous(), signed_sin.unsqueeze(1).contiguous()
    layer_heads = LayerHeads(heads.num_heads, NUM_KV_HEADS, heads.scaling, heads.norms(), heads.cap)
    out = native.attend(LAYER, rows.unsqueeze(0).contiguous(), rotary, layer_heads)
    assert out.shape == (1, num_rows, heads.num_heads * heads.head_dim)
    assert out.dtype == heads.dtype
    queries = native.stacked_queries()
    assert queries.shape == (NUM_LAYERS, NUM_KV_HEADS, heads.group, num_rows, heads.head_dim)
    return Done(out[0], queries[LAYER])


def rotated_reference(heads: Heads, x: Tensor, weight: Tensor | None, positions: Tensor) -> Tensor:
    """Head norm and RoPE in float64, then rounded as a cache rounds: `[T, n, D]` -> `[n, T, D]`."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    cos, sin = (part.unsqueeze(1) for part in angles(positions, heads.head_dim))
    first, second = x.chunk(2, dim=-1)
    x = x * cos + torch.cat([-second, first], dim=-1) * sin
    return x.to(heads.dtype).double().transpose(0, 1)


def rotated_rows(heads: Heads, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[H, T, D]`, keys and values `[Hkv, T, D]`, float64."""
    split = rows.view(len(rows), -1, heads.head_dim).split([heads.num_heads, NUM_KV_HEADS, NUM_KV_HEADS], 1)
    norms = heads.norms() or (None, None, EPS)
    q = rotated_reference(heads, split[0], norms[0], positions)
    k = rotated_reference(heads, split[1], norms[1], positions)
    return q, k, split[2].double().transpose(0, 1)


def reference(
    heads: Heads, tree: DraftTree, rows: Tensor, cached_keys: Tensor, cached_values: Tensor
) -> Tensor:
    """Softmax over all cached tokens `[Hkv, n, D]` and the row's ancestors, in float64: `[T, H * D]`."""
    num_rows, num_cached = len(rows), cached_keys.shape[1]
    positions = num_cached + torch.tensor(tree.depths + [0] * (num_rows - len(tree)))
    q, k, v = rotated_rows(heads, rows, positions)
    keys = torch.cat([cached_keys.double(), k], dim=1).repeat_interleave(heads.group, 0)
    values = torch.cat([cached_values.double(), v], dim=1).repeat_interleave(heads.group, 0)
    seen = torch.zeros(num_rows, num_cached + num_rows, dtype=torch.bool)
    seen[:, :num_cached] = True
    for row in range(num_rows):
        for node in tree.path(row) if row < len(tree) else [row]:
            seen[row, num_cached + node] = True
    if heads.window is not None:
        of_keys = torch.cat([torch.arange(num_cached), positions])
        seen &= of_keys > positions.unsqueeze(1) - heads.window
    scores = q @ keys.transpose(1, 2) * heads.scaling  # [H, T, keys]
    if heads.cap:
        scores = heads.cap * torch.tanh(scores / heads.cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1).reshape(num_rows, -1)


# Context, group, head_dim, rows: every value of each at least once, odd ones together.
COMBINATIONS = [
    (0, 3, 8, 2),
    (0, 1, 16, 128),
    (1, 1, 16, 8),
    (100, 4, 64, 16),
    (127, 3, 80, 33),
    (128, 1, 128, 2),
    (200, 3, 16, 128),
    (1023, 4, 8, 33),
    (1024, 3, 64, 8),
    (1357, 1, 80, 16),
    (3000, 4, 128, 16),
    (3000, 3, 64, 2),
]


@both_dtypes
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize(("num_context", "group", "head_dim", "num_rows"), COMBINATIONS)
def test_a_tree_attends_like_softmax_over_the_visible_keys(
    num_context: int, group: int, head_dim: int, num_rows: int, has_norms: bool, dtype: torch.dtype
):
    heads = Heads(dtype, group, head_dim, has_norms)
    tree, rows = random_tree(num_context, num_rows - num_rows // 5), heads.random_rows(num_rows)
    cache = heads.filled_cache(num_context)
    committed = cache.keys[LAYER, :, :num_context], cache.values[LAYER, :, :num_context]
    expected = reference(heads, tree, rows, *committed)
    actual = attend(heads, tree, rows, cache).out.double()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@both_dtypes
@pytest.mark.parametrize("cap", [0.0, 1.5, 50.0])
@pytest.mark.parametrize("window", [None, 1, 3, 70, 128, 200, 512, 5000])
@pytest.mark.parametrize("num_context", [0, 127, 128, 300, 1200])
def test_a_row_sees_its_window_and_its_scores_are_capped(
    num_context: int, window: int | None, cap: float, dtype: torch.dtype
):
    heads = Heads(dtype, window=window, cap=cap)
    tree, rows, cache = random_tree(num_context, 13), heads.random_rows(16), heads.filled_cache(num_context)
    committed = cache.keys[LAYER, :, :num_context], cache.values[LAYER, :, :num_context]
    expected = reference(heads, tree, rows, *committed)
    actual = attend(heads, tree, rows, cache).out.double()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("rotary_dim", [2, 8, 14])
def test_only_the_first_dimensions_of_a_head_are_turned(rotary_dim: int):
    heads = Heads(torch.float32, has_norms=False)
    tree, rows, cache = random_tree(3, 8), heads.random_rows(8), heads.filled_cache(90)
    positions = positions_of(tree, cache, 0, 8)
    whole = rotated_rows(
        replace(heads, head_dim=rotary_dim),
        rows.unflatten(1, (-1, 16))[..., :rotary_dim].flatten(1),
        positions,
    )
    done = attend(heads, tree, rows, cache, rotary_dim=rotary_dim)
    turned, rest = done.queries.flatten(0, 1).double().split([rotary_dim, 16 - rotary_dim], dim=-1)
    torch.testing.assert_close(turned, whole[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(rest, rows.view(8, -1, 16)[:, :6, rotary_dim:].double().transpose(0, 1))


@both_dtypes
@pytest.mark.parametrize("num_kept", [0, 1, 40, 100, 127, 128, 129, 1023, 1025, 1111, 1300, 3000])
def test_a_draft_pass_attends_to_a_partial_cache_of_any_length(num_kept: int, dtype: torch.dtype):
    heads = Heads(dtype)
    partial = PartialCache(heads.cache_shape, budget=max(num_kept, 2) + 7, num_sinks=1)
    for tensor in (partial.keys, partial.values):
        tensor.fill_(float("nan"))
    if num_kept:
        partial.update(heads.filled_cache(num_kept), 0, torch.empty(0))
    assert partial.length == num_kept
    before = partial.keys.clone(), partial.values.clone()
    tree, rows = DraftTree(0, max_depth=0), heads.random_rows(4)  # 3 rows of padding
    kept = partial.keys[LAYER, :, :num_kept], partial.values[LAYER, :, :num_kept]
    expected = reference(heads, tree, rows, *kept)
    actual = attend(heads, tree, rows, partial).out
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    for tensor, old in zip((partial.keys, partial.values), before, strict=True):  # rows are not kept
        torch.testing.assert_close(tensor[:, :, :num_kept], old[:, :, :num_kept], rtol=0, atol=0)
    assert partial.length == num_kept
    for num_rows in (2, 8, 16):
        assert torch.equal(attend(heads, tree, heads.random_rows(num_rows), partial).out[0], actual[0])


def heads_of(num_context: int, dtype: torch.dtype) -> Heads:
    """Other heads for every context, so that all are tested without a product of both."""
    group, head_dim = {0: (3, 16), 90: (1, 64), 300: (3, 64), 1200: (4, 80), 3000: (3, 128)}.get(
        num_context, (4, 16)
    )
    window = {430: 70, 710: 512, 1700: 3}.get(num_context)
    return Heads(dtype, group, head_dim, window=window, cap=2.0 if num_context in (710, 1200) else 0.0)


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@both_dtypes
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_the_number_of_threads_changes_no_bit(num_context: int, dtype: torch.dtype, num_threads: int):
    heads, tree = heads_of(num_context, dtype), random_tree(1, num_nodes=16)
    rows, cache = heads.random_rows(16), heads.filled_cache(num_context)
    done = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        done.append(attend(heads, tree, rows, cache))
    for other in done[1:]:
        assert torch.equal(other.out, done[0].out)
        assert torch.equal(other.queries, done[0].queries)


@both_dtypes
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_the_number_of_rows_changes_no_bit_of_a_row(num_context: int, dtype: torch.dtype):
    heads, tree = heads_of(num_context, dtype), DraftTree(0, max_depth=6)
    tree.add_path(0, [1], "base")
    cache = heads.filled_cache(num_context)
    expected = attend(heads, tree, heads.random_rows(2), cache)
    for num_rows in range(3, 65):
        padding = heads.random_rows(num_rows - 2, seed=num_rows)
        actual = attend(heads, tree, torch.cat([heads.random_rows(2), padding]), cache)
        assert actual.out.isfinite().all(), num_rows
        assert torch.equal(actual.out[:2], expected.out), num_rows
        assert torch.equal(actual.queries[:, :, :2], expected.queries), num_rows


@both_dtypes
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_wrong_siblings_change_no_bit_of_a_chain(num_context: int, dtype: torch.dtype):
    heads, chain = heads_of(num_context, dtype), DraftTree(0, max_depth=6)
    chain.add_path(0, [1, 2, 3], "base")
    rows = heads.random_rows(64)
    expected = attend(heads, chain, rows[:4], heads.filled_cache(num_context)).out
    for num_siblings in (1, 4, 12, 28, 60):
        crowd, rng = DraftTree(0, max_depth=6), random.Random(num_siblings)
        crowd.add_path(0, [1, 2, 3], "base")
        while len(crowd) < 4 + num_siblings:
            crowd.add(rng.randrange(len(crowd)), 10 + rng.randrange(999), "ngram")
        actual = attend(heads, crowd, rows[: len(crowd)], heads.filled_cache(num_context)).out
        assert torch.equal(actual[:4], expected), num_siblings


@both_dtypes
@pytest.mark.parametrize("num_nodes", [12, 64, 128])
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_the_order_of_drafts_in_memory_changes_no_bit_of_a_row(
    num_context: int, num_nodes: int, dtype: torch.dtype
):
    heads, tree = heads_of(num_context, dtype), random_tree(num_context, num_nodes)
    rows = heads.random_rows(num_nodes)
    expected = attend(heads, tree, rows, heads.filled_cache(num_context))
    for seed in range(3):
        other, places = shuffled(tree, seed)
        assert places != list(range(num_nodes))
        moved = torch.empty_like(rows).index_copy_(0, torch.tensor(places), rows)
        actual = attend(heads, other, moved, heads.filled_cache(num_context))
        assert torch.equal(actual.out[places], expected.out)
        assert torch.equal(actual.queries[:, :, places], expected.queries)


@both_dtypes
@pytest.mark.parametrize("num_nodes", [12, 64, 128])
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_a_row_has_the_bits_of_plain_decoding(num_context: int, num_nodes: int, dtype: torch.dtype):
    """Its ancestors are rows of the same tree, or committed one by one by passes of one live row."""
    heads, tree = heads_of(num_context, dtype), random_tree(num_context, num_nodes)
    rows = heads.random_rows(num_nodes)
    cache = heads.filled_cache(num_context)
    together = attend(heads, tree, rows, cache)
    deepest = max(range(num_nodes), key=tree.depths.__getitem__)
    assert tree.depths[deepest] > 2
    alone = heads.filled_cache(num_context)
    for node in {deepest, *range(num_nodes - 1, 0, -4)}:
        alone.length = num_context
        for ancestor in tree.path(node):
            pair = torch.cat([rows[ancestor : ancestor + 1], heads.random_rows(1, seed=77)])  # 1 of padding
            done = attend(heads, DraftTree(0, max_depth=0), pair, alone)
            slot = num_context + ancestor
            assert torch.equal(done.out[0], together.out[ancestor])
            assert torch.equal(done.queries[:, :, 0], together.queries[:, :, ancestor])
            assert torch.equal(alone.keys[LAYER, :, alone.length], cache.keys[LAYER, :, slot])
            assert torch.equal(alone.values[LAYER, :, alone.length], cache.values[LAYER, :, slot])
            alone.commit([0])


@both_dtypes
@pytest.mark.parametrize("num_first", [1, 16, 37, 60])
@pytest.mark.parametrize("num_context", CONTEXTS)
def test_a_tree_in_two_passes_has_the_bits_of_one(num_context: int, num_first: int, dtype: torch.dtype):
    heads, tree = heads_of(num_context, dtype), random_tree(5, num_nodes=64)
    rows = heads.random_rows(64)
    whole_cache, cache = heads.filled_cache(num_context), heads.filled_cache(num_context)
    whole = attend(heads, tree, rows, whole_cache)
    first = attend(heads, tree, rows[:num_first], cache)
    second = attend(heads, tree, rows[num_first:], cache, first=num_first)
    assert torch.equal(torch.cat([first.out, second.out]), whole.out)
    assert torch.equal(torch.cat([first.queries, second.queries], dim=2), whole.queries)
    torch.testing.assert_close(cache.keys, whole_cache.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, whole_cache.values, rtol=0, atol=0, equal_nan=True)


@both_dtypes
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "head norms"])
def test_rows_are_written_to_their_layer_and_slots_and_nowhere_else(has_norms: bool, dtype: torch.dtype):
    heads, tree = Heads(dtype, has_norms=has_norms), random_tree(2, num_nodes=8)
    rows, cache = heads.random_rows(10), heads.filled_cache(150)
    expected_keys, expected_values = cache.keys.clone(), cache.values.clone()
    done = attend(heads, tree, rows, cache)
    q, k, v = rotated_rows(heads, rows, positions_of(tree, cache, 0, 10))
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8  # a rounding may go the other way
    written = cache.keys[LAYER, :, 150:160].clone()
    torch.testing.assert_close(written.double(), k, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(done.queries.flatten(0, 1).double(), q, rtol=tolerance, atol=1e-6)
    expected_keys[LAYER, :, 150:160], expected_values[LAYER, :, 150:160] = written, v.to(dtype)
    torch.testing.assert_close(cache.keys, expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, expected_values, rtol=0, atol=0, equal_nan=True)


@both_dtypes
@pytest.mark.parametrize("num_context", [0, 150, 1200])
def test_huge_scores_do_not_overflow(num_context: int, dtype: torch.dtype):
    heads, tree = Heads(dtype, has_norms=False), random_tree(1, num_nodes=8)
    rows, cache = heads.random_rows(10), heads.filled_cache(num_context)
    rows[:, : heads.num_heads * heads.head_dim] *= 300
    committed = cache.keys[LAYER, :, :num_context], cache.values[LAYER, :, :num_context]
    expected = reference(heads, tree, rows, *committed)
    actual = attend(heads, tree, rows, cache).out
    assert actual.isfinite().all()
    if dtype == torch.float32:  # bfloat16 rounds such queries by more than their scores lie apart
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [1, 7, 48, 50, 80, 576])
class TestElementwise:
    """RMSNorm and SiLU of widths that are and are not multiples of a vector."""

    def ulp(self, dtype: torch.dtype) -> float:
        return 1e-6 if dtype == torch.float32 else 2**-8

    def norm_reference(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.double()
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    @both_dtypes
    @pytest.mark.parametrize("eps", [1e-6, 0.5])
    def test_rms_norm(self, width: int, eps: float, dtype: torch.dtype):
        assert KERNELS is not None
        x, weight = random_numbers((1, 5, width), 1).to(dtype), random_numbers((width,), 2).to(dtype)
        before = x.clone()
        actual = KERNELS.rms_norm(x, Norm(weight, eps))
        assert actual.dtype == dtype
        expected = self.norm_reference(x, weight, eps)
        torch.testing.assert_close(actual.double(), expected, rtol=self.ulp(dtype), atol=1e-7)
        assert torch.equal(x, before)
        for row in range(5):
            assert torch.equal(KERNELS.rms_norm(x[:, row : row + 1], Norm(weight, eps))[0, 0], actual[0, row])

    @both_dtypes
    def test_the_norm_of_nothing_is_nothing(self, width: int, dtype: torch.dtype):
        assert KERNELS is not None
        zeros = torch.zeros(1, 2, width, dtype=dtype)
        assert torch.equal(KERNELS.rms_norm(zeros, Norm(torch.ones(width, dtype=dtype), EPS)), zeros)
        assert torch.equal(KERNELS.rms_norm(zeros + 1, Norm()), zeros + 1)  # of no norm

    @both_dtypes
    @pytest.mark.parametrize("scale", [1.0, 0.3])
    def test_add(self, width: int, scale: float, dtype: torch.dtype):
        assert KERNELS is not None
        x, delta = random_numbers((2, 1, 5, width), 3).to(dtype)
        weight = random_numbers((width,), 4).to(dtype)
        before = x.clone(), delta.clone()
        plain = KERNELS.add(x, delta, Norm(), scale)
        assert torch.equal(plain, x + delta) or scale != 1
        tolerance = {"rtol": self.ulp(dtype), "atol": 1e-6}
        torch.testing.assert_close(plain.double(), x.double() + scale * delta.double(), **tolerance)
        expected = x.double() + scale * self.norm_reference(delta, weight, EPS)
        actual = KERNELS.add(x, delta, Norm(weight, EPS), scale)
        torch.testing.assert_close(actual.double(), expected, **tolerance)
        assert torch.equal(x, before[0])
        assert torch.equal(delta, before[1])

    @both_dtypes
    @pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
    def test_gate(self, width: int, activation: int, dtype: torch.dtype):
        assert KERNELS is not None
        gate_up = (4 * random_numbers((1, 5, 2 * width), 5)).to(dtype)
        actual = KERNELS.gate(gate_up, activation)
        assert (actual.shape, actual.dtype) == ((1, 5, width), dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        expected = ACTIVATIONS[activation](gate) * up
        torch.testing.assert_close(actual.double(), expected, rtol=4 * self.ulp(dtype), atol=1e-6)
        for row in range(5):
            one = gate_up[:, row : row + 1].contiguous()
            assert torch.equal(KERNELS.gate(one, activation)[0, 0], actual[0, row])

    @both_dtypes
    @pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
    @pytest.mark.parametrize("gate", [100.0, -100.0, 88.5, -88.5, -86.5, 1e30, -1e30, 0.0, -0.0])
    def test_a_gate_of_extremes(self, width: int, gate: float, activation: int, dtype: torch.dtype):
        assert KERNELS is not None
        gates, up = torch.full((1, 2, width), gate, dtype=dtype), random_numbers((1, 2, width), 6).to(dtype)
        actual = KERNELS.gate(torch.cat([gates, up], dim=-1), activation)
        expected = ACTIVATIONS[activation](gates.double()) * up.double()
        torch.testing.assert_close(actual.double(), expected, rtol=self.ulp(dtype), atol=1e-35)
        if gate > 80:  # both are the identity there: one product, rounded to nearest even
            assert torch.equal(actual, (gates.float() * up.float()).to(dtype))
