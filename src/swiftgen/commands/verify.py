"""The `verify` command: is a finished document exactly what plain decoding writes?

The token log is replayed with the seed and the settings in run.yaml, and the text file is compared with the
decoding of the log. A changed token, byte, seed or setting is found, because the text would be another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from swiftgen.commands.process import load_engine
from swiftgen.commands.stdout import write_stdout
from swiftgen.document.manifest import Manifest
from swiftgen.document.recorded import RecordedRun, arithmetic_record, check_token_ids, num_shared, read_run
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import read_regular

if TYPE_CHECKING:
    from swiftgen.decoding.replay import Mismatch
    from swiftgen.engine import Engine
    from swiftgen.settings.schema import Preset

EXIT_DIFFERS = 1


@dataclass(frozen=True)
class VerifyRequest:
    """What the command line asked for."""

    document: Path
    quiet: bool
    json: bool


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Args:
        num_tokens: In the log, without the prompt.
        num_checked: Tokens that are the target's own picks, counted from the first.
        mismatch: The first token that is not; None if all are.
        text_problem: How the text file is not the decoding of the log; empty if it is.
        notes: What else a reader should know.
    """

    num_tokens: int
    num_checked: int
    mismatch: Mismatch | None
    text_problem: str
    notes: Sequence[str]

    @property
    def is_exact(self) -> bool:
        """Whether tokens and text are what plain decoding writes."""
        return self.mismatch is None and not self.text_problem


def verify(request: VerifyRequest) -> int:
    """Checks a document and prints what was found; returns 0 if it is exact, 1 if not.

    Raises:
        SwiftgenError: there is no such document, its run folder is damaged, or its model is not to be had.
    """
    path = request.document
    run = read_run(path)
    manifest = run.manifest
    if not run.written:
        raise SwiftgenError(f"the token log of {path} holds no text", "it was stopped before the first token")
    if not request.quiet:
        print(f"loading {manifest.preset.get('name')} ...", file=sys.stderr)
    engine = load_engine(run.preset({"draft": "none", "heads": None}))  # how it was drafted does not matter
    engine.stretch_to = manifest.model.max_positions
    ranks.call_on_others(_accompany, engine.preset, run)
    engine.prepare(manifest.num_prompt_tokens, manifest.num_tokens)
    verdict = check_document(engine, run, request.quiet)
    if request.json:
        result = {"document": str(path), "exact": verdict.is_exact, **asdict(verdict)}
        write_stdout(json.dumps(result) + "\n")
    else:
        write_stdout("".join(line + "\n" for line in describe(verdict, engine.tokenizer, manifest)))
    return 0 if verdict.is_exact else EXIT_DIFFERS


def _accompany(preset: Preset, run: RecordedRun) -> None:
    """What the other ranks do while rank 0 checks a document: the same passes."""
    manifest = run.manifest
    engine = load_engine(preset)
    engine.stretch_to = manifest.model.max_positions
    engine.prepare(manifest.num_prompt_tokens, manifest.num_tokens)
    for _ in engine.replay(run.token_ids, manifest.num_prompt_tokens, manifest.seed):
        pass


def check_document(engine: Engine, run: RecordedRun, quiet: bool = True) -> Verdict:
    """Replays a document with an engine that is prepared for it.

    Raises:
        SwiftgenError: the model is another one, or the log holds ids that it does not have.
    """
    manifest = run.manifest
    recorded, fingerprint = manifest.model.fingerprint, engine.loaded.fingerprint
    if recorded != fingerprint:
        raise SwiftgenError(
            f"not the model that wrote {run.path} (fingerprint {fingerprint[:12]}, then {recorded[:12]})",
            "set back the model, or its revision",
        )
    then, now = (each.get("ranks", 1) for each in (manifest.arithmetic, engine.arithmetic))
    if then != now:
        raise SwiftgenError(
            f"{run.path} was written by {then} processes together, and {now} round otherwise",
            f"`torchrun --nproc-per-node {then} -m swiftgen verify {run.path}`"
            if then != 1
            else "verify it without torchrun",
        )
    check_token_ids(run, engine.opened.config.vocab_size)
    num_prompt, num_tokens = manifest.num_prompt_tokens, len(run.written)
    num_checked, mismatch = 0, None
    with tqdm(total=num_tokens, desc="verifying", unit=" tokens", disable=quiet, file=sys.stderr) as bar:
        for found in engine.replay(run.token_ids, num_prompt, manifest.seed):
            if isinstance(found, int):
                bar.update(found - num_checked)
                num_checked = found
            else:
                mismatch, num_checked = found, found.position - num_prompt
    return Verdict(
        num_tokens,
        num_checked,
        mismatch,
        _text_problem(engine.tokenizer, run),
        _notes(engine, manifest, num_tokens),
    )


def describe(verdict: Verdict, tokenizer: Any, manifest: Manifest) -> list[str]:
    """The verdict in lines for people."""
    total = f"{verdict.num_tokens:,}"
    lines = [f"{verdict.num_checked:,} of {total} tokens are exactly what plain decoding writes"]
    if mismatch := verdict.mismatch:
        place = mismatch.position - manifest.num_prompt_tokens + 1
        found, picked = (tokenizer.decode([token]) for token in (mismatch.found, mismatch.picked))
        lead = "the other cannot occur" if mismatch.margin is None else f"ahead by {mismatch.margin:.3g}"
        lines = [
            f"token {place:,} of {total} is not what plain decoding writes",
            f"the log has {found!r} ({mismatch.found}), the model picks {picked!r} ({mismatch.picked}), "
            + lead,
        ]
    lines.append(verdict.text_problem or "the text file is the decoding of the token log")
    return [*lines, *verdict.notes]


def _text_problem(tokenizer: Any, run: RecordedRun) -> str:
    from swiftgen.text.stream import TextStream

    path, manifest = run.path, run.manifest
    stream = TextStream(tokenizer)
    expected = stream.push(run.written)
    if manifest.status == "complete":
        expected += stream.finish()
    try:
        actual = read_regular(path)
    except OSError as error:
        raise SwiftgenError(f"cannot read {path}: {error.strerror or error}") from error
    wanted = expected.encode("utf-8")
    if actual == wanted or (manifest.status == "running" and wanted.startswith(actual)):
        return ""  # a process that was killed may have logged tokens whose text it did not write any more
    num_same = num_shared(actual, wanted)
    if num_same < min(len(actual), len(wanted)):
        return f"the text file differs from the token log at byte {num_same:,}"
    return f"the text file has {len(actual):,} bytes, the token log gives {len(wanted):,}"


def _notes(engine: Engine, manifest: Manifest, num_tokens: int) -> list[str]:
    notes = [
        f"continued with --anyway after token {entry.num_tokens:,}: {'; '.join(entry.differences)}"
        for entry in manifest.continued
        if entry.differences
    ]
    if num_tokens < manifest.num_tokens and manifest.stop_reason != "eos":
        notes.append(f"the run was stopped at {num_tokens:,} of {manifest.num_tokens:,} tokens")
    if not engine.is_lossless:
        notes.append(f"on this machine decoding is {engine.exactness}: a difference may be rounding")
    elif arithmetic_record(engine) != manifest.arithmetic:
        notes.append("it was written with other arithmetic (see run.yaml): a difference may be rounding")
    return notes
