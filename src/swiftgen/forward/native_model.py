"""A decoder all of whose layers the native kernels run in one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from swiftgen.forward.linear import QuantisedLinear
from swiftgen.forward.native_layer import NativeLayer, described_norm
from swiftgen.models.architectures import embedding_multiplier
from swiftgen.models.gguf_weights import table_of
from swiftgen.native.structs import Model, Product


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


def drafting_model(model: Model, lm_head: Product | None) -> Model:
    """The same model in integers.

    Args:
        lm_head: Another, which may be cut to some tokens.
    """
    if lm_head is None:
        return model.in_integers(model.lm_head_product.in_integers())
    return model.in_integers(Product(lm_head.weights, None, activation_bytes=1, is_wide=True))
