"""The prefix on a GPU: cut into spans of a fixed length, each a sequence of its own to the kernel.

A GPU is filled by reading many parts of a long prefix at once. flash-attn can cut it by itself
(`num_splits`), but not in a way a row can rely on: flash-attn 2 divides the capacity of the cache, rather
than the length of the text, by `num_splits`, and FlashAttention 3 takes `num_splits` as an upper bound and
chooses below it by the number of rows. So the cut is made here, at multiples of `SPAN_TOKENS`, and the
kernels run without splits over a batch of spans. They are merged with the tail, in float64. A row then
depends on the keys alone: not on the other rows, the capacity, or the number of spans, since an empty span
weighs nothing.

Lengths are on the device and shapes need not follow them, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from swiftgen.forward.tail import capped
from swiftgen.system.devices import capability
from swiftgen.system.errors import first_line

SPAN_TOKENS = 4096
"""Shorter spans keep more of a GPU busy where there are few KV heads, longer ones leave less to merge."""
MAX_FLASH_HEAD_DIM = 256

SpanKernel = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(q [R, Hkv, D], k, v [P, SPAN_TOKENS, Hkv, D], lengths int32 [P], scale, softcap) -> out [P, R, Hkv, D],
lse [P, Hkv, R]; of a span of length 0 the output is 0, and the lse anything."""

logger = logging.getLogger(__name__)


class SpanPrefix:
    """A `PrefixKernel` (see attention.py) that computes spans.

    Args:
        kernel: Computes them.
        name: Says which kernel of which version: what the rounding depends on.
    """

    def __init__(self, kernel: SpanKernel, name: str) -> None:
        self._kernel = kernel
        self.__name__ = name

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Over all of the keys; they lie in a cache, see `CacheShape.empty`."""
        num_spans = -(-k.shape[1] // SPAN_TOKENS)
        begins = torch.arange(num_spans, dtype=torch.int32, device=k.device) * SPAN_TOKENS
        out, lse = self.over(q, k, v, (k.shape[1] - begins).clamp_(max=SPAN_TOKENS), scale, softcap)
        return out.permute(2, 0, 1, 3), lse.transpose(0, 1)

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Over the keys that `lengths` names.

        Args:
            q: `[Hkv, R, D]`.
            k, v: `[Hkv, keys, D]`; the cache they lie in must reach as far as the spans do.
            lengths: int32 `[P]`: keys in use of each span.

        Returns:
            `[P, R, Hkv, D]` and log-sum-exps `[P, Hkv, R]`: 0 and -inf where a length is 0.
        """
        num_spans = len(lengths)
        cut = _cut(k, num_spans), _cut(v, num_spans)
        out, lse = self._kernel(q.transpose(0, 1), *cut, lengths, scale, softcap)
        # Of an empty span flash-attn 2 says +inf.
        return out, lse.masked_fill_((lengths == 0)[:, None, None], float("-inf"))


def span_lengths(num_keys: int, num_spans: int) -> Tensor:
    """Keys in use of each span, int64 `[num_spans]`."""
    return (num_keys - torch.arange(num_spans) * SPAN_TOKENS).clamp_(0, SPAN_TOKENS)


def _cut(keys: Tensor, num_spans: int) -> Tensor:
    """`[Hkv, n, D]` as spans `[P, SPAN_TOKENS, Hkv, D]`, without a copy; the last may reach beyond n."""
    num_kv_heads, _, head_dim = keys.shape
    per_head, per_token, per_value = keys.stride()
    return keys.as_strided(
        (num_spans, SPAN_TOKENS, num_kv_heads, head_dim),
        (SPAN_TOKENS * per_token, per_token, per_head, per_value),
    )


