"""Test setup: tiny models do not fight over cores, signals arrive; what several folders share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny passes cost less than waking threads

import swiftgen
from support.commands import write_command
from support.model_files import MAX_POSITIONS, save_model, tiny_tokenizer
from swiftgen.cli.app import main
from swiftgen.decoding import memory, planner
from swiftgen.decoding.costs import Costs
from swiftgen.engine import Engine
from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import Preset

# Background jobs and nohup ignore these, and so would all processes that tests start.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), handler)

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("SWIFTGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run knows what another one has learnt about drafting."""
    monkeypatch.setattr(memory, "FOLDER", str(tmp_path_factory.mktemp("drafting")))


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWIFTGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def preset_file(module_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset for a random model that writes all kinds of tokens, parts of characters among them."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, initializer_range=0.25, max_position_embeddings=MAX_POSITIONS)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    file = folder.parent / "tiny.yaml"
    file.write_text(
        f"""
name: tiny
model:
  source: {folder}
  dtype: float32
  device: cpu
theta: 1.1
W: 64
kv_budget: 48
sink: 4
tree: [2, 2]
sampler:
  temperature: 0.9
  min_p: 0.02
""",
        encoding="utf-8",
    )
    return file


@pytest.fixture
def even_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured plans draft by one way or another and verify all of it, whatever it takes on this machine."""
    monkeypatch.setattr(Costs, "seconds", lambda self, size: 1.0)
    monkeypatch.setattr(Costs, "level_seconds", lambda self, source, share: 0.0)
    for margin in ("ENTER", "STAY", "ROWS_MARGIN"):
        monkeypatch.setattr(planner, margin, -1.0)


@pytest.fixture(scope="module")
def engines() -> Iterator[None]:
    """Loads each preset once; every run starts afresh all the same."""
    loaded: dict[str, Engine] = {}
    load = swiftgen.load

    def load_once(preset: str | Preset, overrides: Mapping[str, Any] | None = None) -> Engine:
        if not isinstance(preset, Preset):
            preset = load_preset(preset, overrides)
        key = preset.model_dump_json()
        if key not in loaded:
            loaded[key] = load(preset)
        loaded[key].stretch_to = 0
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(swiftgen), "load", load_once)
        yield


@pytest.fixture(scope="module")
def engine(preset_file: Path) -> Engine:
    """One engine for all tests that change nothing."""
    return swiftgen.load(str(preset_file))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, preset_file: Path) -> Path:
    """A run that was never stopped."""
    path = tmp_path_factory.mktemp("written") / "book.txt"
    assert main([*write_command(preset_file, path), "-q"]) == 0
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, preset_file: Path) -> Path:
    """Another run, with a text file of another name."""
    path = tmp_path_factory.mktemp("other") / "other.txt"
    assert main([*write_command(preset_file, path, 100), "-q", "--seed", "6"]) == 0
    return path
