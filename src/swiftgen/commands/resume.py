"""The `resume` command: goes on with a run that was stopped, killed or is to be longer.

The token log and run.yaml determine the text, so what is written from here on is what a run that was never
stopped writes. Everything is checked before anything is changed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock

from swiftgen.commands.job import Job, accompany, check_on_loop, reporter_for, run_job
from swiftgen.commands.process import load_engine
from swiftgen.commands.signals import StopSignals
from swiftgen.commands.stdout import write_stdout
from swiftgen.document.document import Document, how_to_resume, run_folder
from swiftgen.document.locks import lock_run
from swiftgen.document.manifest import Manifest, write_manifest
from swiftgen.document.recorded import (
    LogCheck,
    RecordedRun,
    align_text,
    arithmetic_record,
    check_log,
    check_text,
    check_token_ids,
    differences,
    existing_run_folder,
    model_record,
    read_run,
    texts_of,
)
from swiftgen.figures.metrics import RunMetrics
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError, exit_code_of
from swiftgen.system.storage import disk_errors

if TYPE_CHECKING:
    from swiftgen.engine import Engine

_ENDS = {"length": "the planned length is reached", "eos": "the model ended the text"}


@dataclass(frozen=True)
class ResumeRequest:
    """What the command line asked for."""

    document: Path
    num_tokens: int | None  # of the whole text; None: as planned
    anyway: bool
    quiet: bool
    json: bool
    on_loop: str = "warn"  # one of write.ON_LOOP


def resume(request: ResumeRequest) -> int:
    """Goes on with a document; returns the exit code.

    Raises:
        SwiftgenError: there is no such run, it is damaged, another process writes it, it cannot be that long,
            or model or arithmetic are not those it was begun with; nothing is changed then.
    """
    if request.num_tokens is not None and request.num_tokens < 1:
        raise SwiftgenError(f"--tokens is {request.num_tokens}", "ask for at least 1 token")
    check_on_loop(request.on_loop)
    folder = existing_run_folder(request.document)
    with disk_errors(folder, "write"):
        lock = lock_run(folder, request.document)
    try:
        return _resume(request, lock)
    finally:
        lock.release()


def _resume(request: ResumeRequest, lock: BaseFileLock) -> int:
    run = read_run(request.document)
    manifest, num_there = run.manifest, len(run.written)
    if manifest.text_file != run.path.name:
        raise SwiftgenError(
            f"{run_folder(run.path)} is the run folder of {manifest.text_file}",
            "give the text file and its folder that name",
        )
    if os.path.lexists(run.path) and (run.path.is_symlink() or not run.path.is_file()):
        raise SwiftgenError(f"{run.path} is not a regular file", "move it away")
    check = check_log(run)
    num_tokens = request.num_tokens or manifest.num_tokens
    can_grow = manifest.stop_reason == "length" and num_tokens > num_there
    if manifest.status == "complete" and check.is_uncut and not can_grow and run.path.exists():
        return _say_complete(request, run, manifest)
    if num_tokens < num_there:
        raise SwiftgenError(
            f"{run.path} has {num_there:,} tokens already, more than the {num_tokens:,} asked for",
            "ask for more with --tokens, or leave it out",
        )
    _check_positions(run, num_tokens)
    if not request.quiet:
        print(f"loading {manifest.preset.get('name')} ...", file=sys.stderr)
    with StopSignals() as signals:
        return _continue(request, run, check, num_tokens, lock, signals)


def _continue(
    request: ResumeRequest,
    run: RecordedRun,
    check: LogCheck,
    num_tokens: int,
    lock: BaseFileLock,
    signals: StopSignals,
) -> int:
    manifest = run.manifest
    try:
        engine = load_engine(run.preset())
        check_token_ids(run, engine.opened.config.vocab_size)
        text, finished = texts_of(run, engine.tokenizer)
        check_text(run, check, text, finished)
        metrics = RunMetrics(written=run.written, find_loops=request.on_loop != "ignore")
        if end := _end_reached(run, engine, num_tokens):
            manifest = manifest.model_copy(update={"num_tokens": num_tokens})
            with _reopen(request, manifest, finished, finished, metrics, lock) as document:
                document.finish(end)
            return _say_complete(request, run, document.manifest)
        engine.stretch_to = manifest.model.max_positions
        stop_in_loop = request.on_loop == "stop"
        job = Job(
            run.prompt_ids, run.written, num_tokens, manifest.seed, run.path, request.json, stop_in_loop
        )
        ranks.call_on_others(accompany, engine.preset, job, engine.stretch_to)
        engine.prepare(manifest.num_prompt_tokens, num_tokens)
        found = _accepted_differences(request, manifest, engine)
        manifest = manifest.resumed(
            len(run.written), num_tokens, found, model_record(engine), arithmetic_record(engine)
        )
        document = _reopen(request, manifest, text, finished, metrics, lock)
    except KeyboardInterrupt as interrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return exit_code_of(interrupt)
    with document:
        return run_job(job, engine, metrics, document, reporter_for(run.path, request.quiet), signals)


def _check_positions(run: RecordedRun, num_tokens: int) -> None:
    """Refuses what the positions of the run do not reach: stretched once more, it is another model."""
    num_prompt, reach = run.manifest.num_prompt_tokens, run.manifest.model.max_positions
    if num_prompt + num_tokens > reach:
        raise SwiftgenError(
            f"{num_tokens:,} tokens need {num_prompt + num_tokens:,} positions with the prompt, "
            f"the run was begun with {reach:,}",
            f"write at most {reach - num_prompt:,} tokens; positions that reach further "
            "(long_context=yarn) give another text from the first word on",
        )


def _accepted_differences(request: ResumeRequest, manifest: Manifest, engine: Engine) -> list[str]:
    found = differences(manifest, engine)
    if found and not request.anyway:
        raise SwiftgenError(
            f"{request.document} cannot be continued exactly with this: {'; '.join(found)}",
            "go on with what it was begun with, or with --anyway: the text may then be another than that of "
            "an uninterrupted run",
        )
    return found


def _end_reached(run: RecordedRun, engine: Engine, num_tokens: int) -> str | None:
    """The stop reason of a run that was killed after its last token, or is to end where it is."""
    if engine.preset.eos == "stop" and run.written and run.written[-1] in engine.eos_token_ids:
        return "eos"
    return "length" if len(run.written) == num_tokens else None


def _reopen(
    request: ResumeRequest,
    manifest: Manifest,
    text: str,
    finished: str,
    metrics: RunMetrics,
    lock: BaseFileLock,
) -> Document:
    """The document, ready to grow: run.yaml says so, and the text file holds `text`."""
    path = request.document
    with disk_errors(path, "write", f"then go on with {how_to_resume(path)}"):
        write_manifest(run_folder(path), manifest)
    copy = align_text(path, text, finished)
    if copy and not request.quiet:
        print(f"{path} was not the decoding of its token log; it is kept as {copy}", file=sys.stderr)
    return Document(path, manifest, lock=lock, metrics=metrics)


def _say_complete(request: ResumeRequest, run: RecordedRun, manifest: Manifest) -> int:
    reason, num_tokens = str(manifest.stop_reason), len(run.written)
    if not request.quiet:
        print(f"{run.path} is complete: {num_tokens:,} tokens, {_ENDS.get(reason, reason)}", file=sys.stderr)
        if reason == "length":
            print("to make it longer: --tokens", file=sys.stderr)
    if request.json:
        result = {
            "output": str(run.path),
            "seed": manifest.seed,
            "num_prompt_tokens": manifest.num_prompt_tokens,
            "num_tokens": num_tokens,
            "stop_reason": reason,
        }
        write_stdout(json.dumps(result) + "\n")
    return 0
