"""Products with weights in few bits: against gguf's own numbers, float64, other rows and other processors."""

from __future__ import annotations

import ctypes
import functools
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from support.gguf_files import PACKABLE, random_blocks
from swiftgen.forward.linear import PackedLinear
from swiftgen.native import build as native
from swiftgen.native.build import kernels_for
from swiftgen.native.kernels import Kernels
from swiftgen.native.structs import Product
from swiftgen.native.weights import PackedWeight, rows_in_8_bits

CPU = torch.device("cpu")
KERNELS = kernels_for("auto", CPU, torch.float32, 64)
if KERNELS is None:
    pytest.skip("this machine cannot build the native kernels", allow_module_level=True)

UNITS = set(native._processor().split())
BUILDS: dict[str, tuple[list[str], set[str]]] = {
    "native": ([], set()),
    "without tiles": (["-march=native", "-mno-amx-bf16", "-mno-amx-tile", "-mno-amx-int8"], {"amx_bf16"}),
    "without VNNI": (["-march=native", "-mno-avx512vnni"], {"avx512_vnni"}),
    "x86-64-v3, AVX-VNNI": (["-march=x86-64-v3", "-mavxvnni"], {"avx2", "fma", "avx_vnni"}),
    "x86-64-v3": (["-march=x86-64-v3"], {"avx2", "fma", "f16c", "bmi2", "movbe"}),
    "x86-64-v2": (["-march=x86-64-v2"], {"sse4_2", "ssse3", "popcnt"}),
}
"""Flags instead of -march=native, and the units that such code needs."""
TOLERANCE = 3e-6
"""Of a sum in float32, relative to the sum of the absolute values: one of hundreds, each addition rounded."""

every_kind = pytest.mark.parametrize("kind", PACKABLE, ids=[kind.name for kind in PACKABLE])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
both_arithmetics = pytest.mark.parametrize("is_integer", [False, True], ids=["full", "int8"])


def compile_in(folder: Path, sources: Mapping[str, str], flags: list[str]) -> None:
    for file, source in sources.items():
        (folder / file).write_text(source, encoding="utf-8")
    command = [native.found_compilers()[0], *flags, *(file for file in sources if not file.endswith(".h"))]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)


def objects_of(files: Sequence[str], flags: list[str], folder: Path) -> list[str]:
    """Some of our sources, compiled."""
    here = resources.files("swiftgen.native")
    headers = [file for file in native._SOURCES if file.endswith(".h")]
    sources = {file: here.joinpath(file).read_text(encoding="utf-8") for file in [*headers, *files]}
    others = [flag for flag in native._FLAGS if flag not in ("-O3", "-march=native", "-shared")]
    compile_in(folder, sources, [*others, *flags, "-c"])
    return [str(folder / file.replace(".cpp", ".o")) for file in files]


@functools.cache
def all_but_the_products() -> list[str]:
    """Not optimised, for any processor."""
    files = [file for file in native._SOURCES if file.endswith(".cpp") and file != "products.cpp"]
    return objects_of(files, ["-O0"], Path(tempfile.mkdtemp()))


def other_build(name: str, folder: Path) -> Kernels:
    """The products as lesser processors have them, in a library with all else."""
    flags, needed = BUILDS[name]
    if platform.machine() not in ("x86_64", "AMD64") or not needed <= UNITS:
        pytest.skip("not for this processor")
    objects = objects_of(["products.cpp"], [*flags, "-O1"], folder) + all_but_the_products()
    compile_in(folder, {}, ["-shared", "-fopenmp", *objects, "-o", "kernels.so"])
    return Kernels(folder / "kernels.so", name)


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param == "native":
        assert KERNELS is not None
        return KERNELS
    return other_build(request.param, tmp_path_factory.mktemp("build"))


