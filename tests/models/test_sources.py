"""Weights from folders, GGUF files and a fake hub."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from support.weights import GGUF_BYTES, failure, resolve, sha256
from swiftgen.models.sources import ResolvedSource


def model_folder(folder: Path, weights: bytes | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4) if weights is None else weights
    (folder / "model.safetensors").write_bytes(data)
    return folder


class TestFolders:
    def test_fingerprint_depends_on_config_and_weights(self, tmp_path: Path):
        folder = model_folder(tmp_path / "m")
        first = resolve(str(folder))
        assert (first.kind, first.path) == ("folder", folder)
        assert len(first.fingerprint) == 64
        assert resolve(str(folder)) == first
        (folder / "config.json").write_text("{}", encoding="utf-8")
        assert resolve(str(folder)).fingerprint != first.fingerprint

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
    def test_pickles_are_refused(self, tmp_path: Path, name: str):
        folder = model_folder(tmp_path / "m")
        (folder / "model.safetensors").rename(folder / name)
        error = failure(str(folder))
        assert name in error.message
        assert "safetensors" in error.hint

    def test_empty_and_missing(self, tmp_path: Path):
        assert "config.json" in failure(str(tmp_path)).message
        assert "no model folder" in failure(str(tmp_path / "nowhere")).message
        assert "no model folder" in failure("./nowhere").message
        assert "no model folder" in failure("too/many/parts").message

    def test_folder_of_ggufs(self, tmp_path: Path):
        (tmp_path / "w.gguf").write_bytes(GGUF_BYTES)
        assert "w.gguf" in failure(str(tmp_path)).hint

    def test_missing_shard(self, tmp_path: Path):
        folder = model_folder(tmp_path / "m")
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        assert "model-2.safetensors" in failure(str(folder)).message

    @pytest.mark.parametrize("text", ["", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": 1}'])
    def test_damaged_index(self, tmp_path: Path, text: str):
        folder = model_folder(tmp_path / "m")
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        assert "damaged" in failure(str(folder)).message

    @pytest.mark.parametrize("weights", [b"", b"short", (10**12).to_bytes(8, "little") + b"{}"])
    def test_damaged_weights(self, tmp_path: Path, weights: bytes):
        assert "not a safetensors file" in failure(str(model_folder(tmp_path / "m", weights))).message

    def test_hash_is_for_files(self, tmp_path: Path):
        assert "model.sha256" in failure(str(model_folder(tmp_path / "m")), sha256="0" * 64).message


class TestGguf:
    def test_local_file_leaves_its_folder_alone(self, tmp_path: Path, cache: Path):
        (tmp_path / "mine").mkdir()
        path = tmp_path / "mine" / "w.gguf"
        path.write_bytes(GGUF_BYTES)
        found = resolve(str(path), sha256=sha256(GGUF_BYTES))
        assert found == ResolvedSource("gguf", (path,), str(path), sha256(GGUF_BYTES))
        assert [p.name for p in path.parent.iterdir()] == ["w.gguf"]
        assert list((cache / "hashes").iterdir())

    def test_refusals(self, tmp_path: Path):
        path = tmp_path / "w.gguf"
        assert "no GGUF file" in failure(str(path)).message
        path.write_bytes(b"no such thing")
        assert "not a GGUF file" in failure(str(path)).message
        path.write_bytes(GGUF_BYTES)
        assert "the preset expects" in failure(str(path), sha256="0" * 64).message


class FakeHub:
    """Stands in for `huggingface_hub.snapshot_download`, with its documented keywords."""

    def __init__(self, remote: Path | Exception, local: Path | None = None) -> None:
        self.remote, self.local = remote, local
        self.calls: list[dict[str, object]] = []

    def __call__(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        self.calls.append({"repo_id": repo_id, "revision": revision, "local": local_files_only})
        assert allow_patterns is not None
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in allow_patterns)
        if local_files_only:
            if self.local is None:
                raise LocalEntryNotFoundError("not here")
            return str(self.local)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


def use_hub(monkeypatch: pytest.MonkeyPatch, remote: Path | Exception, local: Path | None = None) -> FakeHub:
    hub = FakeHub(remote, local)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def hub_error(kind: type[Exception], text: str) -> Exception:
    error = kind.__new__(kind)  # its constructor wants an HTTP response of whichever client is in use
    Exception.__init__(error, text)
    return error


class TestHub:
    def test_fetches_what_is_not_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        folder = model_folder(tmp_path / "snapshots" / "c0ffee")
        hub = use_hub(monkeypatch, folder)
        found = resolve("org/name", revision="v1")
        assert found == ResolvedSource("folder", (folder,), "org/name", "c0ffee")
        assert [call["local"] for call in hub.calls] == [True, False]
        assert hub.calls[1]["revision"] == "v1"

    def test_needs_no_network_for_what_is_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        folder = model_folder(tmp_path / "c0ffee")
        hub = use_hub(monkeypatch, ConnectionError("offline"), local=folder)
        assert resolve("org/name").fingerprint == "c0ffee"
        assert len(hub.calls) == 1

    def test_finishes_an_interrupted_download(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        half = model_folder(tmp_path / "half")
        (half / "model.safetensors").unlink()
        use_hub(monkeypatch, model_folder(tmp_path / "c0ffee"), local=half)
        assert resolve("org/name").fingerprint == "c0ffee"

    @pytest.mark.parametrize(
        ("error", "message", "hint"),
        [
            (hub_error(GatedRepoError, "403"), "is gated", "hf auth login"),
            (hub_error(RepositoryNotFoundError, "404"), "no hub repository org/name", "hf auth login"),
            (ConnectionError("no route to host\nmore"), "cannot fetch org/name: no route to host", "network"),
            (TimeoutError(), "cannot fetch org/name: TimeoutError", "local folder"),
        ],
    )
    def test_failures_say_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, hint: str
    ):
        use_hub(monkeypatch, error)
        found = failure("org/name")
        assert message in found.message
        assert hint in found.hint

    def test_repository_without_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        folder = model_folder(tmp_path / "c0ffee")
        (folder / "model.safetensors").unlink()
        use_hub(monkeypatch, folder)
        assert "refs/pr/N" in failure("org/name").hint
