"""Where the native kernels come from: built once into the cache folder, or PyTorch's operators instead."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.tiny import new_target, tiny_model
from swiftgen.forward.layers import FusedLayer
from swiftgen.forward.native_layer import NativeLayer
from swiftgen.native import build as native
from swiftgen.native.build import kernels_for
from swiftgen.native.kernels import Kernels
from swiftgen.system.errors import SwiftgenError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIBRARY = getattr(kernels_for("auto", CPU, torch.float32, 64), "_library", None)
"""The one that all other tests use."""
needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="this machine cannot build the native kernels")


@pytest.fixture(scope="module", autouse=True)
def kernels_of_other_tests() -> Iterator[None]:
    """Found again afterwards where they are, not built into the cache folder of some test."""
    yield
    native._built()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and kernels that are looked for anew."""
    look = native._built
    monkeypatch.setenv("SWIFTGEN_CACHE", str(tmp_path / "cache"))
    look.cache_clear()
    yield tmp_path / "cache"
    look.cache_clear()


def find(attention: str = "auto") -> Kernels | None:
    native._built.cache_clear()
    return kernels_for(attention, CPU, torch.float32, 64)


def refusal() -> SwiftgenError:
    """What is said when they are asked for and cannot be had."""
    native._built.cache_clear()
    with pytest.raises(SwiftgenError, match="native CPU kernels cannot be used") as caught:
        kernels_for("native", CPU, torch.float32, 64)
    assert "\n" not in caught.value.message
    assert "model.attention=auto" in caught.value.hint
    return caught.value