def random_rows(kind: Kind, num_out: int, num_in: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(random_blocks(kind, num_out, num_in, seed))


def numbers_of(kind: Kind, rows: Tensor) -> Tensor:
    """What the gguf library makes of rows: float32 `[out, in]`."""
    return torch.from_numpy(gguf.dequantize(rows.numpy(), kind))


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(
    kernels: Kernels, kind: Kind, num_out: int, num_in: int, seed: int = 0
) -> tuple[PackedWeight, Tensor]:
    rows = random_rows(kind, num_out, num_in, seed)
    return kernels.pack(int(kind), rows, num_in), numbers_of(kind, rows)


def rounded(x: Tensor) -> Tensor:
    """Rows in 8 bits, the largest number of 32 being 127: float64."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # `127 / x` is a reciprocal and a product, which is rounded twice.
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)
    return ((blocks * inverse).round().double() * (largest / 127).double()).flatten(-2)


class TestPacking:
    @every_kind
    def test_unpacked_weights_are_those_of_the_gguf_library(self, kernels: Kernels, kind: Kind):
        weight, numbers = packed(kernels, kind, 48, 512)
        assert torch.equal(kernels.unpack(weight, torch.arange(48)), numbers)
        assert torch.equal(kernels.unpack(weight, torch.tensor([7, 47, 7])), numbers[[7, 47, 7]])

    @every_kind
    def test_a_packed_weight_is_hardly_larger_than_its_rows(self, kind: Kind):
        assert KERNELS is not None
        rows = random_rows(kind, 48, 512)
        num_bytes = KERNELS.pack(int(kind), rows, 512).data.numel()
        assert rows.numel() <= num_bytes <= 1.03 * rows.numel()

    def test_rows_may_come_in_another_order(self):
        assert KERNELS is not None
        rows = random_rows(Kind.Q5_K, 32, 256)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
        weight = KERNELS.pack(int(Kind.Q5_K), rows, 256, order)
        assert torch.equal(KERNELS.unpack(weight, torch.arange(32)), numbers_of(Kind.Q5_K, rows)[order])

    @pytest.mark.parametrize(
        ("kind", "num_out", "num_in"),
        [
            (Kind.Q4_1, 24, 64),
            (Kind.Q4_1, 16, 48),
            (Kind.Q4_K, 16, 288),
            (Kind.Q2_K, 16, 256),
            (Kind.F32, 16, 64),
        ],
    )
    def test_what_cannot_be_packed(self, kind: Kind, num_out: int, num_in: int):
        assert KERNELS is not None
        assert not KERNELS.can_pack(int(kind), num_out, num_in)
        assert KERNELS.can_pack(int(Kind.Q4_1), 32, 64)

    def test_to_the_nearest_of_8_bits(self):
        assert KERNELS is not None
        weight = random_numbers(32, 64, seed=1)
        rows = rows_in_8_bits(weight)
        assert torch.equal(
            KERNELS.unpack(KERNELS.pack(8, rows, 64), torch.arange(32)), numbers_of(Kind.Q8_0, rows)
        )
        step = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        error = (numbers_of(Kind.Q8_0, rows) - weight).unflatten(1, (-1, 32)).abs()
        assert (error <= 0.51 * step + 1e-3 * step * 127).all()


SHAPES = [(16, 1, False), (48, 2, True), (48, 5, False), (80, 17, True), (16, 33, False), (48, 70, True)]
"""Out, rows, has bias."""


@both_dtypes
@every_kind
class TestProduct:
    """Of every build."""

    def check(self, kernels: Kernels, kind: Kind, dtype: torch.dtype, is_integer: bool) -> None:
        for num_out, num_rows, has_bias in SHAPES:
            weight, numbers = packed(kernels, kind, num_out, 512, seed=num_rows)
            x = random_numbers(num_rows, 512, seed=6).to(dtype)
            before = x.clone()
            used = rounded(x) if is_integer else x.double()
            numbers = (numbers if is_integer else numbers.to(dtype)).double()
            bias = random_numbers(num_out, seed=3).to(dtype) if has_bias else None
            expected = used @ numbers.T + (0 if bias is None else bias.double())
            allowed = TOLERANCE * (used.abs() @ numbers.abs().T + 1)
            for is_wide in (False, True):
                actual = kernels.multiply(Product([weight], bias, is_integer, is_wide), x)
                assert actual.dtype == (torch.float32 if is_wide else dtype)
                rounding = 2**-8 * expected.abs() if actual.dtype == torch.bfloat16 else 0
                assert ((actual.double() - expected).abs() <= allowed + rounding).all(), (num_out, num_rows)
            assert torch.equal(x, before)

    def test_weights_of_the_unpacked_model(self, kernels: Kernels, kind: Kind, dtype: torch.dtype):
        self.check(kernels, kind, dtype, is_integer=False)

    def test_activations_in_8_bits(self, kernels: Kernels, kind: Kind, dtype: torch.dtype):
        self.check(kernels, kind, dtype, is_integer=True)

    def test_activations_in_16_bits(self, kernels: Kernels, kind: Kind, dtype: torch.dtype):
        weight, numbers = packed(kernels, kind, 48, 512)
        x = random_numbers(21, 512, seed=6).to(dtype)
        numbers, used = numbers.double(), rounded(x) + rounded((x.double() - rounded(x)).float())
        expected = used @ numbers.T
        actual = kernels.multiply(Product([weight], None, activation_bytes=2, is_wide=True), x)
        allowed = 2 * TOLERANCE * (used.abs() @ numbers.abs().T + 1)
        assert ((actual.double() - expected).abs() <= allowed).all()
        assert (used - x.double()).abs().max() < 2e-4 * x.double().abs().max()
        alone = torch.cat([kernels.multiply(Product([weight], None, 2, True), row.unsqueeze(0)) for row in x])
        assert torch.equal(alone, actual)

    def test_integers_are_the_same_on_every_processor(self, kernels: Kernels, kind: Kind, dtype: torch.dtype):
        assert KERNELS is not None
        weight, _ = packed(KERNELS, kind, 48, 1536)
        product, x = Product([weight], None, activation_bytes=1), random_numbers(19, 1536, seed=2).to(dtype)
        assert torch.equal(kernels.multiply(product, x), KERNELS.multiply(product, x))


@both_arithmetics
@both_dtypes
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
class TestRows:
    """What is beside a row changes no bit of it."""

    def test_other_rows(self, kernels: Kernels, kind: Kind, dtype: torch.dtype, is_integer: bool):
        product, x = self.cancelling(kernels, kind, dtype, is_integer)
        alone = torch.cat([kernels.multiply(product, row.unsqueeze(0)) for row in x])
        assert (alone != 0).double().mean() > 0.4  # else nothing is seen
        generator = torch.Generator().manual_seed(4)
        for num_rows in (*range(1, 20), 32, 33, 64, 70):
            for order in (torch.arange(num_rows), torch.randperm(70, generator=generator)[:num_rows]):
                assert torch.equal(kernels.multiply(product, x[order]), alone[order]), num_rows

    def test_rows_that_are_no_numbers(
        self, kernels: Kernels, kind: Kind, dtype: torch.dtype, is_integer: bool
    ):
        product, x = self.cancelling(kernels, kind, dtype, is_integer)
        expected = kernels.multiply(product, x)
        for num_rows in (2, 7, 16, 40, 70):
            wrong = x[:num_rows].clone()
            wrong[::2, ::5], wrong[::4, 7] = float("nan"), float("inf")
            actual = kernels.multiply(product, wrong)
            assert torch.equal(actual[1::2], expected[1:num_rows:2])
            assert actual[::2].isnan().all()

    def test_threads(
        self, kernels: Kernels, kind: Kind, dtype: torch.dtype, is_integer: bool, num_threads: None
    ):
        product, x = self.cancelling(kernels, kind, dtype, is_integer)
        expected = kernels.multiply(product, x)
        for count in (2, 3, 5):  # of 3 groups of features
            torch.set_num_threads(count)
            for num_rows in (1, 18, 70):
                assert torch.equal(kernels.multiply(product, x[:num_rows]), expected[:num_rows]), count

    @staticmethod
    def cancelling(
        kernels: Kernels, kind: Kind, dtype: torch.dtype, is_integer: bool
    ) -> tuple[Product, Tensor]:
        """70 rows whose second half undoes the first: what is left is rounding, and shows any other order."""
        rows = random_rows(kind, 48, 512)
        weight = kernels.pack(int(kind), torch.cat([rows, rows], dim=1), 1024)
        half = random_numbers(70, 512, seed=3).to(dtype)
        return Product([weight], None, is_integer), torch.cat([half, -half], dim=1)


@both_arithmetics
def test_parts_of_different_types_are_one_product(is_integer: bool):
    assert KERNELS is not None
    parts = [packed(KERNELS, kind, 16 * (i + 1), 512, seed=i)[0] for i, kind in enumerate(PACKABLE)]
    x = random_numbers(3, 512, seed=1).bfloat16()
    apart = [KERNELS.multiply(Product([part], None, is_integer), x) for part in parts]
    assert torch.equal(KERNELS.multiply(Product(parts, None, is_integer), x), torch.cat(apart, dim=1))


def test_rows_may_have_any_shape():
    assert KERNELS is not None
    product = Product([packed(KERNELS, Kind.Q4_1, 48, 64)[0]], None, activation_bytes=1)
    x = random_numbers(3, 64, 5, seed=1)
    expected = KERNELS.multiply(product, x.transpose(1, 2).reshape(15, 64))
    assert torch.equal(
        KERNELS.multiply(product, x.transpose(1, 2)), expected.view(3, 5, 48)
    )  # not contiguous
    assert torch.equal(KERNELS.multiply(product, x[0].T[3]), expected[3])


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def has_tiles() -> bool:
    return "amx_bf16" in UNITS and torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not has_tiles(), reason="only where the processor has tiles")
class TestTiles:
    """What our use of the tiles leaves to others on the same thread."""

    def test_kernels_of_pytorch_work_before_and_after(self):
        assert KERNELS is not None
        ours = Product([packed(KERNELS, Kind.Q4_1, 48, 96)[0]], None, activation_bytes=0)
        theirs = nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
        packed_linear = PackedLinear(theirs)
        x, y = random_numbers(64, 96, seed=1).bfloat16(), random_numbers(64, 256, seed=2).bfloat16()
        first, other = theirs(y), packed_linear(y)
        exact = y.double() @ theirs.weight.double().T + theirs.bias.double()
        torch.testing.assert_close(first.double(), exact, rtol=2**-8, atol=1e-4)
        expected = {num_rows: KERNELS.multiply(ours, x[:num_rows]) for num_rows in (64, 3, 17)}
        for _ in range(3):
            for num_rows, result in expected.items():
                assert torch.equal(KERNELS.multiply(ours, x[:num_rows]), result)
                assert torch.equal(theirs(y), first)
                assert torch.equal(KERNELS.multiply(ours, x[:num_rows]), result)
                assert torch.equal(packed_linear(y), other)

    def test_the_tiles_are_configured_as_before(self, tmp_path: Path, num_threads: None):
        assert KERNELS is not None
        torch.set_num_threads(1)
        source = """#include <immintrin.h>
            extern "C" void load(const void* p) { _tile_loadconfig(p); }
            extern "C" void store(void* p) { _tile_storeconfig(p); }
            extern "C" void release() { _tile_release(); }"""
        flags = ["-march=native", "-fPIC", "-shared", "-o", "tiles.so"]
        compile_in(tmp_path, {"tiles.cpp": source}, flags)
        tiles = ctypes.CDLL(str(tmp_path / "tiles.so"))
        product = Product([packed(KERNELS, Kind.Q4_1, 48, 64)[0]], None, activation_bytes=0)
        x = torch.ones(70, 64).bfloat16()
        KERNELS.multiply(product, x)  # asks for the permission to use them
        some = bytes([1] + [0] * 15) + bytes([48, 0] * 3 + [0] * 26) + bytes([7] * 3 + [0] * 13)
        found = ctypes.create_string_buffer(64)
        for num_rows in (3, 70):
            tiles.load(some)
            KERNELS.multiply(product, x[:num_rows])
            tiles.store(found)
            assert found.raw == some
            tiles.release()
            KERNELS.multiply(product, x[:num_rows])
            tiles.store(found)
            assert found.raw == bytes(64)


def test_a_library_with_other_structs_is_refused(tmp_path: Path):
    here = resources.files("swiftgen.native")
    source = here.joinpath("structs.cpp").read_text(encoding="utf-8")
    header = here.joinpath("structs.h").read_text(encoding="utf-8")
    other = header.replace("    Norm norm; ", "    double eps; Norm norm; ")
    assert other != header
    files = {"structs.cpp": source, "structs.h": other}
    compile_in(tmp_path, files, ["-fPIC", "-shared", "-o", "structs.so"])
    with pytest.raises(AttributeError, match="another Model"):
        Kernels(tmp_path / "structs.so", "other")
