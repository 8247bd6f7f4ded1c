"""What `write` and `resume` share: a document that is written until something ends it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swiftgen.commands.process import load_engine
from swiftgen.commands.signals import StopSignals
from swiftgen.commands.stdout import StdoutSink, write_stdout
from swiftgen.document.document import how_to_resume
from swiftgen.document.manifest import COMPLETE_REASONS
from swiftgen.figures.loops import Loop
from swiftgen.figures.metrics import MetricsSnapshot, RunMetrics
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError, exit_code_of

if TYPE_CHECKING:
    from swiftgen.decoding.decode import StepEvent
    from swiftgen.display.panel import Display, Reporter
    from swiftgen.engine import Engine
    from swiftgen.settings.schema import Preset


ON_LOOP = ("warn", "stop", "ignore")


@dataclass(frozen=True)
class Job:
    """What is to be written, by a new run or by one that goes on.

    Args:
        written: The first of the tokens after the prompt, which are there already.
        num_tokens: Planned, without the prompt.
        output: None is stdout.
        json: Whether to end with a line of JSON.
        stop_in_loop: Whether to end the run when the text has begun to go round in a circle; a loop that it
            was in before goes on.
    """

    prompt_ids: Sequence[int]
    written: Sequence[int]
    num_tokens: int
    seed: int
    output: Path | None
    json: bool
    stop_in_loop: bool = False

    @property
    def place(self) -> str:
        """Where the text goes, for people."""
        return "stdout" if self.output is None else str(self.output)


class Sink(Protocol):
    """Where the text goes."""

    def append(self, event: StepEvent) -> None: ...

    def finish(self, stop_reason: str) -> None: ...


def run_job(
    job: Job, engine: Engine, metrics: RunMetrics, sink: Sink, reporter: Reporter, signals: StopSignals
) -> int:
    """Writes until the length, the end of the text, a loop or a signal; returns the exit code.

    Args:
        engine: prepared for prompt and length.
    """
    from swiftgen.display.panel import RunInfo
    from swiftgen.display.wording import loop_words

    def on_prefill(done_tokens: int, total_tokens: int) -> None:
        signals.check()
        reporter.prefill(done_tokens, total_tokens)

    stop_reason, exit_code, why = "interrupted", 0, "interrupted"
    known_loop = metrics.loop
    try:
        with signals.deferred(), ranks.watched():
            reporter.start(
                RunInfo(engine.preset.name, job.place, job.num_tokens, engine.exactness, len(job.written))
            )
            metrics.start()
            for event in engine.stream(
                job.prompt_ids,
                num_tokens=job.num_tokens,
                seed=job.seed,
                on_prefill=on_prefill,
                written=job.written,
            ):
                metrics.observe(event)
                sink.append(event)
                stop_reason = event.stop_reason or stop_reason
                signals.check()
                if job.stop_in_loop and _is_new(metrics.loop, known_loop) and not event.stop_reason:
                    stop_reason = "loop"
                    break
                reporter.step(event, metrics)
    except KeyboardInterrupt as interrupt:  # what is written stays; the summary below says how much
        exit_code = exit_code_of(interrupt)
    except ranks.RankLost as lost:
        why, exit_code = lost.message, lost.exit_code
    finally:
        with suppress(OSError):  # a terminal that has gone (SIGHUP)
            reporter.close()
    sink.finish(stop_reason)
    snapshot = metrics.snapshot()
    with suppress(OSError):
        reporter.finish(snapshot, stop_reason)
    if job.json:
        line = json.dumps(_result(job, engine, snapshot, stop_reason))
        if job.output is None:
            print(line, file=sys.stderr)
        else:
            write_stdout(line + "\n")
    if stop_reason in COMPLETE_REASONS:
        return 0
    with suppress(OSError):
        kept = f"{snapshot.num_tokens:,} of {job.num_tokens:,} tokens"
        if stop_reason == "loop" and snapshot.loop:
            why = f"stopped in a {loop_words(snapshot.loop)}"
        print(f"{why}: {kept} are written to {job.place}", file=sys.stderr)
        if job.output is not None:
            print(f"go on with {how_to_resume(job.output)}", file=sys.stderr)
    return exit_code


def accompany(preset: Preset, job: Job, stretch_to: int = 0) -> int:
    """What the other ranks do while rank 0 writes a document: the same passes; returns the exit code.

    Args:
        stretch_to: See `Engine`.
    """
    with StopSignals() as signals:
        engine = load_engine(preset)
        engine.stretch_to = stretch_to
        engine.prepare(len(job.prompt_ids), job.num_tokens)
        metrics = RunMetrics(written=job.written, find_loops=job.stop_in_loop)
        silent = replace(job, output=None, json=False)
        return run_job(silent, engine, metrics, StdoutSink(), reporter_for(None, quiet=True), signals)


def check_on_loop(what: str) -> None:
    """Raises SwiftgenError unless it is one of ON_LOOP."""
    if what not in ON_LOOP:
        raise SwiftgenError(f"--on-loop is {what!r}", f"allowed are {', '.join(ON_LOOP)}")


def reporter_for(output: Path | None, quiet: bool) -> Reporter:
    """The display of a run, for the streams this process has."""
    from swiftgen.display.panel import make_reporter

    return make_reporter(_display(output, quiet))


def _is_new(loop: Loop | None, known: Loop | None) -> bool:
    return loop is not None and (known is None or loop.start != known.start)


def _result(job: Job, engine: Engine, snapshot: MetricsSnapshot, stop_reason: str) -> dict[str, Any]:
    return {
        "output": None if job.output is None else str(job.output),
        "preset": engine.preset.name,
        "model": engine.loaded.source,
        "seed": job.seed,
        "num_prompt_tokens": len(job.prompt_ids),
        **snapshot.to_json(),
        "stop_reason": stop_reason,
    }


def _display(output: Path | None, quiet: bool) -> Display:
    """The panel needs a terminal of its own: where the text runs over it, only the summary is shown."""
    if quiet:
        return "quiet"
    if output is None and sys.stdout.isatty():
        return "summary"
    is_capable = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return "panel" if is_capable else "lines"
