"""The `write` command: prompt and preset in, a document or text on stdout out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swiftgen.document import Document, check_output
from swiftgen.errors import SwiftgenError
from swiftgen.manifest import Manifest, ModelRecord, installed_versions, now_utc
from swiftgen.metrics import MetricsSnapshot, RunMetrics
from swiftgen.presets import load_preset
from swiftgen.prompts import read_prompt
from swiftgen.stdout import StdoutSink, write_stdout

if TYPE_CHECKING:
    from swiftgen.decode import StepEvent
    from swiftgen.engine import Engine
    from swiftgen.panel import Display, Reporter

EXIT_INTERRUPTED = 130
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


class Sink(Protocol):
    """Where the text goes."""

    def append(self, event: StepEvent) -> None: ...

    def finish(self, stop_reason: str) -> None: ...


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
    prompt = read_prompt(request.prompt, request.prompt_file, request.prompt_from_stdin)
    preset = load_preset(request.preset, request.overrides)
    if request.output is not None:
        check_output(request.output, request.force)

    reporter = _reporter(request)
    if not request.quiet:
        print(f"loading {preset.name} ...", file=sys.stderr)
    try:
        import swiftgen  # PyTorch comes with it, so not before all else is in order

        engine = swiftgen.load(preset)
        prompt_ids = engine.encode(prompt)
        engine.prepare(len(prompt_ids), request.num_tokens)
        metrics = RunMetrics()
        sink = _open_sink(request, engine, prompt_ids, metrics)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    with sink as opened:
        return _run(request, engine, prompt_ids, metrics, opened, reporter)


def _run(
    request: WriteRequest,
    engine: Engine,
    prompt_ids: list[int],
    metrics: RunMetrics,
    sink: Sink,
    reporter: Reporter,
) -> int:
    from swiftgen.panel import RunInfo

    stop_reason = "interrupted"
    try:
        reporter.start(RunInfo(engine.preset.name, _place(request), request.num_tokens, engine.exactness))
        metrics.start()
        for event in engine.stream(
            prompt_ids, num_tokens=request.num_tokens, seed=request.seed, on_prefill=reporter.prefill
        ):
            metrics.observe(event)
            sink.append(event)
            reporter.step(event, metrics)
            stop_reason = event.stop_reason or stop_reason
    except KeyboardInterrupt:
        pass  # what is written stays; the summary below says how much
    finally:
        reporter.close()
    sink.finish(stop_reason)
    snapshot = metrics.snapshot()
    reporter.finish(snapshot, stop_reason)
    if request.json:
        line = json.dumps(_result(request, engine, len(prompt_ids), snapshot, stop_reason))
        if request.output is None:
            print(line, file=sys.stderr)
        else:
            write_stdout(line + "\n")
    if stop_reason != "interrupted":
        return 0
    kept = f"{snapshot.num_tokens:,} of {request.num_tokens:,} tokens"
    print(f"interrupted: {kept} are written to {_place(request)}", file=sys.stderr)
    return EXIT_INTERRUPTED


def _open_sink(
    request: WriteRequest, engine: Engine, prompt_ids: list[int], metrics: RunMetrics
) -> AbstractContextManager[Sink]:
    if request.output is None:
        return nullcontext(StdoutSink())
    manifest = _manifest(request, engine, len(prompt_ids))
    return Document.create(request.output, manifest, prompt_ids, force=request.force, metrics=metrics)


def _manifest(request: WriteRequest, engine: Engine, num_prompt_tokens: int) -> Manifest:
    assert request.output is not None
    loaded = engine.loaded
    return Manifest(
        text_file=request.output.name,
        created=now_utc(),
        seed=request.seed,
        num_tokens=request.num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        model=ModelRecord(
            source=loaded.source,
            fingerprint=loaded.fingerprint,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            max_positions=loaded.max_positions,
        ),
        preset=engine.preset.model_dump(mode="json"),
        arithmetic=json.loads(json.dumps(engine.arithmetic)),  # tuples as lists, as YAML reads them back
        versions=installed_versions(),
    )


def _result(
    request: WriteRequest, engine: Engine, num_prompt_tokens: int, snapshot: MetricsSnapshot, stop_reason: str
) -> dict[str, Any]:
    return {
        "output": None if request.output is None else str(request.output),
        "preset": engine.preset.name,
        "model": engine.loaded.source,
        "seed": request.seed,
        "num_prompt_tokens": num_prompt_tokens,
        **snapshot.to_json(),
        "stop_reason": stop_reason,
    }


def _place(request: WriteRequest) -> str:
    return "stdout" if request.output is None else str(request.output)


def _reporter(request: WriteRequest) -> Reporter:
    from swiftgen.panel import make_reporter

    return make_reporter(_display(request))


def _display(request: WriteRequest) -> Display:
    """The panel needs a terminal of its own: where the text runs over it, only the summary is shown."""
    if request.quiet:
        return "quiet"
    if request.output is None and sys.stdout.isatty():
        return "summary"
    is_capable = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return "panel" if is_capable else "lines"
