"""The structs of `native/structs.h`, field by field, and what keeps their tensors alive."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swiftgen.native.weights import PackedWeight

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.nn.functional.silu,
    functools.partial(torch.nn.functional.gelu, approximate="tanh"),
)
"""Those of a gate that the kernels have, in the order of their numbers (`Activation` of rows.h)."""


class LayerKind(ctypes.Structure):
    """`LayerKind` of structs.h: what a pass is to layers that are alike."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("cos", "signed_sin", "bias", "edge_keys", "edge_values")],
        *[(name, ctypes.c_void_p) for name in ("prefix_keys", "prefix_values", "tail_keys", "tail_values")],
        *[
            (name, ctypes.c_int64)
            for name in ("prefix_stride", "tail_stride", "prefix_layer_stride", "tail_layer_stride")
        ],
        *[(name, ctypes.c_int32) for name in ("num_edge", "num_prefix")],
    )


class LayerPlace(ctypes.Structure):
    """`LayerPlace` of structs.h: the kind of a layer, and which of the layers that share a cache it is."""

    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class Pass(ctypes.Structure):
    """`Pass` of structs.h."""

    _fields_ = (
        *[
            (name, ctypes.c_int32)
            for name in (
                *("is_bf16", "num_threads", "num_rows", "num_heads", "num_kv_heads", "head_dim"),
                *("num_tail", "num_kinds", "is_draft", "rotary_dim"),
            )
        ],
        *[(name, ctypes.c_void_p) for name in ("kinds", "places", "queries", "workspace")],
    )


class Norm(ctypes.Structure):
    """`Norm` of structs.h: an RMSNorm.

    Args:
        weight: Of any dtype; there is no norm without it.
    """

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))

    def __init__(self, weight: Tensor | None = None, eps: float = 0.0) -> None:
        self._kept = None if weight is None else weight.detach().float().contiguous()
        super().__init__(pointer(self._kept), eps)

    @property
    def size(self) -> int:
        """Of what is normed; 0 without a norm."""
        return 0 if self._kept is None else len(self._kept)


class Heads(ctypes.Structure):
    """`Heads` of structs.h: what is special in the attention of a layer.

    Args:
        q_norm, k_norm: Over each query head and each key head.
        scaling: Factor of the scores.
        cap: A score s becomes `cap * tanh(s / cap)`, unless the cap is 0.
    """

    _fields_ = (
        *[(name, Norm) for name in ("q_norm", "k_norm")],
        *[(name, ctypes.c_float) for name in ("scaling", "cap")],
    )

    def __init__(self, q_norm: Norm, k_norm: Norm, scaling: float, cap: float) -> None:
        super().__init__(q_norm, k_norm, scaling, cap)
        self._kept = q_norm, k_norm


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
    """`DecoderLayer` of structs.h: attention and a gated MLP, each added to the hidden state.

    Args:
        norms: Before and behind attention, before and behind the MLP, over all query heads, and over all key
            heads.
        products: For q, k and v, behind attention, for gate and up, and down.
        residual_scale: Factor of what is added.
        activation: Of the gate, its number among `ACTIVATIONS`.
    """

    _fields_ = (
        *[(name, Norm) for name in ("input_norm", "attention_norm", "mlp_norm", "output_norm")],
        *[(name, Norm) for name in ("q_norm", "k_norm")],
        ("heads", Heads),
        *[(name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")],
        ("residual_scale", ctypes.c_float),
        ("activation", ctypes.c_int32),
    )

    def __init__(
        self,
        norms: Sequence[Norm],
        heads: Heads,
        products: Sequence[Product],
        residual_scale: float,
        activation: int,
    ) -> None:
        super().__init__(*norms, heads, *map(ctypes.addressof, products), residual_scale, activation)
        self._parts = norms, heads, products

    def in_integers(self) -> DecoderLayer:
        """The same with activations in 8 bits."""
        norms, heads, products = self._parts
        products = [product.in_integers() for product in products]
        return DecoderLayer(norms, heads, products, self.residual_scale, self.activation)


class Model(ctypes.Structure):
    """`Model` of structs.h: a decoder, the target or the target as it drafts.

    Args:
        layers: At least one.
        embedding: `[vocab, hidden]`, or packed.
        norm: The last one.
        lm_head: A wide product.
        embedding_scale: Factor of what is looked up.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("layers", "packed_embedding", "embedding")],
        ("norm", Norm),
        ("lm_head", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("num_layers", "hidden_size")],
        ("embedding_scale", ctypes.c_float),
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
            *(norm, ctypes.addressof(lm_head), len(layers), norm.size, embedding_scale),
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
        norms: Of state, token and output.
        embedding: `[vocab, hidden]`, or packed.
        embedding_scale: Factor of what is looked up.
    """

    _fields_ = (
        *[(name, Norm) for name in ("state_norm", "token_norm", "post_norm")],
        *[(name, ctypes.c_void_p) for name in ("packed_embedding", "embedding")],
        *[(name, ctypes.c_void_p) for name in ("gate_up", "down", "lm_head")],
        ("embedding_scale", ctypes.c_float),
    )

    def __init__(
        self,
        norms: Sequence[Norm],
        embedding: Tensor | PackedWeight,
        embedding_scale: float,
        gate_up: Product,
        down: Product,
        lm_head: Product,
    ) -> None:
        products = gate_up, down, lm_head
        packed, dense = _table(embedding)
        super().__init__(
            *norms,
            *(packed and ctypes.addressof(packed), dense),
            *map(ctypes.addressof, products),
            embedding_scale,
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
    for struct in (LayerKind, LayerPlace, Pass, Norm, Heads, Weights, Product, DecoderLayer, Model, Cell):
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
