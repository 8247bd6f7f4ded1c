"""The structs of `kernels.h`, field by field, and what keeps their tensors alive."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Pass(ctypes.Structure):
    """`Pass` of kernels.h."""

    _fields_ = (
        *[
            (name, ctypes.c_int32)
            for name in (
                *("is_bf16", "num_threads", "num_rows", "num_heads", "num_kv_heads", "head_dim"),
                *("num_prefix", "num_tail"),
            )
        ],
        *[
            (name, ctypes.c_void_p)
            for name in ("prefix_keys", "prefix_values", "tail_keys", "tail_values", "queries")
        ],
        *[
            (name, ctypes.c_int64)
            for name in ("prefix_stride", "tail_stride", "prefix_layer_stride", "tail_layer_stride")
        ],
        *[(name, ctypes.c_void_p) for name in ("cos", "signed_sin", "bias", "workspace")],
    )


class Heads(ctypes.Structure):
    """`Heads` of kernels.h: what is special in the attention of a layer.

    Args:
        scaling: Factor of the scores.
        norms: Weights `[D]` of the RMSNorms of query and key heads, and their epsilon.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("q_norm", "k_norm")],
        *[(name, ctypes.c_float) for name in ("norm_eps", "scaling")],
    )

    def __init__(self, scaling: float, norms: tuple[Tensor, Tensor, float] | None) -> None:
        super().__init__(scaling=scaling)
        self._kept = norms
        if norms:
            self.q_norm, self.k_norm = norms[0].data_ptr(), norms[1].data_ptr()
            self.norm_eps = norms[2]


class Weights(ctypes.Structure):
    """`Weights` of quantised.cpp."""

    _fields_ = (
        *[(name, ctypes.c_int32) for name in ("bits", "in_features", "out_features")],
        *[(name, ctypes.c_void_p) for name in ("codes", "scales", "minima", "bias")],
    )


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of layers.cpp; the norms are `(weight, epsilon)`."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm")],
        *[(name, ctypes.c_float) for name in ("input_eps", "mlp_eps")],
        ("heads", Heads),
        *[(name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")],
    )

    def __init__(
        self,
        input_norm: tuple[Tensor, float],
        mlp_norm: tuple[Tensor, float],
        heads: Heads,
        qkv: Multiplication,
        out: Multiplication,
        gate_up: Multiplication,
        down: Multiplication,
    ) -> None:
        super().__init__(
            *(input_norm[0].data_ptr(), mlp_norm[0].data_ptr(), input_norm[1], mlp_norm[1], heads),
            *(qkv.address, out.address, gate_up.address, down.address),
        )


class Multiplication:
    """A matrix product with a weight in few bits, see `quantised.QuantisedWeight`.

    Args:
        bits: Of a code.
        codes, scales, minima: With 16 rows of the weight together: `[out / 16, in / 32, 16, ...]`.
        bias: `[out]`, or None.

    Attributes:
        address: Of its `Weights`.
    """

    def __init__(
        self,
        multiply: Any,
        bits: int,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self._multiply = multiply
        self._kept = codes, scales, minima, bias
        num_groups, num_blocks, group = scales.shape
        self._in, self._out, self._group = num_blocks * 32, num_groups * group, group
        pointers = codes.data_ptr(), scales.data_ptr(), pointer(minima), pointer(bias)
        self._weights = Weights(bits, self._in, self._out, *pointers)
        self.address = ctypes.addressof(self._weights)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        x = x.contiguous()
        num_rows = x.numel() // self._in
        out = x.new_empty(*x.shape[:-1], self._out)
        scratch = torch.empty(-(-num_rows // self._group) * self._group * self._in)
        self._multiply(
            *(is_bf16(x), x.data_ptr(), self.address, out.data_ptr(), num_rows),
            *(torch.get_num_threads(), scratch.data_ptr()),
        )
        return out


class Cell(ctypes.Structure):
    """`Cell` of drafts.cpp: recurrent draft heads with the parts of the target they read.

    Args:
        norms: Weights `[hidden]` of the RMSNorms of state, token and output.
        eps: Of the norms.
        embedding: `[vocab, hidden]`.
        gate_up, down, lm_head: Matrix products.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("state_norm", "token_norm", "post_norm", "embedding")],
        *[(name, ctypes.c_void_p) for name in ("gate_up", "down", "lm_head")],
        ("eps", ctypes.c_float),
    )

    def __init__(
        self,
        norms: Sequence[Tensor],
        eps: float,
        embedding: Tensor,
        gate_up: Multiplication,
        down: Multiplication,
        lm_head: Multiplication,
    ) -> None:
        products = gate_up, down, lm_head
        super().__init__(
            *(tensor.data_ptr() for tensor in (*norms, embedding)),
            *(product.address for product in products),
            eps,
        )
        self._kept = norms, embedding, products


def is_bf16(tensor: Tensor) -> bool:
    """What the kernels ask of a tensor; the other dtype is float32."""
    return tensor.dtype == torch.bfloat16


def pointer(tensor: Tensor | None) -> int | None:
    """Where its numbers are; null without a tensor."""
    return None if tensor is None else tensor.data_ptr()
