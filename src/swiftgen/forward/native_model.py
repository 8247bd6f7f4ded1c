"""A decoder all of whose layers the native kernels run in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swiftgen.forward.linear import QuantisedLinear
from swiftgen.forward.native_layer import NativeLayer, described_norm
from swiftgen.models.architectures import embedding_multiplier
from swiftgen.models.gguf_weights import table_of
from swiftgen.native.kernels import Kernels
from swiftgen.native.structs import Model, Product
from swiftgen.native.weights import GROUP, Q8_0, rows_in_8_bits


def native_model(base: Any, norm: Any, lm_head: nn.Module) -> Model | None:
    """A model for native calls; None where it has parts that the kernels do not compute.

    Args:
        base: Its layers are fused.
        norm: The last one.
    """
    layers = [layer.described for layer in base.layers if isinstance(layer, NativeLayer)]
    described = [layer for layer in layers if layer is not None]
    if len(described) < len(base.layers) or not isinstance(lm_head, QuantisedLinear):
        return None
    table = table_of(base.embed_tokens)
    if table is None:
        return None
    embedding, scale = table
    scale *= embedding_multiplier(base.config)
    return Model(described, embedding, described_norm(base.config, norm), lm_head.product, scale)


def drafting_model(model: Model, kernels: Kernels, vocabulary: Tensor | None) -> tuple[Model, int]:
    """The same model in integers, and how many columns of its logits count.

    Args:
        vocabulary: int64 `[V]`, tokens that the lm_head is cut to; one column more is that of no token.
    """
    lm_head = model.lm_head_product.in_integers()
    if vocabulary is None:
        return model.in_integers(lm_head), lm_head.out_features
    (weight,) = lm_head.weights
    num_columns = len(vocabulary) + 1
    kept = torch.zeros(-(-num_columns // GROUP) * GROUP, weight.in_features)
    kept[: len(vocabulary)] = kernels.unpack(weight, vocabulary)
    packed = kernels.pack(Q8_0, rows_in_8_bits(kept), weight.in_features)
    return model.in_integers(Product([packed], None, activation_bytes=1, is_wide=True)), num_columns
