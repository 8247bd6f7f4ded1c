"""Judging heads as a preset drafts with them, and the `heads eval` command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from swiftgen.engine import Engine, load
from swiftgen.heads.files import check_heads, load_heads
from swiftgen.heads.modules import DraftHeads
from swiftgen.models.loading import load_weights
from swiftgen.training.base import FrozenBase
from swiftgen.training.judge import Judgement, judge, widths_for
from swiftgen.training.report import describe
from swiftgen.training.request import read_texts
from swiftgen.training.states import StateStore
from swiftgen.training.texts import Texts


def judge_heads(
    path: str,
    data: str,
    preset: str | None,
    overrides: Mapping[str, Any],
    sequence_length: int,
    max_sequences: int,
    as_json: bool,
) -> str:
    """Figures of heads on some text, as a table or as one line of JSON.

    Raises:
        SwiftgenError: heads that do not fit, or data that cannot be read.
    """
    engine = load(preset, overrides)
    config = engine.opened.config
    heads, info = load_heads(path)
    check_heads(heads, info, path, config.hidden_size, config.vocab_size)
    texts = read_texts(data, engine, sequence_length, max_sequences)
    base = FrozenBase(load_weights(engine.opened, engine.opened.max_positions).model)
    judged = torch.arange(min(max_sequences, len(texts)))
    heads = heads.float().to(base.device)
    judgement = judge_for(engine, base, heads, texts, StateStore(base, texts, None), judged)
    return json.dumps(asdict(judgement)) if as_json else describe(judgement)


def judge_for(
    engine: Engine,
    base: FrozenBase,
    heads: DraftHeads,
    texts: Texts,
    store: StateStore,
    indices: Tensor,
    quiet: bool = False,
) -> Judgement:
    """Judge heads with the sampler and the tree of a preset, under a progress bar."""
    widths = widths_for(engine.preset.tree, heads.num_heads)
    with tqdm(total=len(indices), desc="judging", unit=" texts", disable=quiet) as bar:
        return judge(base, heads, texts, store, indices, engine.sampler(0), widths, bar.update)
