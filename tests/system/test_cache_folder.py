"""The cache folder: who may write to it, and what if nobody can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import LlamaConfig

from support.model_files import preset_for, tiny_model, write_gguf
from swiftgen.models.loading import open_model
from swiftgen.system.cache_folder import writable_by_others
from swiftgen.system.errors import SwiftgenError

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no such rights on this system")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir(mode=0o755)
    file.touch(mode=0o644)
    return file


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o700, False), (0o755, False), (0o757, True), (0o1777, False)]
)
def test_a_folder(mode: int, is_open: bool, place: Path):
    place.parent.chmod(mode)
    assert writable_by_others(place) == (place.parent if is_open else None)
    assert writable_by_others(place.with_name("new")) == (place.parent if is_open else None)


def test_a_file(place: Path):
    assert writable_by_others(place) is None
    place.chmod(0o646)
    assert writable_by_others(place) == place


def test_a_link_counts_as_what_it_leads_to(place: Path, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(place.parent)
    assert writable_by_others(link / "file") is None
    place.parent.chmod(0o777)
    assert writable_by_others(link / "file") == place.parent


@pytest.mark.parametrize("name", ["loop", "gone"])
def test_a_link_that_leads_nowhere(name: str, tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nothing")
    assert writable_by_others(tmp_path / name / "file") is None


def test_the_group_of_the_user_alone_is_no_other(place: Path, monkeypatch: pytest.MonkeyPatch):
    place.chmod(0o664)
    gid = place.stat().st_gid
    for is_own in (True, False):
        monkeypatch.setattr(
            "swiftgen.system.cache_folder._is_own_group", lambda g, own=is_own: own and g == gid
        )
        assert writable_by_others(place) == (None if is_own else place)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another(place: Path):
    os.chown(place.parent, 12_345, -1)
    assert writable_by_others(place) == place.parent


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space")]
)
@pytest.mark.usefixtures("cache")
def test_a_disk_that_is_full_while_a_file_is_described(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", tiny_model())

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(LlamaConfig, "save_pretrained", fails)
    with pytest.raises(SwiftgenError, match=r"cannot write the model cache .*No space"):
        open_model(preset_for(tmp_path / "tiny.gguf"))
    assert not list((tmp_path / "cache" / "work").iterdir())
