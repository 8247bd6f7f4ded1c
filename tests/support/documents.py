"""Made-up documents, and what tests do to run folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import yaml

from swiftgen.decoding.decode import StepEvent
from swiftgen.document.document import LOCK_NAME, STEPS_NAME, TOKENS_NAME, read_tokens, run_folder
from swiftgen.document.manifest import MANIFEST_NAME, Manifest, now_utc, read_manifest, write_manifest
from swiftgen.engine import Engine
from swiftgen.text.stream import TextStream

PROMPT = [5, 6, 70_000]


def manifest(text_file: str = "book.txt", **changes: Any) -> Manifest:
    fields = {
        "text_file": text_file,
        "created": now_utc(),
        "seed": 1,
        "num_tokens": 10,
        "num_prompt_tokens": len(PROMPT),
        "model": {
            "source": "a/b",
            "fingerprint": "abc",
            "dtype": "bfloat16",
            "device": "cpu",
            "max_positions": 64,
        },
        "preset": {"name": "tiny", "sampler": {"min_p": 1e-05}, "tree": [1, 3], "system": "2e-4"},
        "arithmetic": {"dtype": "bfloat16", "pass_sizes": [2, 8]},
        "versions": {"torch": "2"},
    }
    return Manifest.model_validate(fields | changes)


def step(token_ids: Sequence[int], text: str) -> StepEvent:
    return StepEvent(
        token_ids=tuple(token_ids),
        sources=(),
        draft_depth=0,
        num_rows=1,
        context_tokens=4,
        kv_bytes=64,
        draft_s=0.0,
        verify_s=0.1,
        sample_s=0.0,
        text=text,
        stop_reason=None,
    )


class FailingFile(FileIO):
    """Writes `room` more bytes, then is full; room grows again when the test says so."""

    room = 10**9

    def write(self, data: Any) -> int:
        part = bytes(data)[: FailingFile.room]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        FailingFile.room -= len(part)
        return super().write(part)


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = run_folder(path) / MANIFEST_NAME
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(yaml.safe_dump(data), encoding="utf-8")


def num_prompt_tokens(path: Path) -> int:
    return read_manifest(run_folder(path)).num_prompt_tokens


def copy_of(path: Path, folder: Path) -> Path:
    shutil.copytree(run_folder(path), folder / run_folder(path).name)
    return Path(shutil.copy(path, folder))


def contents(path: Path) -> dict[str, bytes]:
    """All files of a document but the lock."""
    files = [path, *run_folder(path).iterdir()]
    return {file.name: file.read_bytes() for file in files if file.is_file() and file.name != LOCK_NAME}


def log_of(path: Path) -> bytes:
    return (run_folder(path) / TOKENS_NAME).read_bytes()


def text_of(engine: Engine, token_ids: list[int]) -> bytes:
    """What is final of the text of a run that goes on."""
    return TextStream(engine.tokenizer).push(token_ids).encode()


def cut(path: Path, num_tokens: int, engine: Engine, is_covered: bool = True) -> None:
    """As if the run had been killed after so many tokens.

    Args:
        is_covered: Whether the last of them are under a checksum.
    """
    folder = run_folder(path)
    write_manifest(
        folder, read_manifest(folder).model_copy(update={"status": "running", "stop_reason": None})
    )
    length = num_prompt_tokens(path) + num_tokens
    os.truncate(folder / TOKENS_NAME, 4 * length)
    path.write_bytes(text_of(engine, read_tokens(folder)[num_prompt_tokens(path) :]))
    if is_covered:
        add_record(path, length)


def add_record(path: Path, num_tokens: int) -> None:
    """Puts the first tokens of the log, the prompt included, under a checksum."""
    record = {"log_tokens": num_tokens, "log_crc32": zlib.crc32(log_of(path)[: 4 * num_tokens])}
    with (run_folder(path) / STEPS_NAME).open("ab") as steps:
        steps.write(json.dumps(record).encode() + b"\n")
