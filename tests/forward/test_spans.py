"""The prefix in spans: against plain softmax, with stand-ins for the kernels of GPUs, and their choice."""

from __future__ import annotations

import builtins
import logging
import sys

import pytest
import torch
from torch import Tensor

from support import fakes
from swiftgen.forward import spans
from swiftgen.forward.attention import cpu_prefix
from swiftgen.forward.backend import choose_backend
from swiftgen.forward.cache import CacheShape
from swiftgen.forward.spans import SPAN_TOKENS, SpanPrefix, best_prefix, plain_spans, span_lengths
from swiftgen.system.errors import SwiftgenError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_KV_HEADS, NUM_ROWS, HEAD_DIM, SCALE = 2, 12, 16, 0.3
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SPAN = 128


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SPAN_TOKENS", SPAN)


@pytest.fixture
def calls() -> fakes.Calls:
    return []


@pytest.fixture(params=["plain", "flash-attn 2", "flash-attn 3", "torch"])
def prefix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, calls: fakes.Calls) -> SpanPrefix:
    if request.param == "torch":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fakes.torch_varlen(calls))
        return SpanPrefix(spans.torch_spans, "torch")
    if request.param == "flash-attn 2":
        return SpanPrefix(spans.flash_spans(fakes.flash_attn_2(calls), is_flash_2=True), "2")
    if request.param == "flash-attn 3":
        return SpanPrefix(spans.flash_spans(fakes.flash_attn_3(calls), is_flash_2=False), "3")
    return SpanPrefix(plain_spans, "plain")


def filled(num_keys: int, dtype: torch.dtype, capacity: int = 1000) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer of a cache; what lies behind them is not a number."""
    shape = CacheShape(1, NUM_KV_HEADS, HEAD_DIM, dtype, CPU)
    generator = torch.Generator().manual_seed(num_keys)
    both = []
    for _ in range(2):
        cache = shape.empty(capacity, SPAN)[0].fill_(float("nan"))
        cache[:, :num_keys] = torch.randn(NUM_KV_HEADS, num_keys, HEAD_DIM, generator=generator).to(dtype)
        both.append(cache)
    return both[0], both[1]


def queries(dtype: torch.dtype, num_rows: int = NUM_ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_KV_HEADS, num_rows, HEAD_DIM, generator=generator).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("hqd,hnd->hqn", q.double(), k.double()) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqn,hnd->hqd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the spans: `[Hkv, P, R, D]`, `[Hkv, P, R]` -> `[Hkv, R, D]`, `[Hkv, R]`."""
    weights = torch.softmax(lse.double(), dim=1)
    return (weights.unsqueeze(-1) * out.double()).sum(1), torch.logsumexp(lse.double(), dim=1)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("num_keys", [1, 127, 128, 129, 500, 768, 1000])
