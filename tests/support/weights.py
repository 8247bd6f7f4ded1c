"""Resolving a model source in a test, and bytes that look like a GGUF file."""

from __future__ import annotations

import hashlib

import pytest

from swiftgen.models.sources import ResolvedSource, resolve_source
from swiftgen.settings.schema import ModelSettings
from swiftgen.system.errors import SwiftgenError

GGUF_BYTES = b"GGUF" + bytes(range(256)) * 8


def resolve(source: str, **settings: str) -> ResolvedSource:
    return resolve_source(ModelSettings(source=source, **settings))


def failure(source: str, **settings: str) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        resolve(source, **settings)
    assert "\n" not in caught.value.message
    return caught.value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
