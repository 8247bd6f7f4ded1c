"""Stand-ins for packages that need a GPU: their functions in plain PyTorch, with their documented signatures
and their checks of the arguments. What a kernel leaves undefined is NaN here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Calls = list[dict[str, object]]


class NoWaiting(TorchDispatchMode):
    """Fails at operators for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique"), name
        if name in ("index", "index_put_"):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "indexed by a mask"
        return func(*args, **(kwargs or {}))


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., object]) -> None:
    """A package of this name that has the function."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, name, module)


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor) -> None:
    batch, _, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k_cache.shape[1:3]
    assert k_cache.shape == v_cache.shape == (batch, num_keys, num_kv_heads, head_dim)
    assert num_heads % num_kv_heads == 0
    assert head_dim <= 256
    assert head_dim % 8 == 0  # else flash-attn copies the whole cache
    for tensor in (q, k_cache, v_cache):
        assert tensor.dtype in (torch.float16, torch.bfloat16)
        assert tensor.dtype == q.dtype
        assert tensor.stride(-1) == 1
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.shape == (batch,)
    assert cache_seqlens.is_contiguous()


def _attended(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, softcap: float, empty: float):
    """`[B, R, H, D]` and log-sum-exps `[B, H, R]`, those of empty sequences 0 and `empty`."""
    batch, num_rows, num_heads, _ = q.shape
    out, lse = torch.zeros_like(q), torch.full((batch, num_heads, num_rows), empty)
    group = num_heads // k.shape[2]
    for i, length in enumerate(lengths.tolist()):
        if length:
            keys, values = (x[i, :length].float().repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,nhd->hqn", q[i].float(), keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[i] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values).to(q.dtype)
            lse[i] = scores.logsumexp(-1)
    return out, lse


def flash_attn_2(calls: Calls) -> Callable[..., object]:
    """Of flash-attn 2."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        _check(q, k_cache, v_cache, cache_seqlens)
        assert cache_batch_idx.dtype == torch.int32
        assert cache_batch_idx.tolist() == list(range(len(q)))
        assert k is v is rotary_cos is rotary_sin is cache_leftpad is block_table is alibi_slopes is None
        assert (causal, tuple(window_size)) == (False, (-1, -1))
        assert num_splits == 1  # else it cuts the keys by the capacity of the cache
        calls.append({"num_rows": q.shape[1], "num_spans": len(q)})
        out, lse = _attended(q, k_cache, v_cache, cache_seqlens, softmax_scale, softcap, float("inf"))
        return (out, lse) if return_softmax_lse else out

    return flash_attn_with_kvcache


def flash_attn_3(calls: Calls) -> Callable[..., object]:
    """Of FlashAttention 3 (hopper/flash_attn_interface.py)."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        _check(q, k_cache, v_cache, cache_seqlens)
        assert k is v is qv is rotary_cos is rotary_sin is cache_batch_idx is None
        assert page_table is cu_seqlens_q is None
        assert (causal, tuple(window_size)) == (False, (-1, -1))
        assert num_splits == 1  # else it cuts the keys by the number of rows
        calls.append({"num_rows": q.shape[1], "num_spans": len(q)})
        out, lse = _attended(q, k_cache, v_cache, cache_seqlens, softmax_scale, softcap, float("-inf"))
        return (out, lse) if return_softmax_lse else out

    return flash_attn_with_kvcache


def torch_varlen(calls: Calls) -> Callable[..., object]:
    """`torch.nn.attention.varlen.varlen_attn`."""

    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        assert query.shape[1:] == key.shape[1:] == value.shape[1:]
        assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32
        assert cu_seq_q.diff().tolist() == [max_q] * len(seqused_k)
        assert cu_seq_k.diff().tolist() == [max_k] * len(seqused_k)
        assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key))
        assert (num_splits, block_table, tuple(window_size)) == (1, None, (-1, -1))
        assert return_aux.lse
        calls.append({"num_rows": max_q, "num_spans": len(seqused_k)})
        out, lse = _attended(
            query.unflatten(0, (-1, max_q)),
            key.unflatten(0, (-1, max_k)),
            value.unflatten(0, (-1, max_k)),
            seqused_k,
            scale,
            0.0,
            float("inf"),
        )
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)  # [H, rows of all sequences]

    return varlen_attn
