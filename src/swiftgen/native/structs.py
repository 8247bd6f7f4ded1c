"""The structs of `native/structs.h`, field by field, and what keeps their tensors alive."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftgen.native.weights import PackedWeight

Norm = tuple[Tensor, float]
"""Weight and epsilon of an RMSNorm."""


class Pass(ctypes.Structure):
    """`Pass` of structs.h."""

    _fields_ = (
        *[
            (name, ctypes.c_int32)
            for name in (
                *("is_bf16", "num_threads", "num_rows", "num_heads", "num_kv_heads", "head_dim"),
                *("num_prefix", "num_tail", "is_draft"),
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
    """`Heads` of structs.h: what is special in the attention of a layer.

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
    """`Weights` of structs.h: some output features of a matrix product."""

    _fields_ = (
        *[(name, ctypes.c_int32) for name in ("type", "out_features")],
        ("data", ctypes.c_void_p),
    )


class Product(ctypes.Structure):
    """`Product` of structs.h: a matrix product with a weight in few bits.

    Args:
        parts: The parts of its weight, one below the other; all with the same inputs.
        bias: `[out]`, or None.
        activation_bytes: That an activation is rounded to, 1 or 2, see `native/integer.h`; 0 if it is not.
        is_wide: Whether results are float32 in any case.
    """

    _fields_ = (
        *[(name, ctypes.c_int32) for name in ("in_features", "out_features", "num_parts")],
        *[(name, ctypes.c_int32) for name in ("activation_bytes", "is_wide")],
        *[(name, ctypes.c_void_p) for name in ("parts", "bias")],
    )

    def __init__(
        self, parts: Sequence[PackedWeight], bias: Tensor | None, activation_bytes: int, is_wide: bool = False
    ) -> None:
        described = (Weights * len(parts))(
            *(Weights(part.type_number, part.out_features, part.data.data_ptr()) for part in parts)
        )
        super().__init__(
            parts[0].in_features,
            sum(part.out_features for part in parts),
            len(parts),
            activation_bytes,
            is_wide,
            ctypes.addressof(described),
            pointer(bias),
        )
        self.weights, self._bias = list(parts), bias
        self._kept = described

    def in_integers(self) -> Product:
        """The same with activations in 8 bits."""
        return Product(self.weights, self._bias, activation_bytes=1, is_wide=bool(self.is_wide))


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of structs.h; the norms are `(weight, epsilon)`."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm")],
        *[(name, ctypes.c_float) for name in ("input_eps", "mlp_eps")],
        ("heads", Heads),
        *[(name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")],
    )

    def __init__(
        self,
        input_norm: Norm,
        mlp_norm: Norm,
        heads: Heads,
        qkv: Product,
        out: Product,
        gate_up: Product,
        down: Product,
    ) -> None:
        products = qkv, out, gate_up, down
        super().__init__(
            *(input_norm[0].data_ptr(), mlp_norm[0].data_ptr(), input_norm[1], mlp_norm[1], heads),
            *map(ctypes.addressof, products),
        )
        self._parts = input_norm, mlp_norm, heads, products

    def in_integers(self) -> DecoderLayer:
        """The same with activations in 8 bits."""
        input_norm, mlp_norm, heads, products = self._parts
        return DecoderLayer(input_norm, mlp_norm, heads, *(product.in_integers() for product in products))


class Model(ctypes.Structure):
    """`Model` of structs.h: a decoder, the target or the target as it drafts.

    Args:
        layers: At least one.
        embedding: `[vocab, hidden]`, or packed.
        norm: The last RMSNorm's weight and epsilon.
        lm_head: A wide product.
        embedding_scale: Factor of what is looked up.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("layers", "packed_embedding", "embedding", "norm", "lm_head")],
        *[(name, ctypes.c_int32) for name in ("num_layers", "hidden_size")],
        *[(name, ctypes.c_float) for name in ("eps", "embedding_scale")],
    )

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        embedding: Tensor | PackedWeight,
        norm: Norm,
        lm_head: Product,
        embedding_scale: float = 1.0,
    ) -> None:
        described = (DecoderLayer * len(layers))(*layers)
        packed, dense = _table(embedding)
        super().__init__(
            *(ctypes.addressof(described), packed and ctypes.addressof(packed), dense),
            *(norm[0].data_ptr(), ctypes.addressof(lm_head), len(layers), len(norm[0])),
            *(norm[1], embedding_scale),
        )
        self.lm_head_product = lm_head
        self._parts = list(layers), embedding, norm
        self._kept = described, packed

    def in_integers(self, lm_head: Product) -> Model:
        """The same with activations in 8 bits, and another lm_head."""
        layers, embedding, norm = self._parts
        return Model(
            [layer.in_integers() for layer in layers], embedding, norm, lm_head, self.embedding_scale
        )


class Cell(ctypes.Structure):
    """`Cell` of structs.h: recurrent draft heads with the parts of the target they read.

    Args:
        norms: Weights `[hidden]` of the RMSNorms of state, token and output.
        eps: Of the norms.
        embedding: `[vocab, hidden]`, or packed.
        embedding_scale: Factor of what is looked up.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("state_norm", "token_norm", "post_norm")],
        *[(name, ctypes.c_void_p) for name in ("packed_embedding", "embedding")],
        *[(name, ctypes.c_void_p) for name in ("gate_up", "down", "lm_head")],
        *[(name, ctypes.c_float) for name in ("eps", "embedding_scale")],
    )

    def __init__(
        self,
        norms: Sequence[Tensor],
        eps: float,
        embedding: Tensor | PackedWeight,
        embedding_scale: float,
        gate_up: Product,
        down: Product,
        lm_head: Product,
    ) -> None:
        products = gate_up, down, lm_head
        packed, dense = _table(embedding)
        super().__init__(
            *(tensor.data_ptr() for tensor in norms),
            *(packed and ctypes.addressof(packed), dense),
            *map(ctypes.addressof, products),
            *(eps, embedding_scale),
        )
        self._kept = norms, embedding, packed, products


def _table(embedding: Tensor | PackedWeight) -> tuple[Weights | None, int | None]:
    """An embedding described, or where it is."""
    if isinstance(embedding, Tensor):
        return None, embedding.data_ptr()
    return Weights(embedding.type_number, embedding.out_features, embedding.data.data_ptr()), None


def check_layouts(library: ctypes.CDLL) -> None:
    """Compare the structs here with those that a library was built with.

    Raises:
        AttributeError: It has other ones, or does not tell.
    """
    library.swiftgen_layout.restype = ctypes.POINTER(ctypes.c_int64)
    for struct in (Pass, Heads, Weights, Product, DecoderLayer, Model, Cell):
        here = [ctypes.sizeof(struct), *(getattr(struct, name).offset for name, *_ in struct._fields_), -1]
        there = library.swiftgen_layout(struct.__name__.encode())
        if not there or there[: len(here)] != here:
            raise AttributeError(f"the library has another {struct.__name__} than structs.py")


def is_bf16(tensor: Tensor) -> bool:
    """What the kernels ask of a tensor; the other dtype is float32."""
    return tensor.dtype == torch.bfloat16


def pointer(tensor: Tensor | None) -> int | None:
    """Where its numbers are; null without a tensor."""
    return None if tensor is None else tensor.data_ptr()
