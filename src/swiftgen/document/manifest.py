"""run.yaml: what a run was asked for and with what it was computed. Enough to resume it exactly."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from swiftgen.settings.files import YamlError, dump_yaml, read_yaml
from swiftgen.settings.strict import Strict
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import read_regular, replace_file
from swiftgen.system.version import __version__ as swiftgen_version

MANIFEST_NAME = "run.yaml"
COMPLETE_REASONS = ("length", "eos")

_HEADER = "# Written by swiftgen. The token log (tokens.bin) is the truth; the text is derived from it.\n"
_CHECKSUM = "# crc32 of the lines below: {:08x}\n"
_CHECKED = re.compile(rb"#[^\n]*\n# crc32 of the lines below: ([0-9a-f]{8})\n")


class ModelRecord(Strict):
    """The model as it was loaded."""

    source: str
    fingerprint: str
    dtype: str
    device: str
    max_positions: int = Field(ge=1)


class Continuation(Strict):
    """One time that a run was continued."""

    time: AwareDatetime
    num_tokens: int = Field(ge=0)  # that were there, without the prompt
    versions: dict[str, str]
    differences: list[str]  # from what the run was begun with, accepted with --anyway


class Manifest(Strict):
    """The content of run.yaml."""

    format: Literal[1] = 1  # of the run folder; a change that old code cannot read raises it
    text_file: str = Field(min_length=1)  # name only: the run folder lies beside it
    created: AwareDatetime
    status: Literal["running", "complete", "stopped"] = "running"
    stop_reason: str | None = None
    seed: int
    num_tokens: int = Field(ge=1)  # planned, without the prompt
    num_prompt_tokens: int = Field(ge=1)
    model: ModelRecord
    preset: dict[str, JsonValue]  # resolved
    arithmetic: dict[str, JsonValue]  # a resumed run must match it to write the same bytes
    versions: dict[str, str]
    continued: list[Continuation] = Field(default_factory=list)

    def finished(self, stop_reason: str) -> Manifest:
        """The manifest of the same run after it ended."""
        status = "complete" if stop_reason in COMPLETE_REASONS else "stopped"
        return self.model_copy(update={"status": status, "stop_reason": stop_reason})

    def resumed(
        self,
        num_there: int,
        num_tokens: int,
        differences: Sequence[str],
        model: ModelRecord,
        arithmetic: dict[str, JsonValue],
    ) -> Manifest:
        """The manifest of the same run as it goes on.

        Args:
            num_there: tokens that are there, without the prompt.
            num_tokens: planned, without the prompt.
            differences: see `Continuation`.
            model: with which it goes on.
            arithmetic: with which it goes on.
        """
        entry = Continuation(
            time=now_utc(),
            num_tokens=num_there,
            versions=installed_versions(),
            differences=list(differences),
        )
        return self.model_copy(
            update={
                "status": "running",
                "stop_reason": None,
                "num_tokens": num_tokens,
                "model": model,
                "arithmetic": arithmetic,
                "continued": [*self.continued, entry],
            }
        )


def now_utc() -> datetime:
    """The current time, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def installed_versions() -> dict[str, str]:
    """Versions of what the bytes of a run depend on; nothing is imported for it."""
    versions = {"swiftgen": swiftgen_version}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces run.yaml as a whole: a reader, or a power cut, sees the old one or the new one.

    Raises:
        OSError: the file cannot be written; the old one is still there.
    """
    content = dump_yaml(manifest.model_dump()).encode("utf-8")
    data = (_HEADER + _CHECKSUM.format(zlib.crc32(content))).encode("utf-8") + content
    replace_file(folder / MANIFEST_NAME, lambda temporary: temporary.write_bytes(data))


def read_manifest(folder: Path) -> Manifest:
    """Reads the run.yaml of a run folder.

    Raises:
        SwiftgenError: the file is missing, unreadable, damaged, or of a newer format.
    """
    path = folder / MANIFEST_NAME
    hint = "the folder belongs to no run of swiftgen, or its file was changed by hand"
    try:
        content = read_regular(path, follow_links=False)
        checked = _CHECKED.match(content)
        if checked and zlib.crc32(content[checked.end() :]) != int(checked[1], 16):
            raise SwiftgenError(
                f"{path} is damaged: its checksum is another",
                "if you changed it on purpose, remove its second line, which holds the checksum",
            )
        data = read_yaml(content.decode("utf-8"))[1]
    except OSError as error:
        raise SwiftgenError(f"cannot read {path}: {error.strerror or error}", hint) from error
    except (YamlError, UnicodeDecodeError) as error:
        raise SwiftgenError(f"{path} is damaged: it is not YAML", hint) from error
    if isinstance(data, Mapping) and isinstance(data.get("format"), int) and data["format"] > 1:
        raise SwiftgenError(f"{path} was written by a newer swiftgen", "update swiftgen")
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "content"
        raise SwiftgenError(f"{path} is damaged: {where}: {problem['msg']}", hint) from error
