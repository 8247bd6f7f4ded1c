"""Trains draft heads with the base frozen.

Paper, section 3.2 and appendix: AdamW, cosine schedule with warm-up, cross entropy summed over the heads.
Which sequences a step sees depends on the seed and the step alone, so a run that is continued sees what it
would have seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftgen.heads.modules import DraftHeads
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import replace_file
from swiftgen.training.base import FrozenBase
from swiftgen.training.objective import HeadsObjective, Positions, positions_of
from swiftgen.training.states import StateStore
from swiftgen.training.texts import Texts

CHECKPOINT_FILE = "checkpoint.safetensors"
_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Schedule:
    """How heads are trained; the defaults are the paper's but for the batch, which fits one device.

    Args:
        num_steps: Optimiser steps.
        batch_size: Sequences per step, over all processes.
        learning_rate: After the warm-up; it falls to zero along a cosine.
        warmup_steps, weight_decay: Of AdamW.
        max_grad_norm: Longer gradients are shortened to it.
        soft: Learn the target's distribution rather than the token that followed.
        seed: Order of the sequences.
    """

    num_steps: int = 200
    batch_size: int = 4
    learning_rate: float = 5e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    soft: bool = False
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


class Processes(Protocol):
    """What training needs to know of other processes: the part of accelerate's `Accelerator` it uses."""

    process_index: int
    num_processes: int

    def reduce(self, tensor: Any, reduction: str = "sum") -> Any:
        """The sum or mean of a tensor over all processes."""
        ...

    def wait_for_everyone(self) -> None:
        """Return when all processes are here."""
        ...


@dataclass(frozen=True)
class StepReport:
    """One optimiser step: its number from 1, loss and top-1 of each head, and the learning rate."""

    step: int
    losses: tuple[float, ...]
    top1: tuple[float, ...]
    learning_rate: float


class Trainer:
    """One training run; `run` yields a report for every step from where it stands.

    Args:
        heads: Float32, on the device of the base; trained in place.
        train: Indices of the sequences to train on.
        processes: The other processes of this training; None is a single one.

    Attributes:
        step: Optimiser steps done.
    """

    def __init__(
        self,
        base: FrozenBase,
        heads: DraftHeads,
        texts: Texts,
        store: StateStore,
        train: Tensor,
        schedule: Schedule,
        processes: Processes | None = None,
    ) -> None:
        self.heads, self.schedule = heads, schedule
        self.step = 0
        self._base, self._texts, self._store, self._train = base, texts, store, train
        self._processes = processes
        self._objective = HeadsObjective(base, heads, schedule.soft)
        self._parameters = [p for p in heads.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, schedule.learning_rate, _BETAS, weight_decay=schedule.weight_decay
        )

    def run(self) -> Iterator[StepReport]:
        """Train to the end of the schedule, step by step.

        Raises:
            SwiftgenError: if the loss is no longer a number.
        """
        while self.step < self.schedule.num_steps:
            rate = self.schedule.rate(self.step)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.zero_grad()
            losses, top1 = self._objective.backward(
                positions(self._texts, self._store, self._batch(), self.heads)
            )
            if self._processes is not None and self._processes.num_processes > 1:
                losses, top1 = self._processes.reduce((losses, top1), "mean")
                for parameter in self._parameters:
                    parameter.grad = self._processes.reduce(parameter.grad, "mean")
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.schedule.max_grad_norm)
            if not (torch.isfinite(losses).all() and torch.isfinite(norm)):
                raise SwiftgenError(
                    f"the loss is not a number in step {self.step + 1}",
                    "lower --learning-rate, and go on from the last checkpoint with --resume",
                )
            self._optimizer.step()
            self.step += 1
            yield StepReport(self.step, tuple(losses.tolist()), tuple(top1.tolist()), rate)

    def save(self, file: Path) -> None:
        """Keep all that is needed to continue exactly; the file is replaced at once or not at all."""
        tensors = {f"heads.{name}": tensor for name, tensor in self.heads.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        metadata = {"step": str(self.step), "schedule": json.dumps(asdict(self.schedule))}
        replace_file(file, lambda temporary: save_file(tensors, temporary, metadata))

    def restore(self, file: Path) -> None:
        """Continue from what `save` kept.

        Raises:
            SwiftgenError: damaged, or of a run with other settings.
        """
        try:
            tensors = load_file(file)
            with safe_open(file, framework="pt") as handle:
                metadata = handle.metadata() or {}
            schedule = Schedule(**json.loads(metadata["schedule"]))
            step = int(metadata["step"])
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise SwiftgenError(f"the checkpoint {file} is damaged", "train from the start") from error
        if schedule != self.schedule:
            raise SwiftgenError(
                f"the checkpoint {file} is of a run with other settings",
                "continue with the same options, or train into another folder",
            )
        self.heads.load_state_dict(
            {name.removeprefix("heads."): t for name, t in tensors.items() if name.startswith("heads.")}
        )
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, field = name.split(".")
                states.setdefault(int(index), {})[field] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})
        self.step = step

    def _batch(self) -> Tensor:
        """Sequences of the next step: every epoch is a permutation of its own."""
        size = self.schedule.batch_size
        wanted = torch.arange(self.step * size, (self.step + 1) * size)
        if self._processes is not None:
            wanted = wanted[self._processes.process_index :: self._processes.num_processes]
        epochs = wanted // len(self._train)
        chosen = []
        for epoch in epochs.unique().tolist():
            generator = torch.Generator().manual_seed((self.schedule.seed << 20) + epoch)
            order = torch.randperm(len(self._train), generator=generator)
            chosen.append(self._train[order[wanted[epochs == epoch] % len(self._train)]])
        return torch.cat(chosen)


def positions(texts: Texts, store: StateStore, indices: Tensor, heads: DraftHeads) -> Positions:
    """All positions of some sequences where heads can be trained or judged."""
    return positions_of(
        store.get(indices), texts.tokens[indices].long(), texts.lengths[indices], heads.num_heads
    )
