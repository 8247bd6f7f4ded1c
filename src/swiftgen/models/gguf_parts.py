"""GGUF files that are split: NAME-00001-of-00003.gguf and so on, with the metadata in the first part."""

from __future__ import annotations

import os
import re
from pathlib import Path

from swiftgen.system.errors import SwiftgenError

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """The names of all parts of the file that a name is a part of; that name alone if it is whole."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    total = int(found["total"])
    return [f"{found['name']}-{number:05}-of-{total:05}{name[-5:]}" for number in range(1, total + 1)]


def is_further_part(name: str) -> bool:
    """Whether it is the second part of a file or a later one."""
    found = _PART.fullmatch(name)
    return found is not None and int(found["number"]) != 1


def local_parts(path: Path) -> list[Path]:
    """All parts of a file in order, whichever of them is named.

    Raises:
        SwiftgenError: one is missing.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    for part in parts:
        if not os.path.isfile(part):
            raise SwiftgenError(
                f"there is no GGUF file {part}",
                f"All {len(parts)} parts are needed in one folder."
                if len(parts) > 1
                else "Check the path in model.source.",
            )
    return parts
