"""What exists once the weights are in memory, for all streams of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftgen.decoding.drafters.heads import ReadyHeads
from swiftgen.forward.backend import Backend
from swiftgen.forward.conformance import checked_target
from swiftgen.forward.exactness import Exactness, known_exactness
from swiftgen.forward.target import Target
from swiftgen.heads.modules import DraftHeads
from swiftgen.models.loading import LoadedModel


@dataclass(frozen=True)
class Ready:
    """A model and its heads, ready to write."""

    loaded: LoadedModel
    target: Target
    heads: ReadyHeads | None
    exactness: Exactness


def made_ready(loaded: LoadedModel, heads: DraftHeads | None, backend: Backend) -> Ready:
    """What a loaded model and its heads become."""
    ready_heads = None
    if heads:
        parts = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
        ready_heads = ReadyHeads(heads, *parts, backend.kernels)
    target = checked_target(loaded.model, backend)
    exactness = known_exactness(target, loaded.fingerprint)
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()  # joining weights has left pieces in which no KV cache fits
    return Ready(loaded, target.with_pass_sizes(exactness.pass_sizes), ready_heads, exactness)