def test_spans_compute_the_softmax_over_all_keys(num_keys: int, softcap: float, prefix: SpanPrefix):
    q, (k, v) = queries(torch.bfloat16), filled(num_keys, torch.bfloat16)
    expected, expected_lse = reference(q, k[:, :num_keys], v[:, :num_keys], softcap)
    out, lse = prefix(q, k[:, :num_keys], v[:, :num_keys], SCALE, softcap)
    num_spans = -(-num_keys // SPAN)
    assert out.shape == (NUM_KV_HEADS, num_spans, NUM_ROWS, HEAD_DIM)
    assert lse.shape == (NUM_KV_HEADS, num_spans, NUM_ROWS)
    actual, actual_lse = merged(out, lse)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(actual_lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_plain_spans_have_any_dtype(dtype: torch.dtype):
    q, (k, v) = queries(dtype), filled(500, dtype)
    expected, _ = reference(q, k[:, :500], v[:, :500], 0.0)
    actual, _ = merged(*SpanPrefix(plain_spans, "")(q, k[:, :500], v[:, :500], SCALE))
    torch.testing.assert_close(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("num_keys", [0, 128, 500, 640])
def test_an_empty_span_weighs_nothing_and_the_capacity_changes_no_bit(num_keys: int, prefix: SpanPrefix):
    q, num_used = queries(torch.bfloat16), -(-num_keys // SPAN)
    results = []
    for capacity, num_spans in ((num_keys, num_used), (1000, 5), (1000, 8), (700, 6)):
        k, v = filled(num_keys, torch.bfloat16, capacity)
        lengths = span_lengths(num_keys, num_spans).int()
        assert int(lengths.sum()) == num_keys
        if num_spans:
            out, lse = prefix.over(q, k, v, lengths, SCALE)
            assert torch.equal(out[num_used:], torch.zeros_like(out[num_used:]))
            assert (lse[num_used:] == float("-inf")).all()
            results.append((out[:num_used], lse[:num_used]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_kernel_is_called_once_for_all_spans(calls: fakes.Calls):
    flash = SpanPrefix(spans.flash_spans(fakes.flash_attn_2(calls), is_flash_2=True), "2")
    flash(queries(torch.bfloat16), *(x[:, :500] for x in filled(500, torch.bfloat16)), SCALE)
    assert calls == [{"num_rows": NUM_ROWS, "num_spans": 4}]


class TestChoice:
    """Which kernel a GPU gets; none is there, so its capability is made up."""

    @pytest.fixture(autouse=True)
    def nothing_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability(monkeypatch, (8, 0))
        for name in ("flash_attn", "flash_attn_interface"):
            monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError

    def capability(self, monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]) -> None:
        monkeypatch.setattr(spans, "capability", lambda device: found)

    def name(self, asked: str = "auto", dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> str:
        return best_prefix(asked, CUDA, dtype, head_dim).__name__

    def test_a_cpu_has_its_own(self):
        for name in ("auto", "sdpa"):
            backend = choose_backend(name, CPU, torch.bfloat16, 128)
            assert backend.prefix is cpu_prefix
            assert backend.static_prefix is None

    def test_a_gpu_has_one_for_all_passes(self):
        for name in ("auto", "sdpa"):
            backend = choose_backend(name, CUDA, torch.bfloat16, 128)
            assert backend.prefix is backend.static_prefix
            assert backend.prefix.__name__ == self.name(name)
            assert backend.kernels is None

    def test_pytorch_alone_is_enough(self):
        for name in ("auto", "sdpa"):
            assert self.name(name).startswith("flash-attn of torch")

    def test_an_older_pytorch_has_matrix_products(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
        assert self.name().startswith("matrix products")

    def test_flash_attn_is_taken_where_it_is_installed(
        self, monkeypatch: pytest.MonkeyPatch, calls: fakes.Calls
    ):
        fakes.install(monkeypatch, "flash_attn", fakes.flash_attn_2(calls))
        assert self.name("auto", torch.float16).startswith("flash-attn of unknown version")
        assert self.name("flash").startswith("flash-attn of unknown version")
        assert self.name("sdpa").startswith("flash-attn of torch")

    def test_flash_attention_3_is_taken_on_hopper(self, monkeypatch: pytest.MonkeyPatch, calls: fakes.Calls):
        fakes.install(monkeypatch, "flash_attn", fakes.flash_attn_2(calls))
        fakes.install(monkeypatch, "flash_attn_interface", fakes.flash_attn_3(calls))
        assert self.name().startswith("flash-attn of unknown version")
        self.capability(monkeypatch, (9, 0))
        assert self.name().startswith("flash-attn 3")

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "found", "reason"),
        [
            (torch.float32, 128, (8, 0), "bfloat16 or float16"),
            (torch.bfloat16, 512, (8, 0), "heads of width 512"),
            (torch.bfloat16, 100, (8, 0), "heads of width 100"),
            (torch.float16, 128, (7, 5), "compute capability 8.0"),
        ],
    )
    def test_where_no_flash_kernel_fits(
        self,
        dtype: torch.dtype,
        head_dim: int,
        found: tuple[int, int],
        reason: str,
        monkeypatch: pytest.MonkeyPatch,
        calls: fakes.Calls,
    ):
        fakes.install(monkeypatch, "flash_attn", fakes.flash_attn_2(calls))
        self.capability(monkeypatch, found)
        assert self.name("auto", dtype, head_dim).startswith("matrix products")
        with pytest.raises(SwiftgenError, match=reason) as caught:
            choose_backend("flash", CUDA, dtype, head_dim)
        assert "flash-attn" in caught.value.hint
        assert "\n" not in caught.value.message

    def test_flash_on_a_cpu_is_an_error(self):
        with pytest.raises(SwiftgenError, match="needs a CUDA device"):
            choose_backend("flash", CPU, torch.bfloat16, 128)

    def test_flash_is_refused_where_it_is_not_installed(self):
        with pytest.raises(SwiftgenError, match="flash_attn"):
            choose_backend("flash", CUDA, torch.bfloat16, 128)

    def test_one_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
        def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, num_splits=0):
            raise AssertionError

        fakes.install(monkeypatch, "flash_attn", flash_attn_with_kvcache)
        with pytest.raises(SwiftgenError, match="too old: it has no return_softmax_lse, softcap"):
            choose_backend("flash", CUDA, torch.bfloat16, 128)
        assert self.name("auto").startswith("flash-attn of torch")
        assert "flash-attn is not used: flash-attn is too old" in caplog.text

    def test_one_that_was_built_for_another_pytorch(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        real = builtins.__import__

        def broken(name: str, *args: object) -> object:
            if name == "flash_attn":
                raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore")
            return real(name, *args)

        monkeypatch.setattr(spans, "import_module", broken)
        with pytest.raises(SwiftgenError, match=r"another PyTorch\?.*undefined symbol") as caught:
            choose_backend("flash", CUDA, torch.bfloat16, 128)
        assert "\n" not in caught.value.message
        with caplog.at_level(logging.WARNING):
            assert self.name("auto").startswith("flash-attn of torch")
        assert "undefined symbol" in caplog.text


def test_spans_are_whole_blocks():
    assert SPAN_TOKENS % 128 == 0
