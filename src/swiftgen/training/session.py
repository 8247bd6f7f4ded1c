"""The `train-heads` command: texts, training, checkpoints, and the figures at the end.

A training lives in its output folder:

    texts.safetensors        token ids, with the model they are for (unless --data is such a file already)
    states.bin, states.done  hidden states of the texts, beside them, where they fit
    checkpoint.safetensors   heads, optimiser and step, to continue from
    losses.csv               loss of every head, step by step
    heads.safetensors        the heads; the folder can be given as `heads` in a preset
    judgement.json           held-out figures
    curves.png               losses and held-out figures, drawn
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from swiftgen.engine import Engine, load
from swiftgen.heads.files import HeadsInfo, save_heads
from swiftgen.models.loading import load_weights
from swiftgen.system.errors import EXIT_INTERRUPTED, SwiftgenError
from swiftgen.training.base import FrozenBase
from swiftgen.training.evaluate import judge_for
from swiftgen.training.plan import describe_plan, make_plan
from swiftgen.training.report import LossLog, describe, draw_curves, write_judgement
from swiftgen.training.request import SELF, TrainRequest, read_texts, self_prompts, untrained_heads
from swiftgen.training.selfwrite import SelfWriter
from swiftgen.training.states import StateStore
from swiftgen.training.texts import (
    TEXTS_FILE,
    Texts,
    load_texts,
    save_texts,
)
from swiftgen.training.trainer import CHECKPOINT_FILE, Processes, StepReport, Trainer

MAX_JUDGED = 16


def train_heads(request: TrainRequest) -> int:
    """Train heads into the output folder; returns the exit code.

    Raises:
        SwiftgenError: whatever the user can set right; earlier checkpoints stay as they are.
    """
    return _Session(request).run()


class _Session:
    """One call of the command."""

    def __init__(self, request: TrainRequest) -> None:
        self._request, self._folder = request, request.output
        # Texts of an earlier training stay where they are, with their states.
        has_texts = request.data.endswith(TEXTS_FILE)
        self._texts_folder = Path(request.data).parent if has_texts else self._folder
        has_checkpoint = (self._folder / CHECKPOINT_FILE).exists()
        if has_checkpoint and not (request.resume or request.dry_run):
            raise SwiftgenError(
                f"{self._folder} holds a training already", "go on with --resume, or name another folder"
            )
        if request.resume and not has_checkpoint:
            raise SwiftgenError(
                f"{self._folder} has no checkpoint to continue from", "start without --resume"
            )
        self._processes, device = _processes()
        self._is_main = self._processes is None or self._processes.process_index == 0
        self._engine: Engine = load(request.preset, {**request.overrides, **device})
        self._config = self._engine.opened.config
        if request.sequence_length > self._config.max_position_embeddings:
            raise SwiftgenError(
                f"--sequence-length is {request.sequence_length:,}, "
                f"the model has {self._config.max_position_embeddings:,} positions"
            )

    def run(self) -> int:
        """Train, judge and save."""
        request = self._request
        trainer = None
        try:
            self._say(f"loading {self._engine.preset.name} ...")
            opened = self._engine.opened
            base = FrozenBase(load_weights(opened, opened.max_positions).model)
            if request.dry_run:
                print(describe_plan(make_plan(request, self._engine, base)))
                return 0
            self._make_folder()
            texts, store, described = self._texts_and_states(base)
            train, held_out = texts.split(request.held_out, request.schedule.seed)
            heads = untrained_heads(request, base, texts, train)
            trainer = Trainer(base, heads, texts, store, train, request.schedule, self._processes)
            if request.resume:
                trainer.restore(self._folder / CHECKPOINT_FILE)
            num_tokens = int(texts.lengths[train].sum())
            self._say(
                f"{num_tokens:,} tokens to train on, {int(texts.lengths[held_out].sum()):,} held out; "
                f"{sum(p.numel() for p in heads.parameters()):,} parameters"
            )
            self._train(trainer)
            if self._is_main:
                self._finish(base, trainer, texts, store, held_out, described)
        except KeyboardInterrupt:
            saved = f"; --resume continues after step {trainer.step}" if trainer and trainer.step else ""
            self._say(f"interrupted{saved}")
            return EXIT_INTERRUPTED
        return 0

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SwiftgenError(
                f"cannot make the folder {self._folder}: {error.strerror or error}"
            ) from error

    def _texts_and_states(self, base: FrozenBase) -> tuple[Texts, StateStore, str]:
        """The texts, made on first use, the store of their states, and what they are."""
        file = self._texts_folder / TEXTS_FILE
        if not file.exists() and self._is_main:
            self._make_texts(base, file)
        if self._processes is not None:
            self._processes.wait_for_everyone()
        texts, described = load_texts(file, self._engine.opened.fingerprint, self._config.vocab_size)
        return texts, self._store(base, texts), described

    def _make_texts(self, base: FrozenBase, file: Path) -> None:
        request, fingerprint = self._request, self._engine.opened.fingerprint
        if request.data == SELF:
            texts, description = self._write_texts(base), f"written by {self._engine.preset.name} itself"
        else:
            texts, description = self._read_texts(), Path(request.data).name
        save_texts(texts, file, fingerprint, description)
        SelfWriter.clean_up(self._folder)

    def _read_texts(self) -> Texts:
        request = self._request
        return read_texts(
            request.data, self._engine, request.sequence_length, request.max_sequences, request.quiet
        )

    def _write_texts(self, base: FrozenBase) -> Texts:
        """Have the target write its own texts; what was written before an interruption is kept."""
        request, engine = self._request, self._engine
        prompts = self_prompts(request, engine)
        writer = SelfWriter(
            self._folder, prompts, request.sequence_length, engine.sampler, request.schedule.seed
        )
        store = self._store(base, writer.texts)
        total = len(prompts) * request.sequence_length
        with tqdm(total=total, desc="writing", unit=" tokens", disable=request.quiet) as bar:
            for done in writer.write(base, store, request.self_batch):
                bar.update(done - bar.n)
        return writer.texts

    def _store(self, base: FrozenBase, texts: Texts) -> StateStore:
        num_bytes = StateStore.num_bytes(len(texts), texts.tokens.shape[1], self._config.hidden_size)
        fits = num_bytes <= self._request.states_gb * 1e9
        return StateStore(base, texts, self._texts_folder / "states.bin" if fits else None)

    def _train(self, trainer: Trainer) -> None:
        request, checkpoint = self._request, self._folder / CHECKPOINT_FILE
        log = LossLog(self._folder / "losses.csv", trainer.step, request.num_heads) if self._is_main else None
        bar = tqdm(
            total=request.schedule.num_steps,
            initial=trainer.step,
            desc="training",
            unit=" steps",
            disable=request.quiet or not self._is_main,
        )
        with bar:
            try:
                for report in trainer.run():
                    bar.update()
                    bar.set_postfix_str(_brief(report))
                    if log:
                        log.add(report)
                        if report.step % request.checkpoint_every == 0:
                            trainer.save(checkpoint)
            finally:  # also when interrupted
                if log and trainer.step:
                    trainer.save(checkpoint)

    def _finish(
        self,
        base: FrozenBase,
        trainer: Trainer,
        texts: Texts,
        store: StateStore,
        held_out: Tensor,
        described: str,
    ) -> None:
        engine, model = self._engine, self._engine.preset.model
        info = HeadsInfo(
            base_model=model.source + (f"@{model.revision}" if model.revision else ""),
            fingerprint=engine.opened.fingerprint,
            vocab_size=self._config.vocab_size,
            data=f"{texts.num_tokens:,} tokens: {described}",
            num_steps=trainer.step,
        )
        save_heads(trainer.heads.to(torch.bfloat16), self._folder, info)
        heads, judged = trainer.heads.float(), held_out[:MAX_JUDGED]
        judgement = judge_for(engine, base, heads, texts, store, judged, self._request.quiet)
        write_judgement(judgement, self._folder)
        draw_curves(self._folder / "losses.csv", judgement, self._folder / "curves.png")
        print(describe(judgement))
        self._say(f"heads are in {self._folder}; draft with them by --set heads={self._folder}")

    def _say(self, text: str) -> None:
        if not self._request.quiet and self._is_main:
            print(text, file=sys.stderr)


def _processes() -> tuple[Processes | None, dict[str, str]]:
    """The other processes of this training and this one's device; a single process has no others."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, {}
    from accelerate import Accelerator

    accelerator = Accelerator()
    return accelerator, {"model.device": str(accelerator.device)}


def _brief(report: StepReport) -> str:
    losses = "/".join(f"{loss:.2f}" for loss in report.losses)
    top = "/".join(f"{100 * share:.0f}" for share in report.top1)
    return f"loss {losses} top-1 {top} %"
