"""GGUF files on a fake hub: its functions as the hub library documents them, its cache as it keeps it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from support.weights import GGUF_BYTES, failure, resolve, sha256

NAMES = [
    *("README.md", "mmproj-model-f16.gguf", "model-imatrix.gguf", "m-f16.gguf", "m-Q4_K_M.gguf"),
    *("m-Q4_K_S.gguf", "m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m.q8_0.gguf"),
    *("m-IQ2_M.gguf", "other-IQ2_M.gguf", "Q6_K/m-00001-of-00002.gguf", "Q6_K/m-00002-of-00002.gguf"),
    *("half-Q5_K-00001-of-00002.gguf", "config.json"),
]


class FakeHub:
    """One repository; what is fetched from it is in a folder like that of the hub library."""

    def __init__(self, cache: Path) -> None:
        self.folder, self.blobs = cache / "snapshots" / "c0ffee", cache / "blobs"
        self.is_online, self.fetched = True, list[str]()

    def list_repo_files(self, repo_id: str, *, revision: str | None = None) -> list[str]:
        self._check(repo_id, revision)
        return NAMES

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:
            if not self.folder.is_dir():
                raise LocalEntryNotFoundError("not here")
            return str(self.folder)
        self._check(repo_id, revision)
        self.blobs.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            data = GGUF_BYTES + name.encode()
            file, blob = self.folder / name, self.blobs / sha256(data)
            file.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(data)
            file.symlink_to(blob)
            self.fetched.append(name)
        return str(self.folder)

    def _check(self, repo_id: str, revision: str | None) -> None:
        if not self.is_online:
            raise ConnectionError("no route to host")
        assert (repo_id, revision) == ("org/m-GGUF", None)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    found = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", found.list_repo_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    return found


@pytest.mark.parametrize(
    ("named", "names"),
    [
        (":Q4_K_M", ["m-Q4_K_M.gguf"]),
        (":q4_k_m", ["m-Q4_K_M.gguf"]),
        (":Q4_0", ["m-Q4_0.gguf"]),
        (":Q8_0", ["m.q8_0.gguf"]),
        (":f16", ["m-f16.gguf"]),
        (":Q6_K", ["Q6_K/m-00001-of-00002.gguf", "Q6_K/m-00002-of-00002.gguf"]),
        ("/m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]),
        ("/Q6_K/m-00002-of-00002.gguf", ["Q6_K/m-00001-of-00002.gguf", "Q6_K/m-00002-of-00002.gguf"]),
    ],
)
def test_a_file_is_fetched_once(hub: FakeHub, named: str, names: list[str]):
    found = resolve(f"hf:org/m-GGUF{named}")
    assert hub.fetched == names
    assert found.parts == tuple(hub.folder / name for name in names)
    hashes = [sha256(GGUF_BYTES + name.encode()) for name in names]
    assert found.fingerprint == (hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()))
    hub.is_online = False
    assert resolve(f"hf:org/m-GGUF{named}") == found
    assert hub.fetched == names


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (":Q3_K", "no GGUF file of type Q3_K; it has: Q6_K/m-00001-of-00002.gguf, half-"),
        (":IQ2_M", "several GGUF files of type IQ2_M: m-IQ2_M.gguf, other-IQ2_M.gguf"),
        (":Q5_K", "no GGUF file half-Q5_K-00002-of-00002.gguf; it has"),
        ("/n.gguf", "no GGUF file n.gguf; it has"),
        ("/../n.gguf", "no GGUF file ../n.gguf; it has"),
        ("", "not of the form hf:OWNER/REPO:TYPE or hf:OWNER/REPO/FILE.gguf"),
        ("/m-Q4_K_M", "not of the form"),
    ],
)
def test_one_line_says_what_is_there(hub: FakeHub, named: str, message: str):
    error = failure(f"hf:org/m-GGUF{named}")
    assert message in error.message
    assert "mmproj" not in error.message
    assert not hub.fetched


def test_another_type_beside_one_that_is_here(hub: FakeHub):
    resolve("hf:org/m-GGUF:Q4_K_M")
    resolve("hf:org/m-GGUF:Q4_0")
    assert hub.fetched == ["m-Q4_K_M.gguf", "m-Q4_0.gguf"]


def test_without_a_network(hub: FakeHub):
    hub.is_online = False
    assert "cannot fetch org/m-GGUF: no route to host" in failure("hf:org/m-GGUF:Q4_0").message


def test_a_file_that_was_damaged_on_its_way(hub: FakeHub):
    found = resolve("hf:org/m-GGUF:Q4_0").path.resolve()
    found.write_bytes(GGUF_BYTES + b"something else")
    assert f"Delete {found}" in failure("hf:org/m-GGUF:Q4_0").hint


def test_the_hash_of_a_preset(hub: FakeHub):
    data = GGUF_BYTES + b"m-Q4_0.gguf"
    assert resolve("hf:org/m-GGUF:Q4_0", sha256=sha256(data)).fingerprint == sha256(data)
    assert "the preset expects" in failure("hf:org/m-GGUF:Q4_0", sha256=sha256(b"")).message