def built(cache: Path) -> list[str]:
    """Names of the libraries in the cache."""
    return sorted(path.name for path in (cache / "kernels").glob("*"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a script the only compiler; it logs its calls, and `compile` is what it does with `$out`."""

    def make(compile: str, version: str = 'echo "fake 1.0"') -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script, log = folder / "fake-c++", tmp_path / "calls"
        script.write_text(
            f'#!/bin/sh\necho "$*" >> "{log}"\nif [ "$1" = --version ]; then {version}; exit; fi\n'
            f"for out; do :; done\n{compile}\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(native, "_compilers", lambda: [str(script)])
        return log

    return make


NUM_CALLS = 1 + sum(name.endswith(".cpp") for name in native._SOURCES) + 1
"""Of a compiler: its version, the sources, the library of them."""
COPY = f'cp "{LIBRARY and LIBRARY._name}" "$out"'
"""Compiles quickly: to what other tests use."""


def _build_name() -> str:
    kernels = find()
    assert kernels is not None
    return kernels.build


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_none_are_used_where_another_attention_is_asked_for(attention: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_built", lambda: pytest.fail("they were looked for"))
    assert kernels_for(attention, CPU, torch.float32, 64) is None
    assert kernels_for(attention, CUDA, torch.bfloat16, 64) is None


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [
        (CUDA, torch.bfloat16, 64),
        (CPU, torch.float16, 64),
        (CPU, torch.float64, 64),
        (CPU, torch.float32, 513),
    ],
)
def test_none_are_used_where_they_do_not_fit(
    device: torch.device, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "_built", lambda: pytest.fail("they were looked for"))
    assert kernels_for("auto", device, dtype, head_dim) is None
    with pytest.raises(SwiftgenError, match="CPUs, bfloat16 or float32, and heads of at most 512") as caught:
        kernels_for("native", device, dtype, head_dim)
    assert "\n" not in caught.value.message
    assert "model.attention=auto" in caught.value.hint


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_heads_of_512_fit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    kernels = object()
    monkeypatch.setattr(native, "_built", lambda: (kernels, ""))
    for attention in ("auto", "native"):
        assert kernels_for(attention, CPU, dtype, 512) is kernels


def test_without_a_compiler_pytorch_computes(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_compiler(monkeypatch, tmp_path)
    assert find() is None
    assert "install g++ or clang++" in refusal().message
    with pytest.raises(SwiftgenError, match=r"install g\+\+"):
        new_target(tiny_model(), "native")
    model = tiny_model()
    target = new_target(model)
    assert all(type(layer) is FusedLayer for layer in model.base_model.layers)
    assert target.arithmetic["attention"] == "cpu_prefix"
    assert not cache.exists()


FAILURES = {
    "errors": "echo 'error: no such flag' >&2; exit 1",
    "writes nothing": "exit 0",
    "writes no library": 'echo "not a library" > "$out"',
}


@pytest.mark.parametrize("failure", FAILURES)
def test_with_a_compiler_that_fails_pytorch_computes(
    failure: str, cache: Path, compiler: Callable[[str], Path]
):
    compiler(FAILURES[failure])
    assert find() is None
    message = refusal().message
    assert "fake-c++" in message
    assert "could not build" in message
    assert list((cache / "work").iterdir()) == []


def test_with_a_compiler_that_does_not_tell_its_version_pytorch_computes(compiler: Callable[..., Path]):
    compiler("exit 0", version="exit 3")
    assert find() is None
    assert "could not build" in refusal().message


@needs_kernels
@pytest.mark.parametrize("case", ["a file in its place", "on a disk that takes nothing"])
def test_with_a_cache_folder_that_cannot_be_written_the_library_is_of_this_run(
    case: str,
    cache: Path,
    compiler: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    compiler(COPY)
    if case == "a file in its place":
        cache.write_text("x")
    else:
        monkeypatch.setenv("SWIFTGEN_CACHE", "/proc/swiftgen")
    assert_built_for_this_run(caplog, "cannot write the model cache")


@needs_kernels
@pytest.mark.parametrize("shared", ["the folder", "its kernels", "the library"])
def test_a_library_that_others_may_write_is_not_used(
    shared: str, cache: Path, compiler: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    log = compiler(COPY)
    assert find() is not None
    (library,) = (cache / "kernels").iterdir()
    library.write_bytes(b"of an intruder")
    place = {"the folder": cache, "its kernels": cache / "kernels", "the library": library}[shared]
    place.chmod(place.stat().st_mode | 0o002)
    assert_built_for_this_run(caplog, f"others may write to {place}")
    assert library.read_bytes() == b"of an intruder"
    assert len(log.read_text().splitlines()) == 2 * NUM_CALLS


def assert_built_for_this_run(caplog: pytest.LogCaptureFixture, why: str) -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    assert find("native") is not None
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not [
        path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if "swiftgen" in path.name
    ]


@needs_kernels
def test_a_cache_folder_behind_a_link_is_used(
    cache: Path, compiler: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    compiler(COPY)
    place = cache.with_name("elsewhere")
    place.mkdir()
    cache.symlink_to(place)
    assert find() is not None
    assert len(built(place)) == 1
    assert not caplog.records


def test_a_compiler_is_asked_once_a_process_when_it_fails(compiler: Callable[[str], Path]):
    log = compiler("exit 1")
    for _ in range(3):
        assert kernels_for("auto", CPU, torch.float32, 64) is None
    assert log.read_text().splitlines().count("--version") == 1


@needs_kernels
def test_the_library_is_built_once(cache: Path, compiler: Callable[[str], Path]):
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    log = compiler(f'exec "{real}" "$@"')
    first = find("native")
    assert first is not None
    assert built(cache) == [f"{first.build}.so"]
    assert list((cache / "work").iterdir()) == []
    version, *_, build = calls = log.read_text().splitlines()
    assert len(calls) == NUM_CALLS
    assert version == "--version"
    assert "-march=native" in build
    assert "-ffast-math" not in build
    again = find("native")
    assert again is not None
    assert again.build == first.build
    assert log.read_text().splitlines() == [*calls, "--version"]  # not compiled again
    zero = torch.zeros(1, 4)
    assert torch.equal(again.gate(zero, 0), zero[:, :2])


@needs_kernels
def test_what_the_code_depends_on_names_the_build(
    cache: Path, tmp_path: Path, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    compiler(COPY)
    builds = [_build_name()]
    assert _build_name() == builds[0]

    with monkeypatch.context() as patch:
        patch.setattr(native, "_FLAGS", (*native._FLAGS, "-DOTHER"))
        builds.append(_build_name())
    with monkeypatch.context() as patch:
        patch.setattr(native, "_processor", lambda: "another processor")
        builds.append(_build_name())
    folder = native.resources.files("swiftgen.native")
    for changed in native._SOURCES:
        with monkeypatch.context() as patch:
            for name in native._SOURCES:
                source = folder.joinpath(name).read_text(encoding="utf-8")
                source += "// changed\n" if name == changed else ""
                (tmp_path / name).write_text(source, encoding="utf-8")
            patch.setattr(native, "resources", SimpleNamespace(files=lambda _: tmp_path))
            builds.append(_build_name())
    compiler(COPY, version='echo "fake 2.0"')
    builds.append(_build_name())

    assert len(set(builds)) == 4 + len(native._SOURCES)
    assert built(cache) == sorted(f"{build}.so" for build in builds)


@needs_kernels
def test_the_arithmetic_of_a_target_names_the_build(compiler: Callable[[str], Path]):
    compiler(COPY)
    model = tiny_model()
    assert new_target(model).arithmetic["attention"] == f"native {_build_name()}"
    assert all(type(layer) is NativeLayer for layer in model.base_model.layers)
    assert new_target(tiny_model(), "sdpa").arithmetic["attention"] == "cpu_prefix"
