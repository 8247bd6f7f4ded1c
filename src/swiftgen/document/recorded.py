"""A run that is there, read back and checked: what `resume` and `verify` begin with."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from swiftgen.document.document import STEPS_NAME, TOKEN_BYTES, TOKENS_NAME, packed, read_tokens, run_folder
from swiftgen.document.manifest import MANIFEST_NAME, Manifest, ModelRecord, read_manifest
from swiftgen.settings.schema import Preset
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import disk_errors, read_regular

if TYPE_CHECKING:
    from swiftgen.engine import Engine

_RESTORE = "restore the run folder from a copy"


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder has it.

    Args:
        path: The text file, which need not exist.
        token_ids: Of the log, the prompt first.
    """

    path: Path
    manifest: Manifest
    token_ids: list[int]

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the prompt."""
        return self.token_ids[: self.manifest.num_prompt_tokens]

    @property
    def written(self) -> list[int]:
        """Tokens after the prompt."""
        return self.token_ids[self.manifest.num_prompt_tokens :]

    def preset(self, changes: Mapping[str, Any] | None = None) -> Preset:
        """The settings of the run.

        Raises:
            SwiftgenError: they are none of this version.
        """
        recorded = self.manifest.preset
        if isinstance(model := recorded.get("model"), Mapping):  # before there was another, all was `full`
            recorded = {**recorded, "model": {"activations": "full", **model}}
        try:
            return Preset.model_validate({**recorded, **(changes or {})})
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise SwiftgenError(
                f"{run_folder(self.path) / MANIFEST_NAME} is damaged: preset.{where}: {problem['msg']}",
                "it was changed by hand, or written by another version",
            ) from error


@dataclass(frozen=True)
class LogCheck:
    """What the checksums say of a log that is not damaged.

    Args:
        num_sound: Tokens, the prompt included, that are under a checksum. What follows was logged in the
            last second before a kill, or the log was cut.
        is_uncut: Whether the log reaches as far as its last checksum.
    """

    num_sound: int
    is_uncut: bool


def existing_run_folder(path: Path) -> Path:
    """The run folder of a text file.

    Raises:
        SwiftgenError: there is none.
    """
    folder = run_folder(path)
    if not folder.is_dir():
        raise SwiftgenError(
            f"{path} has no run folder ({folder})", "name a text file written by `swiftgen write -o`"
        )
    return folder


def read_run(path: Path) -> RecordedRun:
    """Reads the run of a text file; a partial last record of its log is left out.

    Raises:
        SwiftgenError: there is no run, or its folder is damaged.
    """
    folder = existing_run_folder(path)
    manifest = read_manifest(folder)
    token_ids = read_tokens(folder)
    if len(token_ids) < manifest.num_prompt_tokens:
        raise SwiftgenError(f"{folder / TOKENS_NAME} is damaged: it ends inside the prompt", _RESTORE)
    return RecordedRun(path, manifest, token_ids)


def check_log(run: RecordedRun) -> LogCheck:
    """Compares the log with the checksums in steps.jsonl.

    A log that was cut passes: the tokens it still has are right. Of the records that are not beyond its end
    the last counts: a run that was continued after a cut has records of longer logs before.

    Raises:
        SwiftgenError: the log, or a record, is damaged, or they belong to different runs.
    """
    log, data = run_folder(run.path) / TOKENS_NAME, packed(run.token_ids)
    all_records = list(_checksums(run))
    records = [record for record in all_records if record[0] <= len(data)]
    for size_bytes, checksum in reversed(records):
        if zlib.crc32(data[:size_bytes]) != checksum:
            continue
        if (size_bytes, checksum) == records[-1]:
            return LogCheck(size_bytes // TOKEN_BYTES, records[-1] == all_records[-1])
        raise SwiftgenError(
            f"{log} is damaged after its first {size_bytes // TOKEN_BYTES:,} tokens (the prompt included)",
            _which_is_right(f"the tokens are right, empty {STEPS_NAME}", size_bytes, log),
        )
    if records:
        raise SwiftgenError(f"{log} is damaged from its beginning, or that of another run", _RESTORE)
    return LogCheck(0, not all_records)


def check_text(run: RecordedRun, check: LogCheck, text: str, finished: str) -> None:
    """Asks the text file about tokens that no checksum covers.

    Args:
        text, finished: see `align_text`.

    Raises:
        SwiftgenError: it contradicts them, so one of the two is damaged.
    """
    if check.num_sound == len(run.token_ids) or not run.path.exists():
        return
    with disk_errors(run.path, "read"):
        actual = read_regular(run.path)
    if not (finished.encode().startswith(actual) or actual.startswith(text.encode())):
        log, size_bytes = run_folder(run.path) / TOKENS_NAME, TOKEN_BYTES * check.num_sound
        raise SwiftgenError(
            f"{run.path} is not the decoding of {log}, and no checksum covers the log after its first "
            f"{check.num_sound:,} tokens (the prompt included)",
            _which_is_right("the tokens are right, move the text file away", size_bytes, log),
        )


def _which_is_right(if_tokens: str, size_bytes: int, log: Path) -> str:
    return (
        f"`swiftgen verify` tells which is right: if {if_tokens}; if not, `truncate -s {size_bytes} {log}` "
        "goes back to where they are"
    )


def _checksums(run: RecordedRun) -> Iterator[tuple[int, int]]:
    """What steps.jsonl says of the log, in its order: (bytes, their CRC-32)."""
    path = run_folder(run.path) / STEPS_NAME
    with disk_errors(path, "read"):
        data = read_regular(path, follow_links=False)
    lines = data.split(b"\n")[:-1]  # what follows the last line break is half a record
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            yield TOKEN_BYTES * abs(int(record["log_tokens"])), int(record["log_crc32"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise SwiftgenError(
                f"{path} is damaged in line {number}",
                "remove that line; `swiftgen verify` proves the tokens themselves",
            ) from error


def check_token_ids(run: RecordedRun, vocab_size: int) -> None:
    """Raises SwiftgenError if the log holds ids that the model does not have."""
    if wrong := [token for token in run.token_ids if token >= vocab_size]:
        raise SwiftgenError(
            f"the token log of {run.path} is damaged: it holds token {wrong[0]}, "
            f"the model has {vocab_size:,}",
            _RESTORE,
        )


def model_record(engine: Engine) -> ModelRecord:
    """The model of a prepared engine."""
    loaded = engine.loaded
    return ModelRecord(
        source=loaded.source,
        fingerprint=loaded.fingerprint,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        max_positions=loaded.max_positions,
    )


def arithmetic_record(engine: Engine) -> dict[str, Any]:
    """The arithmetic of a prepared engine as YAML reads it back: tuples as lists."""
    record: dict[str, Any] = json.loads(json.dumps(engine.arithmetic))
    return record


def differences(manifest: Manifest, engine: Engine) -> list[str]:
    """In what a prepared engine differs from that of the run, so that it would write another text."""
    then, now = manifest.model, model_record(engine)
    found = []
    if then.fingerprint != now.fingerprint:
        found.append(f"the model has fingerprint {now.fingerprint[:12]}, had {then.fingerprint[:12]}")
    if then.max_positions != now.max_positions:
        found.append(f"the model has {now.max_positions:,} positions, had {then.max_positions:,}")
    arithmetic = arithmetic_record(engine)
    for key in {**manifest.arithmetic, **arithmetic}:
        before, after = manifest.arithmetic.get(key), arithmetic.get(key)
        if before != after:
            found.append(f"{key} is {after}, was {before}")
    return found


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Bytes, or tokens, that two texts share from their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def texts_of(run: RecordedRun, tokenizer: Any) -> tuple[str, str]:
    """The decoding of the log: what is final of a text that goes on, and all of one that ends there."""
    from swiftgen.text.stream import TextStream

    stream = TextStream(tokenizer)
    text = stream.push(run.written)
    return text, text + stream.finish()


def align_text(path: Path, wanted: str, finished: str) -> Path | None:
    """Brings the text file in line with the log, in place.

    Args:
        path: The text file; it is made if it is gone.
        wanted: What it is to hold: the text that is final.
        finished: The text of a document that ends there.

    Returns:
        Where a copy of the former text is, if it was none that a run leaves behind, but changed by someone.

    Raises:
        SwiftgenError: the disk fails or is full.
    """
    with disk_errors(path, "write"):
        former = read_regular(path) if path.exists() else b""
        new = wanted.encode()
        if former == new and path.exists():
            return None
        copy = None
        if not finished.encode().startswith(former):
            copy = next(place for place in _names_of_copies(path) if not place.exists())
            shutil.copy2(path, copy)
        num_same = num_shared(former, new)
        with open(path, "r+b" if path.exists() else "xb") as file:
            file.truncate(num_same)
            file.seek(num_same)
            file.write(new[num_same:])
            file.flush()
            os.fsync(file.fileno())
    return copy


def _names_of_copies(path: Path) -> Iterator[Path]:
    """book.txt.old, book.txt.old2, ..."""
    return (path.with_name(f"{path.name}.old{number if number > 1 else ''}") for number in count(1))
