"""Weights in few bits: the native product against float64 and against itself, and what a GGUF file leaves."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.drafting import PROMPT, AdversarialPlanner
from support.model_files import preset_for, tiny_model, write_gguf
from support.tiny import ar_planner, backend_for, new_cache, new_target, run, sampler
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.planner import Planner
from swiftgen.forward.arithmetic import arithmetic_of
from swiftgen.forward.cache import PartialCache
from swiftgen.forward.exactness import CANDIDATE_SIZES, choose_pass_sizes
from swiftgen.forward.layers import _joined
from swiftgen.forward.linear import PackedLinear, QuantisedLinear, can_pack, linear_maker, replace_linears
from swiftgen.forward.target import Target
from swiftgen.models.gguf_weights import (
    FILE_NAME,
    QuantisedWeight,
    attach,
    attach_quantised,
    quantised_bytes,
    quantised_of,
    save_quantised,
)
from swiftgen.models.loading import LoadedModel, OpenedModel, load_model, load_weights, open_model
from swiftgen.native import build as native
from swiftgen.native.build import kernels_for
from swiftgen.native.kernels import Kernels
from swiftgen.system.errors import SwiftgenError

CPU = torch.device("cpu")
KERNELS = kernels_for("auto", CPU, torch.float32, 64)
if KERNELS is None:
    pytest.skip("this machine cannot build the native kernels", allow_module_level=True)

UNITS = set(native._processor().split())
BUILDS = {
    "native": ([], set()),
    "without tiles": (["-march=native", "-mno-amx-bf16", "-mno-amx-tile", "-mno-amx-int8"], {"amx_bf16"}),
    "x86-64-v4": (["-march=x86-64-v4"], {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "x86-64-v3": (["-march=x86-64-v3"], {"avx2", "fma", "f16c", "bmi2", "movbe"}),
    "x86-64-v2": (["-march=x86-64-v2"], {"sse4_2", "ssse3", "popcnt"}),
}
"""Flags instead of -march=native, and the units that such code needs."""
SUM_TOLERANCE = 2e-6
"""Of a sum in float32, relative to the sum of the absolute values: one of hundreds, each addition rounded."""
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
both_bits = pytest.mark.parametrize("bits", [4, 8], ids=["4 bits", "8 bits"])


def compile_library(sources: Mapping[str, str], flags: list[str], folder: Path, name: str) -> Path:
    compiler = native.found_compilers()[0]
    for file, source in sources.items():
        (folder / file).write_text(source, encoding="utf-8")
    command = [compiler, *flags, *(file for file in sources if not file.endswith(".h")), "-o", name]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder / name


def other_build(name: str, folder: Path) -> Kernels:
    """The kernels as lesser processors have them; only what is tested here is optimised."""
    flags, needed = BUILDS[name]
    if platform.machine() not in ("x86_64", "AMD64") or not needed <= UNITS:
        pytest.skip("not for this processor")
    here = resources.files("swiftgen.native")
    sources = {file: here.joinpath(file).read_text(encoding="utf-8") for file in native._SOURCES}
    flags = [flag for flag in native._FLAGS if flag != "-march=native"] + flags
    parts = []
    for file in sources:
        if file.endswith(".cpp"):
            files = {key: text for key, text in sources.items() if key == file or key.endswith(".h")}
            level = [] if file == "quantised.cpp" else ["-O0"]
            only_compile = [*(flag for flag in flags if flag != "-shared"), *level, "-c"]
            parts.append(compile_library(files, only_compile, folder, f"{file}.o"))
    library = folder / f"{name.replace(' ', '-')}.so"
    command = [native.found_compilers()[0], *flags, *map(str, parts), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return Kernels(library, name)


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param == "native":
        assert KERNELS is not None
        return KERNELS
    return other_build(request.param, tmp_path_factory.mktemp("build"))


def random_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(bits: int, num_in: int, num_out: int, seed: int = 0) -> QuantisedWeight:
    """All codes, and scales of both signs, some of them tiny or 0."""
    generator = torch.Generator().manual_seed(seed)
    shape, num_bytes = (num_out, num_in // 32), 16 if bits == 4 else 32
    codes = torch.randint(0, 256, (*shape, num_bytes), generator=generator, dtype=torch.uint8)
    scales, minima = 0.1 * random_numbers((2, *shape), seed + 1).half()
    scales[0, 0], scales[-1, -1], scales[num_out // 2, 0] = 2**-24, 0, -3e-5
    return QuantisedWeight(
        codes if bits == 4 else codes.view(torch.int8), scales, minima if bits == 4 else None
    )


def plain(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """The reference: what the numbers of a weight are, one block after the other, float64 `[out, in]`."""
    scales = weight.scales.double()
    out = torch.zeros(*scales.shape, 32, dtype=torch.float64)
    for i in range(32):
        if weight.codes.shape[-1] == 16:
            code = weight.codes[..., i % 16].int() // (16 if i >= 16 else 1) % 16
        else:
            code = weight.codes[..., i].int()
        out[..., i] = code * scales
    if weight.minima is not None:
        out += weight.minima.double().unsqueeze(-1)
    return out.flatten(1).float().to(dtype).double()  # float32 first, as GGUF files are unpacked


@functools.cache
def cancelling(bits: int, dtype: torch.dtype) -> tuple[QuantisedWeight, Tensor]:
    """A weight and 70 rows whose products are 0: what is left is rounding, and shows any other order.

    The second half of a row undoes the first, in other blocks and at other places of a block.
    """
    generator = torch.Generator().manual_seed(2)
    blocks, places = torch.randperm(6, generator=generator), torch.randperm(32, generator=generator)
    weight = random_weight(bits, 192, 48)
    codes = weight.codes if bits == 8 else torch.cat([weight.codes & 15, weight.codes >> 4], dim=-1)
    codes = torch.cat([codes, codes[:, blocks][..., places]], dim=1)
    if bits == 4:
        codes = codes[..., :16] | codes[..., 16:] << 4
    scales, minima = (
        part if part is None else torch.cat([part, part[:, blocks]], dim=1)
        for part in (weight.scales, weight.minima)
    )
    x = random_numbers((70, 6, 32), seed=3).to(dtype)
    assert scales is not None
    return QuantisedWeight(codes, scales, minima), torch.cat([x, -x[:, blocks][..., places]], dim=1).flatten(
        1
    )


def has_tiles() -> bool:
    return "amx_bf16" in UNITS and torch.cpu._is_amx_tile_supported()


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# In, out, rows, has bias: every value of each at least once.
SHAPES = [
    (32, 16, 1, False),
    (32, 960, 17, True),
    (64, 48, 2, True),
    (64, 16, 200, False),
    (576, 48, 33, False),
    (576, 960, 64, True),
    (1536, 16, 65, True),
    (1536, 48, 8, False),
    (1536, 960, 5, True),
]


@both_dtypes
@both_bits
class TestProduct:
    """Of every build."""

    def test_a_product_with_the_identity_is_the_weight(self, kernels: Kernels, bits: int, dtype: torch.dtype):
        for num_in, num_out in ((32, 16), (96, 48)):
            weight = random_weight(bits, num_in, num_out, seed=num_in)
            actual = QuantisedLinear(weight, None, kernels)(torch.eye(num_in, dtype=dtype)).T
            assert torch.equal(actual.double(), plain(weight, dtype))
            assert torch.equal(weight.dequantised(dtype).double(), plain(weight, dtype))

    def test_a_product_agrees_with_float64(self, kernels: Kernels, bits: int, dtype: torch.dtype):
        for num_in, num_out, num_rows, has_bias in SHAPES:
            weight = random_weight(bits, num_in, num_out, seed=num_rows)
            x, numbers = random_numbers((num_rows, num_in), 6).to(dtype), plain(weight, dtype)
            expected, size = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
            bias = None
            if has_bias:  # leaves little of the first row, where a weight that is not rounded shows
                bias = -expected[0].to(dtype)
                expected, size = expected + bias.double(), size + bias.double().abs()
            before = x.clone()
            actual = QuantisedLinear(weight, bias, kernels)(x)
            assert (actual.shape, actual.dtype) == ((num_rows, num_out), dtype)
            assert torch.equal(x, before)
            allowed = SUM_TOLERANCE * size
            if dtype == torch.bfloat16:  # rounded once more
                allowed += 2**-8 * expected.abs()
            assert ((actual.double() - expected).abs() <= allowed).all(), (num_in, num_out, num_rows)

    def test_other_rows_change_no_bit_of_a_row(self, kernels: Kernels, bits: int, dtype: torch.dtype):
        weight, x = cancelling(bits, dtype)
        linear = QuantisedLinear(weight, None, kernels)
        alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
        assert (x.double() @ plain(weight, dtype).T).abs().max() < 1e-9
        assert (alone != 0).double().mean() > 0.5  # else nothing is seen
        generator = torch.Generator().manual_seed(4)
        for num_rows in range(1, 71):
            for order in (torch.arange(num_rows), torch.randperm(70, generator=generator)[:num_rows]):
                assert torch.equal(linear(x[order]), alone[order]), num_rows

    def test_rows_that_are_no_numbers_stay_alone(self, kernels: Kernels, bits: int, dtype: torch.dtype):
        weight, x = cancelling(bits, dtype)
        linear = QuantisedLinear(weight, None, kernels)
        expected = linear(x)
        for num_rows in (2, 7, 16, 40, 70):
            wrong = x[:num_rows].clone()
            wrong[::2], wrong[::4] = float("nan"), float("inf")
            actual = linear(wrong)
            assert torch.equal(actual[1::2], expected[1:num_rows:2])
            assert actual[::2].isnan().all()

    def test_the_number_of_threads_changes_no_bit(
        self, kernels: Kernels, bits: int, dtype: torch.dtype, num_threads: None
    ):
        weight, x = cancelling(bits, dtype)
        linear = QuantisedLinear(weight, None, kernels)
        expected = linear(x)
        for count in (2, 3, 5):  # of 3 groups of features
            torch.set_num_threads(count)
            for num_rows in (1, 18, 70):
                assert torch.equal(linear(x[:num_rows]), expected[:num_rows]), count


@both_dtypes
@both_bits
def test_rows_may_have_any_shape(bits: int, dtype: torch.dtype):
    assert KERNELS is not None
    linear = QuantisedLinear(random_weight(bits, 64, 48), None, KERNELS)
    assert (linear.in_features, linear.out_features) == (64, 48)
    x = random_numbers((3, 64, 5), 1).to(dtype)
    expected = linear(x.transpose(1, 2).reshape(15, 64))
    assert torch.equal(linear(x.transpose(1, 2)), expected.view(3, 5, 48))  # not contiguous
    assert torch.equal(linear(x[0].T[3]), expected[3])


@pytest.mark.skipif(not has_tiles(), reason="only where the processor has tiles")
class TestTiles:
    """What our use of the tiles leaves to others on the same thread."""

    @both_bits
    def test_kernels_of_pytorch_work_before_and_after(self, bits: int):
        assert KERNELS is not None
        ours = QuantisedLinear(random_weight(bits, 96, 48), None, KERNELS)
        theirs = nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
        packed = PackedLinear(theirs)
        x, y = random_numbers((64, 96), 1).bfloat16(), random_numbers((64, 256), 2).bfloat16()
        first, other = theirs(y), packed(y)
        torch.testing.assert_close(
            first.double(),
            y.double() @ theirs.weight.double().T + theirs.bias.double(),
            rtol=2**-8,
            atol=1e-4,
        )
        expected = {num_rows: ours(x[:num_rows]) for num_rows in (64, 3, 17)}
        for _ in range(3):
            for num_rows, result in expected.items():
                assert torch.equal(ours(x[:num_rows]), result)
                assert torch.equal(theirs(y), first)
                assert torch.equal(ours(x[:num_rows]), result)
                assert torch.equal(packed(y), other)

    def test_the_tiles_are_configured_as_before(self, tmp_path: Path):
        assert KERNELS is not None
        source = """#include <immintrin.h>
            extern "C" void load(const void* p) { _tile_loadconfig(p); }
            extern "C" void store(void* p) { _tile_storeconfig(p); }
            extern "C" void release() { _tile_release(); }"""
        flags = ["-march=native", "-fPIC", "-shared"]
        tiles = ctypes.CDLL(str(compile_library({"tiles.cpp": source}, flags, tmp_path, "tiles.so")))
        linear, x = QuantisedLinear(random_weight(4, 64, 48), None, KERNELS), torch.ones(70, 64).bfloat16()
        linear(x)  # asks for the permission to use them
        some = bytes([1] + [0] * 15) + bytes([48, 0] * 3 + [0] * 26) + bytes([7] * 3 + [0] * 13)
        found = ctypes.create_string_buffer(64)
        for num_rows in (3, 70):
            tiles.load(some)
            linear(x[:num_rows])
            tiles.store(found)
            assert found.raw == some
            tiles.release()
            linear(x[:num_rows])
            tiles.store(found)
            assert found.raw == bytes(64)


def linear_of(num_in: int, num_out: int, bits: int | None, bias: bool = False, seed: int = 0) -> nn.Linear:
    """A layer with its weight in few bits beside it, or without."""
    linear = nn.Linear(num_in, num_out, bias=bias).requires_grad_(False)
    if bits:
        weight = random_weight(bits, num_in, num_out, seed)
        linear.weight.copy_(weight.dequantised(torch.float32))
        attach(linear, weight)
    return linear


def assert_close_in_all(actual: Tensor, expected: Tensor) -> None:
    """Products whose sums may be small ones of large numbers."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


