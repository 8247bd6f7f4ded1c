"""Each test of weights has an empty cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(cache: Path) -> None:
    pass