def plain_spans(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Matrix products in float32, one span at a time: any device and dtype, no extra package.

    The shapes of the products are the same for every prefix.
    """
    queries = q.transpose(0, 1).float()
    places = torch.arange(k.shape[1], device=k.device)
    outs, lses = [], []
    for span in range(len(k)):
        unused = places >= lengths[span]
        scores = torch.bmm(queries, k[span].permute(1, 2, 0).float()) * scale  # [Hkv, R, span]
        scores = capped(scores, softcap)
        scores.masked_fill_(unused, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
        values = v[span].transpose(0, 1).float().masked_fill(unused[:, None], 0.0)
        outs.append(torch.bmm(weights, values).transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def flash_spans(attend: Callable[..., Any], is_flash_2: bool) -> SpanKernel:
    """Spans by `attend`, the function `flash_attn_with_kvcache` of flash-attn 2 or of FlashAttention 3."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        num_spans = len(lengths)
        index = torch.arange(num_spans, dtype=torch.int32, device=lengths.device)
        out, lse, *_ = attend(
            q.expand(num_spans, -1, -1, -1).contiguous(),
            k,
            v,
            cache_seqlens=lengths,
            # With an index flash-attn 2 takes its kernel for few rows (tiles of 64 instead of 128).
            cache_batch_idx=index if is_flash_2 else None,
            softmax_scale=scale,
            causal=False,
            softcap=softcap,
            num_splits=1,
            return_softmax_lse=True,
        )
        return out, lse

    return kernel


def torch_spans(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Spans by the flash-attn 2 that PyTorch carries; without its softcap."""
    if softcap:
        return plain_spans(q, k, v, lengths, scale, softcap)
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    num_spans, span_tokens, num_kv_heads, _ = k.shape
    num_rows = len(q)
    borders = torch.arange(num_spans + 1, dtype=torch.int32, device=q.device)
    out, lse = varlen_attn(
        q.repeat(num_spans, 1, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        borders * num_rows,
        borders * span_tokens,
        num_rows,
        span_tokens,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        seqused_k=lengths,
        num_splits=1,
    )
    return out.unflatten(0, (num_spans, num_rows)), lse.view(num_kv_heads, num_spans, num_rows).transpose(
        0, 1
    )


def best_prefix(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> SpanPrefix:
    """The fastest way to compute spans on a GPU.

    Args:
        name: The preset's `model.attention`: auto and flash take flash-attn, if it can be used.

    Raises:
        ImportError: with the reason, if the name is flash and flash-attn cannot be used.
    """
    problem = _flash_problem(device, dtype, head_dim)
    if name in ("auto", "flash"):
        if problem:
            unusable = problem
        else:
            try:
                return _installed_flash(device)
            except ImportError as error:
                unusable = first_line(error)
                if name == "auto" and not isinstance(error, ModuleNotFoundError):
                    logger.warning("flash-attn is not used: %s", unusable)
        if name == "flash":
            raise ImportError(unusable)
    if problem is None and _torch_has_varlen():
        return _named(torch_spans, "flash-attn of torch")
    return _named(plain_spans, "matrix products")


def _flash_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no flash kernel can compute this, if so."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"it needs a CUDA device and bfloat16 or float16, not {device.type} and {dtype}"
    if capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % 8:
        return f"it has no heads of width {head_dim}"
    return None


def _installed_flash(device: torch.device) -> SpanPrefix:
    """FlashAttention 3 on a Hopper card, else flash-attn 2.

    Raises:
        ModuleNotFoundError: if there is none.
        ImportError: if there is one that cannot be used, with the reason.
    """
    if capability(device)[0] == 9:
        try:
            attend = _flash_function("flash_attn_interface", "FlashAttention 3")
        except ModuleNotFoundError:
            pass
        else:
            return _named(flash_spans(attend, is_flash_2=False), f"flash-attn 3 {_version('flash_attn_3')}")
    attend = _flash_function("flash_attn", "flash-attn")
    return _named(flash_spans(attend, is_flash_2=True), f"flash-attn {_version('flash_attn')}")


def _named(kernel: SpanKernel, name: str) -> SpanPrefix:
    return SpanPrefix(kernel, f"{name} in spans of {SPAN_TOKENS}")


def _flash_function(module: str, name: str) -> Callable[..., Any]:
    try:
        found = import_module(module)
        attend: Callable[..., Any] = found.flash_attn_with_kvcache
        parameters = inspect.signature(attend).parameters
    except ModuleNotFoundError as error:
        if error.name == module:
            raise
        raise ImportError(f"{name} cannot be imported: {error}") from error
    except Exception as error:  # what a library built for another PyTorch raises is not always an ImportError
        raise ImportError(
            f"{name} cannot be imported (was it built for another PyTorch?): {error}"
        ) from error
    if missing := {"return_softmax_lse", "softcap", "num_splits"} - parameters.keys():
        raise ImportError(f"{name} is too old: it has no {', '.join(sorted(missing))}")
    return attend


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"


def _torch_has_varlen() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"seqused_k", "num_splits", "return_aux"} <= inspect.signature(varlen_attn).parameters.keys()
