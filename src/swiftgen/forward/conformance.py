"""Families that no test knows: tried, and compared with transformers when they are loaded.

The target drives the modules of a model by itself, in the way that the known families are built. Whether that
is what another one computes is asked on a short text, before anything is changed in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swiftgen.forward.backend import Backend
from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.target import Target
from swiftgen.models.architectures import FAMILIES, layer_windows
from swiftgen.system.errors import SwiftgenError, first_line

_NUM_TOKENS = BLOCK_TOKENS + 32  # past a block boundary
_WINDOW = 70  # shorter than the text, so that it is seen whether layers slide
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2}
_COARSE = 5e-2  # of bfloat16


def checked_target(model: PreTrainedModel, backend: Backend) -> Target:
    """A target that computes what the model's own `forward` does.

    Args:
        model, backend: see `Target`.

    Raises:
        SwiftgenError: if the family is not a known one and its logits are others than those of transformers.
    """
    if model.config.model_type in FAMILIES:
        return Target(model, backend)
    family = model.config.model_type
    token_ids = [(7919 * i + 13) % model.config.vocab_size for i in range(_NUM_TOKENS)]
    try:
        with _short_windows(model):
            windows = layer_windows(model.config)
            expected = _own_logits(model, token_ids)
        target = Target(model, backend)
        actual = _target_logits(target.with_windows(windows), token_ids)
    except (SwiftgenError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an unknown class does not have, or does otherwise
        raise SwiftgenError(
            f"the architecture {family!r} is not supported: {first_line(error)}", _advice()
        ) from error
    distance = _distance(actual, expected[-len(actual) :])
    if not distance <= _TOLERANCE.get(model.dtype, _COARSE):
        raise SwiftgenError(
            f"the architecture {family!r} is not supported: its logits are {distance:.1%} from those of "
            "transformers",
            _advice(),
        )
    return target


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    config = model.config
    window = getattr(config, "sliding_window", None)
    if window is not None:
        config.sliding_window = min(window, _WINDOW)
    try:
        yield
    finally:
        if window is not None:
            config.sliding_window = window


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids], device=model.device), use_cache=False).logits[0]
    return logits.float()


def _target_logits(target: Target, token_ids: list[int]) -> Tensor:
    """Of the tokens after the block boundary."""
    cache = FullCache(target.cache_shape, len(token_ids) + 2 * BLOCK_TOKENS)
    output = target.prefill(token_ids, cache)
    assert output is not None
    return target.logits(output.hidden)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The median over the rows of how far they are apart, by the spread of their logits."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((actual - expected).norm(dim=-1) / spread).median())


def _advice() -> str:
    return f"Families that are known to work: {', '.join(FAMILIES)}."