class TestLayers:
    """Which layers multiply by the kernels."""

    def test_layers_with_codes_are_replaced(self):
        module = nn.Sequential(
            linear_of(32, 48, 4),
            nn.ReLU(),
            nn.Sequential(linear_of(48, 32, None), linear_of(32, 64, 8, bias=True), linear_of(64, 17, 4)),
        )
        x = random_numbers((6, 32), 1)
        expected = module(x)
        replace_linears(module, linear_maker(CPU, torch.float32, KERNELS))
        other = PackedLinear if can_pack(CPU, torch.float32) else nn.Linear
        kinds = [type(part) for part in (module[0], *module[2])]
        assert kinds == [QuantisedLinear, other, QuantisedLinear, other]  # 17 is no multiple of 16
        assert_close_in_all(module(x), expected)

    def test_without_kernels_none_are(self):
        make = linear_maker(CPU, torch.float32, None)
        assert type(make(linear_of(32, 48, 4))) in (PackedLinear, nn.Linear)

    @pytest.mark.parametrize("bits", [(4, 4, 4), (8, 8, 8)])
    @pytest.mark.parametrize("bias", [False, True])
    def test_joined_layers_compute_what_each_does(self, bits: tuple[int, ...], bias: bool):
        assert KERNELS is not None
        parts = [
            linear_of(64, 8 + 8 * i, b, bias, seed=i) for i, b in enumerate(bits)
        ]  # 8, 16, 24: fits together
        joined = _joined(parts)
        assert torch.equal(joined.weight, torch.cat([part.weight for part in parts]))
        weight = quantised_of(joined)
        assert weight is not None
        assert torch.equal(weight.dequantised(torch.float32), joined.weight)
        x = random_numbers((5, 64), 1)
        made = linear_maker(CPU, torch.float32, KERNELS)(joined)
        assert type(made) is QuantisedLinear
        expected = torch.cat([part(x) for part in parts], dim=1)
        assert_close_in_all(made(x), expected)

    @pytest.mark.parametrize("bits", [(4, 4, 8), (4, None, 4), (8, 8, None), (None, None, None)])
    def test_layers_of_different_kinds_are_joined_as_plain_ones(self, bits: tuple[int | None, ...]):
        parts = [linear_of(64, 16, b, seed=i) for i, b in enumerate(bits)]
        joined = _joined(parts)
        assert quantised_of(joined) is None
        assert torch.equal(joined.weight, torch.cat([part.weight for part in parts]))

    def test_a_joined_layer_that_does_not_fit_has_no_codes(self):
        assert quantised_of(_joined([linear_of(64, 8, 4), linear_of(64, 16, 4)])) is None


