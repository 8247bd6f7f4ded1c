"""The `write` command: prompt and preset in, a document or text on stdout out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftgen.commands.job import Job, Sink, accompany, check_on_loop, reporter_for, run_job
from swiftgen.commands.process import load_engine
from swiftgen.commands.prompts import read_prompt
from swiftgen.commands.signals import StopSignals
from swiftgen.commands.stdout import StdoutSink
from swiftgen.document.document import Document, check_output
from swiftgen.document.manifest import Manifest, installed_versions, now_utc
from swiftgen.document.recorded import arithmetic_record, model_record
from swiftgen.figures.metrics import RunMetrics
from swiftgen.settings.presets import load_preset
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError, exit_code_of

if TYPE_CHECKING:
    from swiftgen.engine import Engine

MAX_SEED = 2**63 - 1  # seeds are mixed into 64-bit signed integers


@dataclass(frozen=True)
class WriteRequest:
    """What the command line asked for."""

    preset: str | None
    overrides: Mapping[str, Any]  # dotted preset keys
    prompt: str | None
    prompt_file: Path | None
    prompt_from_stdin: bool
    num_tokens: int
    seed: int
    output: Path | None  # None: stdout
    force: bool
    quiet: bool
    json: bool
    on_loop: str = "warn"  # one of ON_LOOP


def write(request: WriteRequest) -> int:
    """Writes one document; returns the exit code.

    Raises:
        SwiftgenError: whatever the user can set right; as much as possible before the model is loaded.
        ReaderGone: stdout is a pipe that was closed.
    """
    if request.num_tokens < 1:
        raise SwiftgenError(f"--tokens is {request.num_tokens}", "ask for at least 1 token")
    if not 0 <= request.seed <= MAX_SEED:
        raise SwiftgenError(f"--seed is {request.seed}", f"allowed is a whole number from 0 to {MAX_SEED}")
    check_on_loop(request.on_loop)
    prompt = read_prompt(request.prompt, request.prompt_file, request.prompt_from_stdin)
    preset = load_preset(request.preset, request.overrides)
    if request.output is not None:
        check_output(request.output, request.force)

    reporter = reporter_for(request.output, request.quiet)
    if not request.quiet:
        print(f"loading {preset.name} ...", file=sys.stderr)
    with StopSignals() as signals:
        try:
            engine = load_engine(preset)
            prompt_ids = engine.encode(prompt)
            stop_in_loop = request.on_loop == "stop"
            job = Job(
                prompt_ids, [], request.num_tokens, request.seed, request.output, request.json, stop_in_loop
            )
            ranks.call_on_others(accompany, preset, job)
            engine.prepare(len(prompt_ids), request.num_tokens)
            metrics = RunMetrics(find_loops=request.on_loop != "ignore")
            sink = _open_sink(request, engine, prompt_ids, metrics)
        except KeyboardInterrupt as interrupt:
            print("interrupted: nothing was written", file=sys.stderr)
            return exit_code_of(interrupt)
        with sink as opened:
            return run_job(job, engine, metrics, opened, reporter, signals)


def _open_sink(
    request: WriteRequest, engine: Engine, prompt_ids: list[int], metrics: RunMetrics
) -> AbstractContextManager[Sink]:
    if request.output is None:
        return nullcontext(StdoutSink())
    manifest = _manifest(request, engine, len(prompt_ids))
    return Document.create(request.output, manifest, prompt_ids, force=request.force, metrics=metrics)


def _manifest(request: WriteRequest, engine: Engine, num_prompt_tokens: int) -> Manifest:
    assert request.output is not None
    return Manifest(
        text_file=request.output.name,
        created=now_utc(),
        seed=request.seed,
        num_tokens=request.num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        model=model_record(engine),
        preset=engine.preset.model_dump(mode="json"),
        arithmetic=arithmetic_record(engine),
        versions=installed_versions(),
    )
