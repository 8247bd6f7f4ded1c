"""What a training was asked for, and what follows from it alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from swiftgen.engine import Engine
from swiftgen.heads.modules import DraftHeads, new_heads
from swiftgen.training.base import FrozenBase
from swiftgen.training.selfwrite import openings
from swiftgen.training.texts import PG19, TEXTS_FILE, Texts, load_texts, read_documents, tokenise
from swiftgen.training.trainer import Schedule

SELF = "self"
DEFAULT_SELF_TEXTS = 192


@dataclass(frozen=True)
class TrainRequest:
    """What the command line asked for.

    Args:
        data: `pg19`, `self`, a texts file of an earlier training, or files of text.
        kind, num_heads, width: Of the heads; `width` is for recurrent ones.
        vocabulary: Most frequent tokens of the texts that can be drafted; 0 is all tokens.
        sequence_length: Tokens of a sequence.
        max_sequences: Read or write no more; None is all there is.
        self_batch: Texts written side by side with `self`.
        held_out: Share of the documents that is kept out of the training.
        states_gb: Hidden states are kept on disk if they take no more than this.
        checkpoint_every: Steps.
    """

    preset: str | None
    overrides: Mapping[str, Any]
    data: str
    output: Path
    kind: str
    num_heads: int
    width: int
    vocabulary: int
    sequence_length: int
    max_sequences: int | None
    self_batch: int
    held_out: float
    states_gb: float
    checkpoint_every: int
    schedule: Schedule
    resume: bool
    dry_run: bool
    quiet: bool


def read_texts(
    data: str, engine: Engine, sequence_length: int, max_sequences: int | None, quiet: bool = False
) -> Texts:
    """Texts from documents, or those of an earlier training.

    Raises:
        SwiftgenError: see `load_texts`, `read_documents` and `tokenise`.
    """
    if data.endswith(TEXTS_FILE) and Path(data).exists():
        return load_texts(Path(data), engine.opened.fingerprint, engine.opened.config.vocab_size)[0]
    documents: Iterable[str] = tqdm(read_documents(data), "reading", unit=" documents", disable=quiet)
    return tokenise(documents, engine.tokenizer, sequence_length, max_sequences, first_only=data == PG19)


def self_prompts(request: TrainRequest, engine: Engine) -> list[list[int]]:
    """What the target is asked to write: one prompt for each text."""
    asked = openings(request.schedule.seed)
    num_texts = request.max_sequences or DEFAULT_SELF_TEXTS
    return [engine.encode(asked[index % len(asked)]) for index in range(num_texts)]


def untrained_heads(request: TrainRequest, base: FrozenBase, texts: Texts, train: Tensor) -> DraftHeads:
    """Heads as asked for, which predict what the base predicts.

    Args:
        train: Sequences whose most frequent tokens make the draft vocabulary.
    """
    config = base.config
    vocabulary = None
    if request.vocabulary:
        counts = texts.tokens[train].flatten().long().bincount(minlength=config.vocab_size)
        counts[0] -= int((texts.tokens.shape[1] - texts.lengths[train]).sum())  # the padding
        vocabulary = counts.topk(min(request.vocabulary, len(counts))).indices.sort().values
    torch.manual_seed(request.schedule.seed)
    heads = new_heads(
        request.kind,
        config.hidden_size,
        request.num_heads,
        config.rms_norm_eps,
        vocabulary=vocabulary,
        **({"width": request.width} if request.kind == "recurrent" else {}),
    )
    heads.read_like(base.norm)
    return heads.to(base.device)
