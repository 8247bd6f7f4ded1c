"""What a training would take, measured on a few texts: `train-heads --dry-run`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from swiftgen.display.wording import duration
from swiftgen.engine import Engine
from swiftgen.system.devices import used_bytes
from swiftgen.training.base import FrozenBase
from swiftgen.training.request import SELF, TrainRequest, read_texts, self_prompts, untrained_heads
from swiftgen.training.selfwrite import BatchWriter
from swiftgen.training.states import StateStore
from swiftgen.training.texts import PG19, Texts
from swiftgen.training.trainer import Trainer

_SAMPLE_TOKENS = 64
_SAMPLE_STEPS = 2


@dataclass(frozen=True)
class Plan:
    """What a training takes.

    Args:
        num_texts, num_tokens: To train on and to judge by.
        tokens_seen: By all steps together.
        memory_bytes: Of this process while it trains.
        states_bytes: Hidden states of all texts.
        seconds: Writing the texts included.
    """

    num_texts: int
    num_tokens: int
    num_steps: int
    tokens_seen: int
    memory_bytes: int
    states_bytes: int
    seconds: float


def describe_plan(plan: Plan) -> str:
    """A table for the terminal."""
    lines = {
        "texts": f"{plan.num_texts:,} with {plan.num_tokens:,} tokens",
        "steps": f"{plan.num_steps:,}, which see {plan.tokens_seen:,} tokens",
        "epochs": f"{plan.tokens_seen / plan.num_tokens:.1f}",
        "memory": f"{plan.memory_bytes / 1e9:.1f} GB",
        "states": f"{plan.states_bytes / 1e9:.2f} GB on disk, if they are kept",
        "time": f"about {duration(plan.seconds)}",
    }
    return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def make_plan(request: TrainRequest, engine: Engine, base: FrozenBase) -> Plan:
    """Time a few steps; nothing is written.

    Raises:
        SwiftgenError: if the data cannot be read.
    """
    schedule, length, write_s = request.schedule, request.sequence_length, 0.0
    if request.data == SELF:
        prompts = self_prompts(request, engine)
        sample, position_s = _write_sample(request, engine, base, prompts)
        write_s = position_s * math.ceil(len(prompts) / request.self_batch) * length
        num_texts, num_tokens = len(prompts), len(prompts) * length
    elif request.data == PG19:  # reading it all takes as long as the training
        sample = read_texts(PG19, engine, length, schedule.batch_size)
        num_texts = request.max_sequences or schedule.num_steps * schedule.batch_size
        num_tokens = num_texts * length
    else:
        sample = read_texts(request.data, engine, length, request.max_sequences)
        num_texts, num_tokens, length = len(sample), sample.num_tokens, sample.tokens.shape[1]
    step_s = _step_seconds(request, base, sample) * length / sample.tokens.shape[1]
    return Plan(
        num_texts=num_texts,
        num_tokens=num_tokens,
        num_steps=schedule.num_steps,
        tokens_seen=schedule.num_steps * schedule.batch_size * length,
        memory_bytes=used_bytes(base.device),
        states_bytes=StateStore.num_bytes(num_texts, length, base.config.hidden_size),
        seconds=write_s + step_s * schedule.num_steps,
    )


def _write_sample(
    request: TrainRequest, engine: Engine, base: FrozenBase, prompts: list[list[int]]
) -> tuple[Texts, float]:
    """A batch of short texts the target writes itself, and the seconds each position took."""
    num_tokens = min(_SAMPLE_TOKENS, request.sequence_length)
    batch = BatchWriter(base, engine.sampler(0), prompts[: request.self_batch], num_tokens)
    begin = time.perf_counter()
    for _ in batch:
        pass
    seconds = (time.perf_counter() - begin) / num_tokens
    count = len(batch.tokens)
    texts = Texts(batch.tokens.to(torch.int32), torch.full((count,), num_tokens), torch.arange(count))
    return texts, seconds


def _step_seconds(request: TrainRequest, base: FrozenBase, sample: Texts) -> float:
    everything = torch.arange(len(sample))
    heads = untrained_heads(request, base, sample, everything)
    store = StateStore(base, sample, None)
    trainer = Trainer(base, heads, sample, store, everything, request.schedule)
    begin = time.perf_counter()
    for _, _ in zip(range(_SAMPLE_STEPS), trainer.run(), strict=False):
        pass
    return (time.perf_counter() - begin) / trainer.step
