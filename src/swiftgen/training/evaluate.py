"""The `heads eval` command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from swiftgen.engine import load
from swiftgen.heads_files import check_heads, load_heads
from swiftgen.models import load_weights
from swiftgen.training.base import FrozenBase
from swiftgen.training.judge import judge, widths_for
from swiftgen.training.report import describe
from swiftgen.training.request import read_texts
from swiftgen.training.states import StateStore


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
    base = FrozenBase(load_weights(engine.opened).model)
    judged = torch.arange(min(max_sequences, len(texts)))
    with tqdm(total=len(judged), desc="judging", unit=" texts") as bar:
        judgement = judge(
            base,
            heads.float().to(base.device),
            texts,
            StateStore(base, texts, None),
            judged,
            engine.sampler(0),
            widths_for(engine.preset.tree, heads.num_heads),
            bar.update,
        )
    return json.dumps(asdict(judgement)) if as_json else describe(judgement)