UNIFORM = {"": Kind.Q4_0, "ffn_down": Kind.Q4_1, "token_embd": Kind.Q8_0, "output.weight": Kind.Q8_0}
MIXED = {
    **{f"blk.0.{part}": Kind.Q4_0 for part in ("attn_q", "attn_k", "attn_v", "ffn_up")},
    **{f"blk.0.{part}": Kind.Q8_0 for part in ("attn_output", "ffn_down")},
    "blk.0.ffn_gate": Kind.Q4_1,
    **{f"blk.1.{part}": Kind.Q4_0 for part in ("attn_q", "ffn_up")},
    "blk.1.attn_k": Kind.Q8_0,
    **{f"blk.1.{part}": Kind.Q4_1 for part in ("attn_output", "ffn_down")},
    "blk.1.attn_v": Kind.Q5_0,
    "output.weight": Kind.F16,
}
"""By the beginning of a tensor's name in the file; all others are F32."""
FEW_BITS = {**UNIFORM, "blk.1.attn_k": Kind.Q8_0, "blk.0.ffn_gate": Kind.Q4_1, "output.weight": Kind.F32}


def quantised_gguf(path: Path, kinds: Mapping[str, Kind], **changes: object) -> Path:
    """A sharp tiny llama; matrices are of the kind that the longest beginning of their name says."""
    add, add_tokens = gguf.GGUFWriter.add_tensor, gguf.GGUFWriter.add_token_list
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
    model = tiny_model(**{**sizes, "initializer_range": 0.2, **changes})

    def add_quantised(writer: gguf.GGUFWriter, name: str, data: np.ndarray) -> None:
        if name == "output.weight" and model.config.tie_word_embeddings:
            return
        part = name.split(".", 2)[-1] if name.startswith("blk") else name
        found = [key for key in kinds if name.startswith(key) or part.startswith(key)]
        kind = kinds[max(found, key=len)] if found and data.ndim == 2 else Kind.F32
        add(writer, name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    def add_more_tokens(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
        add_tokens(writer, [*tokens, *(f"<{i}>" for i in range(len(tokens), model.config.vocab_size))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_quantised)
        patch.setattr(gguf.GGUFWriter, "add_token_list", add_more_tokens)
        write_gguf(path, model)
    return path


def opened_of(path: Path, dtype: torch.dtype) -> OpenedModel:
    return open_model(preset_for(path, **{"model.dtype": str(dtype).removeprefix("torch.")}))


def load(path: Path, dtype: torch.dtype) -> LoadedModel:
    return load_model(preset_for(path, **{"model.dtype": str(dtype).removeprefix("torch.")}))


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


class TestConversion:
    """What is kept of a GGUF file beside the unpacked model."""

    @both_dtypes
    def test_layers_in_4_and_8_bits_keep_their_codes(self, tmp_path: Path, dtype: torch.dtype):
        model = load(quantised_gguf(tmp_path / "tiny.gguf", FEW_BITS), dtype).model
        linears = linears_of(model)
        assert len(linears) == 15
        for name, linear in linears.items():
            weight = quantised_of(linear)
            if name == "lm_head":
                assert weight is None  # it has 32 bits here
                continue
            assert weight is not None
            assert torch.equal(weight.dequantised(dtype), linear.weight), name
            assert torch.equal(plain(weight, dtype), linear.weight.double()), name
        bits = [
            quantised_of(linears[f"model.layers.1.self_attn.{name}"]).bits  # type: ignore[union-attr]
            for name in ("q_proj", "k_proj")
        ]
        assert bits == [4, 8]

    def test_a_model_with_other_layers_too_keeps_none(self, tmp_path: Path):
        model = load(quantised_gguf(tmp_path / "tiny.gguf", MIXED), torch.float32).model
        assert not any(quantised_of(linear) for linear in linears_of(model).values())

    def test_heads_of_their_own_width_and_without_groups(self, tmp_path: Path):
        changes = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = load(quantised_gguf(tmp_path / "tiny.gguf", UNIFORM, **changes), torch.float32).model
        assert all(quantised_of(linear) for linear in linears_of(model).values())

    @both_dtypes
    def test_an_lm_head_tied_to_the_embedding(self, tmp_path: Path, dtype: torch.dtype):
        path = quantised_gguf(tmp_path / "tiny.gguf", UNIFORM, tie_word_embeddings=True)
        names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
        assert "output.weight" not in names
        model = load(path, dtype).model
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        weight = quantised_of(model.lm_head)
        assert weight is not None
        assert weight.bits == 8
        assert torch.equal(weight.dequantised(dtype), model.get_input_embeddings().weight)

    def test_plain_files_keep_none(self, tmp_path: Path):
        model = load(quantised_gguf(tmp_path / "tiny.gguf", {}), torch.float32).model
        assert not any(quantised_of(linear) for linear in linears_of(model).values())

    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"])
    def test_codes_that_do_not_give_a_weight_are_not_kept(self, tmp_path: Path, name: str):
        path = quantised_gguf(tmp_path / "tiny.gguf", UNIFORM)
        model = load(path, torch.float32).model
        weight = model.get_submodule(name).weight
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))  # the last bit of one number
        save_quantised(path, model, model.config, tmp_path)
        assert quantised_bytes(tmp_path) == 0

    def test_an_lm_head_that_its_codes_do_not_give_is_left_out(self, tmp_path: Path):
        path = quantised_gguf(tmp_path / "tiny.gguf", UNIFORM)
        model = load(path, torch.float32).model
        weight = model.lm_head.weight
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        for linear in linears_of(model).values():
            del linear.quantised_weight
        save_quantised(path, model, model.config, tmp_path)
        attach_quantised(model, tmp_path)
        assert [n for n, linear in linears_of(model).items() if quantised_of(linear) is None] == ["lm_head"]

    def test_a_folder_without_codes_is_loaded_as_it_is(self, tmp_path: Path):
        path = quantised_gguf(tmp_path / "tiny.gguf", UNIFORM)
        (opened_of(path, torch.float32).folder / FILE_NAME).unlink()
        model = load(path, torch.float32).model
        assert not any(quantised_of(linear) for linear in linears_of(model).values())

    @pytest.mark.parametrize("damage", ["cut short", "no safetensors", "empty"])
    def test_a_damaged_file_is_refused(self, tmp_path: Path, damage: str):
        opened = opened_of(quantised_gguf(tmp_path / "tiny.gguf", UNIFORM), torch.float32)
        file = opened.folder / FILE_NAME
        data = file.read_bytes()
        file.write_bytes(
            {"cut short": data[: len(data) // 2], "no safetensors": b"x" * 999, "empty": b""}[damage]
        )
        with pytest.raises(SwiftgenError) as caught:
            load_weights(opened)
        assert "\n" not in caught.value.message

    @pytest.mark.parametrize("part", ["codes", "scales", "minima"])
    @pytest.mark.parametrize("damage", ["lacks", "is short", "is of another kind"])
    def test_codes_that_do_not_fit_their_layer_are_never_used(self, tmp_path: Path, part: str, damage: str):
        opened = opened_of(quantised_gguf(tmp_path / "tiny.gguf", UNIFORM), torch.float32)
        name = "model.layers.0.mlp.down_proj"
        kept = load_file(opened.folder / FILE_NAME)
        value = kept.pop(f"{name}.{part}")
        if damage == "is short":
            kept[f"{name}.{part}"] = value[:-16].contiguous()
        elif damage == "is of another kind":
            kept[f"{name}.{part}"] = value.float()
        save_file(kept, opened.folder / FILE_NAME)
        with contextlib.suppress(SwiftgenError):
            model = load_weights(opened).model
            assert quantised_of(model.get_submodule(name)) is None


@functools.cache
def uniform_model(dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    """Quantised throughout, its lm_head too: with a vocabulary of a multiple of 16."""
    model: PreTrainedModel = load(quantised_gguf(folder / "tiny.gguf", UNIFORM, vocab_size=272), dtype).model
    return model


@pytest.fixture
def model(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A copy to change."""
    folder = tmp_path_factory.getbasetemp() / "uniform"
    folder.mkdir(exist_ok=True)
    return copy.deepcopy(uniform_model(dtype, folder))


def kinds_in(target: Target) -> set[type[nn.Module]]:
    """Of its linear layers."""
    modules = [*target._base.modules(), target._lm_head]
    return {type(module) for module in modules} & {QuantisedLinear, PackedLinear, nn.Linear}


@both_dtypes
class TestTarget:
    """A model whose layers are all in few bits."""

    def test_all_sizes_are_lossless(self, model: PreTrainedModel, dtype: torch.dtype):
        target = new_target(model)
        assert KERNELS is not None
        assert target.arithmetic["linears"] == f"quantised {KERNELS.build}"
        assert kinds_in(target) == {QuantisedLinear}
        found = choose_pass_sizes(target)
        assert found.lossless
        assert found.pass_sizes == CANDIDATE_SIZES

    def test_logits_agree_with_the_unmodified_model(self, model: PreTrainedModel, dtype: torch.dtype):
        expected = copy.deepcopy(model).float()(torch.tensor([PROMPT])).logits[0, -1]
        target = new_target(model)
        output = target.prefill(PROMPT, new_cache(target, len(PROMPT)))
        assert output is not None
        actual = target.logits(output.hidden[-1:])[0]
        tolerance = 2e-5 if dtype == torch.float32 else 2**-4
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.std()))

    def test_drafts_change_nothing(self, model: PreTrainedModel, dtype: torch.dtype):
        target = new_target(model).with_pass_sizes(CANDIDATE_SIZES)
        settings, num_tokens = {"temperature": 0.7, "top_p": 0.9}, 80
        expected = run(target, ar_planner(target), sampler(**settings), PROMPT, num_tokens)
        assert len(set(expected.token_ids)) > 5
        for kind in ("adversarial", "base"):
            sample = sampler(**settings)
            planner: Planner = AdversarialPlanner(target, expected.token_ids)
            if kind == "base":
                partial = PartialCache(target.cache_shape, budget=48, num_sinks=4)
                planner = Planner(
                    [[SelfDrafter(target, sample, partial, None, [1, 3, 3, 3])]],
                    target.pass_sizes,
                    measured=False,
                )
            actual = run(target, planner, sample, PROMPT, num_tokens)
            assert actual.same_bits(expected), kind
            num_accepted = sum(len(event.sources) for event in actual.events)
            assert num_accepted > (num_tokens / 4 if kind == "adversarial" else 5), kind

    def test_other_attention_takes_other_layers(self, model: PreTrainedModel, dtype: torch.dtype):
        target = new_target(model, "sdpa")
        other = PackedLinear if can_pack(CPU, dtype) else nn.Linear
        assert kinds_in(target) == {other}
        assert "quantised" not in str(target.arithmetic)


@both_dtypes
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("kinds", [UNIFORM, MIXED, {}], ids=["few bits", "several kinds", "plain"])
def test_the_arithmetic_is_known_without_the_weights(
    kinds: Mapping[str, Kind], attention: str, dtype: torch.dtype, tmp_path: Path
):
    opened = opened_of(quantised_gguf(tmp_path / "tiny.gguf", kinds), dtype)
    model = load_weights(opened).model
    backend = backend_for(model, attention)
    expected = arithmetic_of(opened.config, dtype, CPU, backend, bool(opened.quantised_bytes))
    assert Target(model, backend).arithmetic == expected


def test_an_lm_head_that_fits_no_kernel(tmp_path: Path):
    """It has 258 rows; the layers use their codes all the same."""
    model = load(quantised_gguf(tmp_path / "tiny.gguf", UNIFORM), torch.float32).model
    assert quantised_of(model.lm_head) is not None
    expected = copy.deepcopy(model)(torch.tensor([PROMPT])).logits[0, -1]
    target = new_target(model)
    assert KERNELS is not None
    assert target.arithmetic["linears"] == f"quantised {KERNELS.build}"
    assert type(target._lm_head) is not QuantisedLinear
    output = target.prefill(PROMPT, new_cache(target, len(PROMPT)))
    assert output is not None
    actual = target.logits(output.hidden[-1:])[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("out_features", [16, 40])
def test_the_nearest_8_bits(out_features: int):
    weight = random_numbers((out_features, 64), 5)
    weight[1] = 0
    near = QuantisedWeight.nearest(weight)
    assert near.is_for(weight)
    assert near.bits == 8
    steps = near.scales.double().repeat_interleave(32, dim=1)
    error = (near.dequantised(torch.float64) - weight.double()).abs()
    assert (error <= 0.5 * steps + 127 * steps * 2**-11).all()  # half a step, and the rounding of the scale
    assert not near.dequantised(torch.float32)[1].any()
