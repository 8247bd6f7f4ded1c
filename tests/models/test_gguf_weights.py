"""Models read from GGUF files: matrices in few bits beside others, as transformers would unpack them."""

from __future__ import annotations

import functools
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.drafting import PROMPT, AdversarialPlanner
from support.gguf_files import PACKABLE, write_quantised
from support.model_files import VOCAB_SIZE, preset_for
from support.tiny import ar_planner, backend_for, new_cache, new_target, run, sampler
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.planner import Planner
from swiftgen.forward.arithmetic import arithmetic_of
from swiftgen.forward.exactness import NATIVE_SIZES, choose_pass_sizes
from swiftgen.forward.linear import PackedLinear, QuantisedLinear, can_pack
from swiftgen.forward.native_layer import NativeLayer
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.models.gguf_file import GgufFile, described
from swiftgen.models.gguf_header import read_header
from swiftgen.models.gguf_weights import PackedEmbedding, device_of, packed_of, stays_packed
from swiftgen.models.loading import OpenedModel, load_weights, open_model
from swiftgen.models.sources import resolve_source
from swiftgen.native.build import kernels_for
from swiftgen.settings.schema import ModelSettings
from swiftgen.system.errors import SwiftgenError

CPU = torch.device("cpu")
KERNELS = kernels_for("auto", CPU, torch.float32, 64)
if KERNELS is None:
    pytest.skip("this machine cannot build the native kernels", allow_module_level=True)

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
both_activations = pytest.mark.parametrize("activations", ["full", "int8"])
SIZES = {
    "vocab_size": 272,  # a multiple of 16
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "tie_word_embeddings": False,
}
FIELDS: dict[str, dict[str, int | float]] = {
    "gemma3_text": {
        "attention__key_length": 64,
        "attention__value_length": 64,
        "attention__sliding_window": 24,
    },
}
UNIFORM = {"weight": Kind.Q4_0, "ffn_down": Kind.Q4_1, "token_embd": Kind.Q8_0, "output.weight": Kind.Q6_K}
MIXED = {
    "weight": Kind.Q4_K,
    "attn_q": Kind.Q5_0,
    "attn_v": Kind.Q6_K,
    "ffn_gate": Kind.Q8_0,
    "ffn_down": Kind.Q5_K,
    "blk.1.attn_k": Kind.Q5_1,
    "token_embd": Kind.Q6_K,
}
"""As files of the hub mix them."""
PARTLY = {
    **MIXED,
    "blk.0.attn_k": Kind.IQ4_NL,
    "blk.0.ffn_up": Kind.F16,
    "blk.1.attn_output": Kind.Q2_K,
    "blk.1.ffn_down": Kind.BF16,
    "output.weight": Kind.F32,
}
"""Some matrices are of types that the kernels do not read, also within joined ones."""
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text"]


def new_model(family: str = "llama", **changes: object) -> PreTrainedModel:
    """Norms and biases that do something, as those of a trained model."""
    torch.manual_seed(3)
    head_dim = {"qwen3": 128}.get(family, 64)  # transformers does not read that of qwen3
    config = AutoConfig.for_model(family, **{**SIZES, "head_dim": head_dim, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@functools.cache
def file_of(family: str = "llama", kinds: str = "uniform", tied: bool = False) -> Path:
    """Made once; tests must not change it."""
    path = Path(tempfile.mkdtemp()) / "tiny.gguf"
    by_name = {"uniform": UNIFORM, "mixed": MIXED, "partly": PARTLY, "plain": {}}
    kinds_of = {kind.name: {"weight": kind} for kind in PACKABLE} | by_name
    return write_quantised(
        path, new_model(family, tie_word_embeddings=tied), kinds_of[kinds], **FIELDS.get(family, {})
    )


def opened_of(path: Path, dtype: torch.dtype = torch.float32) -> OpenedModel:
    return open_model(preset_for(path, **{"model.dtype": str(dtype).removeprefix("torch.")}))


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_weights(opened_of(path, dtype), kernels=KERNELS).model


@functools.cache
def unpacked(path: Path) -> PreTrainedModel:
    """What transformers makes of a file, in float32."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = config.head_dim  # no file says it; so does llama.cpp
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, config=config, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval().requires_grad_(False)


def weights_of(module: nn.Module) -> Tensor:
    """Of a linear layer or an embedding, unpacked if need be: float32 `[out, in]`."""
    assert KERNELS is not None
    parts = (module.packed,) if isinstance(module, PackedEmbedding) else packed_of(module)
    if not parts:
        assert isinstance(module.weight, Tensor)
        return module.weight
    return torch.cat([KERNELS.unpack(part, torch.arange(part.out_features)) for part in parts])


def assert_same_weights(actual: PreTrainedModel, expected: PreTrainedModel, dtype: torch.dtype) -> None:
    for name, parameter in expected.named_parameters():
        base, _, suffix = name.rpartition(".")
        module = actual.get_submodule(base)
        found = weights_of(module) if suffix == "weight" else module.get_parameter(suffix)
        assert torch.equal(found.to(dtype), parameter.to(dtype)), name


def is_packed(model: nn.Module) -> dict[str, bool]:
    """By the names of linear layers."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name: bool(packed_of(module)) for name, module in linears}


class TestReading:
    """What a model has that is read from a file."""

    @both_dtypes
    @pytest.mark.parametrize("kind", PACKABLE, ids=lambda kind: kind.name)
    def test_a_type_throughout(self, kind: Kind, dtype: torch.dtype):
        path = file_of(kinds=kind.name)
        model = load(path, dtype)
        assert all(is_packed(model).values())
        assert isinstance(model.get_input_embeddings(), PackedEmbedding)
        assert_same_weights(model, unpacked(path), dtype)

    @both_dtypes
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kinds", ["mixed", "partly", "plain"])
    def test_families_and_mixtures(self, family: str, kinds: str, dtype: torch.dtype):
        path = file_of(family, kinds)
        model = load(path, dtype)
        assert_same_weights(model, unpacked(path), dtype)
        assert device_of(model) == CPU
        assert model.dtype == dtype

    @both_dtypes
    @pytest.mark.parametrize("kinds", ["mixed", "plain"])
    def test_an_lm_head_tied_to_the_embedding(self, kinds: str, dtype: torch.dtype):
        path = file_of(kinds=kinds, tied=True)
        assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
        model = load(path, dtype)
        assert_same_weights(model, unpacked(path), dtype)
        assert torch.equal(weights_of(model.lm_head), weights_of(model.get_input_embeddings()))

    def test_joined_matrices_stay_packed_together(self):
        packed = is_packed(load(file_of(kinds="partly")))
        others = {name.removeprefix("model.layers.") for name, stays in packed.items() if not stays}
        joined = {"0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj"}
        joined |= {"0.mlp.gate_proj", "0.mlp.up_proj"}
        assert others == joined | {"1.self_attn.o_proj", "1.mlp.down_proj", "lm_head"}

    def test_one_line_says_what_is_unpacked(self, caplog: pytest.LogCaptureFixture):
        with caplog.at_level(logging.WARNING):
            load(file_of(kinds="partly"))
        (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("swiftgen")]
        assert "1 of type IQ4_NL" in message
        assert "1 of type Q2_K" in message
        caplog.clear()
        load(file_of(kinds="mixed"))
        load(file_of(kinds="plain"))
        assert not caplog.records

    def test_without_kernels_all_is_unpacked(self, caplog: pytest.LogCaptureFixture):
        path = file_of(kinds="partly")
        model = load_weights(opened_of(path)).model
        assert not any(is_packed(model).values())
        assert_same_weights(model, unpacked(path), torch.float32)
        assert not caplog.records

    @both_dtypes
    @pytest.mark.parametrize("kinds", ["uniform", "mixed", "partly", "plain"])
    def test_memory_is_known_before(self, kinds: str, dtype: torch.dtype):
        opened = opened_of(file_of(kinds=kinds), dtype)
        model = load_weights(opened, kernels=KERNELS).model
        parts = [part for module in model.modules() for part in packed_of(module)]
        parts += [model.get_input_embeddings().packed] if kinds != "plain" else []
        dense = [parameter for parameter in model.parameters() if not parameter.is_meta]
        num_bytes = sum(part.data.numel() for part in parts)
        num_bytes += sum(parameter.numel() * dtype.itemsize for parameter in dense)
        assert opened.weights_bytes(KERNELS) == pytest.approx(num_bytes, rel=0.03)

    def test_looking_up_rows(self):
        for family in ("llama", "gemma3_text"):
            path = file_of(family, "mixed")
            token_ids = torch.tensor([[5, 0, 271], [5, 5, 1]])
            actual = load(path).get_input_embeddings()(token_ids)
            assert torch.equal(actual, unpacked(path).get_input_embeddings()(token_ids))


def split(path: Path, folder: Path) -> list[Path]:
    """A file in three parts, as llama-gguf-split makes them."""
    header, reader = read_header(path), gguf.GGUFReader(path)
    parts = [folder / f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        fields = header.fields if number == 0 else {}
        for name, value in fields.items():
            if name != "general.architecture":
                add[type(value)](name, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


TEXT = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(2)).tolist()
"""Longer than the window of Gemma."""


class TestLogits:
    """Of all tokens of a text against transformers' own model, unpacked in float32."""

    @staticmethod
    def relative_error(path: Path, dtype: torch.dtype, activations: str) -> tuple[float, float]:
        """Root mean square, and the share of tokens with another largest logit."""
        expected = unpacked(path)(torch.tensor([TEXT])).logits[0]
        target = new_target(load(path, dtype), activations=activations)
        tree = DraftTree(TEXT[0], max_depth=len(TEXT))
        tree.add_path(0, TEXT[1:], "prompt")
        actual = target.forward(tree, 0, new_cache(target, len(TEXT)), num_rows=64).logits()
        error = (actual - expected).square().mean().sqrt() / expected.std()
        return float(error), float((actual.argmax(-1) != expected.argmax(-1)).double().mean())

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kinds", ["mixed", "partly", "plain"])
    def test_they_are_the_same(self, family: str, kinds: str):
        error, other = self.relative_error(file_of(family, kinds), torch.float32, "full")
        assert error < 1e-5
        assert other == 0

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kinds", ["mixed", "partly"])
    def test_rounding_is_small(self, family: str, kinds: str):
        path = file_of(family, kinds)
        bf16, _ = self.relative_error(path, torch.bfloat16, "full")
        int8, _ = self.relative_error(path, torch.float32, "int8")
        both, _ = self.relative_error(path, torch.bfloat16, "int8")
        assert 1e-4 < bf16 < 0.05
        assert 1e-4 < int8 < 0.05
        assert max(bf16, int8) / 2 < both < 2 * (bf16 + int8)


def kinds_in(target: Target) -> set[type[nn.Module]]:
    """Of its linear layers."""
    modules = [*target._base.modules(), target._lm_head]
    return {type(module) for module in modules} & {QuantisedLinear, PackedLinear, nn.Linear}


@both_activations
@both_dtypes
class TestTarget:
    """A model whose layers are all in few bits."""

    def test_all_sizes_are_lossless(self, dtype: torch.dtype, activations: str):
        assert KERNELS is not None
        for kinds in ("uniform", "mixed"):
            target = new_target(load(file_of(kinds=kinds), dtype), activations=activations)
            suffix = " int8" if activations == "int8" else ""
            assert target.arithmetic["linears"] == f"quantised {KERNELS.build}{suffix}"
            assert kinds_in(target) == {QuantisedLinear}
            found = choose_pass_sizes(target)
            assert found.lossless
            assert found.pass_sizes == NATIVE_SIZES

    @pytest.mark.parametrize("kinds", ["mixed", "partly"])
    @pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
    def test_drafts_change_nothing(self, family: str, kinds: str, dtype: torch.dtype, activations: str):
        target = new_target(load(file_of(family, kinds), dtype), activations=activations)
        exactness = choose_pass_sizes(target)
        assert exactness.lossless
        target = target.with_pass_sizes(exactness.pass_sizes)
        settings, num_tokens = {"temperature": 0.9, "min_p": 0.01, "theta": 1.8}, 60
        expected = run(target, ar_planner(target), sampler(**settings), PROMPT, num_tokens)
        assert len(set(expected.token_ids)) > 5
        for kind in ("adversarial", "paper", "auto"):
            sample = sampler(**settings)
            planner: Planner = AdversarialPlanner(target, expected.token_ids)
            if kind != "adversarial":
                partial = PartialCache(target.cache_shape, budget=48, num_sinks=4)
                way = [SelfDrafter(target, sample, partial, None, [1, 3, 3, 3]), NgramDrafter(3, 4, 5)]
                ways = [way] if kind == "paper" else [[], way, way[1:]]
                planner = Planner(ways, Estimates(target.pass_sizes) if kind == "auto" else None)
            actual = run(target, planner, sample, PROMPT, num_tokens)
            assert actual.same_bits(expected), kind

    def test_other_attention_takes_other_layers(self, dtype: torch.dtype, activations: str):
        model = load_weights(opened_of(file_of(), dtype)).model
        target = new_target(model, "sdpa", activations=activations)
        assert kinds_in(target) == {PackedLinear if can_pack(CPU, dtype) else nn.Linear}
        assert "quantised" not in str(target.arithmetic)

    @pytest.mark.parametrize("attention", ["auto", "sdpa"])
    @pytest.mark.parametrize("kinds", ["uniform", "partly", "plain"])
    def test_the_arithmetic_is_known_without_the_weights(
        self, kinds: str, attention: str, dtype: torch.dtype, activations: str
    ):
        opened = opened_of(file_of(kinds=kinds), dtype)
        kernels = kernels_for(attention, CPU, dtype, 64)
        model = load_weights(opened, kernels=kernels).model
        backend = backend_for(model, attention, activations=activations)
        assert opened.gguf is not None
        stays = stays_packed(opened.gguf, kernels)
        expected = arithmetic_of(opened.config, dtype, CPU, backend, stays)
        assert Target(model, backend).arithmetic == expected


def test_an_lm_head_that_fits_no_kernel(tmp_path: Path):
    """It has 258 rows; the layers use their codes all the same."""
    path = write_quantised(tmp_path / "tiny.gguf", new_model(vocab_size=VOCAB_SIZE), UNIFORM)
    target = new_target(load(path))
    assert KERNELS is not None
    assert target.arithmetic["linears"] == f"quantised {KERNELS.build}"
    assert type(target._lm_head) is not QuantisedLinear
    assert all(isinstance(layer, NativeLayer) for layer in target._base.layers)
    expected = unpacked(path)(torch.tensor([PROMPT])).logits[0, -1]
    output = target.prefill(PROMPT, new_cache(target, len(PROMPT)))
    assert output is not None
    actual = target.logits(output.hidden[-1:])[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.std()))


class TestBadFiles:
    """One line each, and never a model with weights that are not in the file."""

    @staticmethod
    def failure(path: Path) -> SwiftgenError:
        with pytest.raises(SwiftgenError) as caught:
            load(path)
        assert "\n" not in caught.value.message
        assert path.name in caught.value.message
        return caught.value

    @staticmethod
    def description_of(path: Path) -> GgufFile:
        return described(resolve_source(ModelSettings(source=str(path))))

    def test_cut_short(self, tmp_path: Path):
        data = file_of().read_bytes()
        for num_bytes in (len(data) - 1, len(data) // 2, 300, 8, 0):
            path = tmp_path / f"{num_bytes}.gguf"
            path.write_bytes(data[:num_bytes])
            self.failure(path)

    def test_cut_short_after_it_was_described(self, tmp_path: Path):
        path = tmp_path / "tiny.gguf"
        path.write_bytes(file_of().read_bytes())
        opened = opened_of(path)
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(SwiftgenError, match=r"tiny\.gguf ends within"):
            load_weights(opened, kernels=KERNELS)

    @pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight", "token_embd.weight"])
    def test_a_tensor_is_missing(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        add = gguf.GGUFWriter.add_tensor

        def leave_out(writer: gguf.GGUFWriter, key: str, *args: object, **options: object) -> None:
            if key != name:
                add(writer, key, *args, **options)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", leave_out)
        write_quantised(tmp_path / "tiny.gguf", new_model(), UNIFORM)
        assert "lacks a weight of the model" in self.failure(tmp_path / "tiny.gguf").message

    def test_a_tensor_has_another_shape(self, tmp_path: Path):
        model = new_model()
        model.model.layers[1].mlp.down_proj.weight.data = torch.ones(256, 256)
        path = write_quantised(tmp_path / "tiny.gguf", model, UNIFORM)
        message = self.failure(path).message
        assert "blk.1.ffn_down.weight" in message
        assert "[256, 256], the model has [256, 512]" in message

    def test_a_type_that_nobody_unpacks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        kind, (block, size) = Kind.I8, gguf.GGML_QUANT_SIZES[Kind.I8]
        assert (block, size) == (1, 1)
        path = write_quantised(tmp_path / "tiny.gguf", new_model(), UNIFORM)
        data, name = bytearray(path.read_bytes()), b"blk.0.attn_v.weight"
        at = data.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, and two of them
        data[at : at + 4] = int(kind).to_bytes(4, "little")
        path.write_bytes(data)
        assert "of type I8" in self.failure(path).message

    def test_a_tensor_too_many(self, tmp_path: Path):
        """A model of this kind has no biases: without them it would be another."""
        model = new_model(attention_bias=True)
        path = write_quantised(tmp_path / "tiny.gguf", model, UNIFORM)
        assert "no place for: blk.0.attn_k.bias" in self.failure(path).message

    @pytest.mark.parametrize(("number", "total"), [(0, 3), (1, 3), (2, 3)])
    def test_a_part_of_a_model(self, number: int, total: int, tmp_path: Path):
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", total)
        writer.add_tensor("blk.1.ffn_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        error = self.failure(path)
        assert f"part {number + 1} of {total}" in error.message
        assert "00001" in str(error.hint)

    @pytest.mark.parametrize("named", [1, 2, 3])
    def test_a_file_that_is_split(self, named: int, tmp_path: Path):
        """Whichever part is named, the whole is read."""
        parts = split(file_of(kinds="mixed"), tmp_path)
        model = load(parts[named - 1])
        assert_same_weights(model, unpacked(file_of(kinds="mixed")), torch.float32)
        fingerprint = self.description_of(parts[0]).folder
        parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"!")
        assert self.description_of(parts[0]).folder != fingerprint

    def test_parts_that_are_missing_or_mixed_up(self, tmp_path: Path):
        parts = split(file_of(kinds="mixed"), tmp_path)
        third = parts[2].rename(tmp_path / "third")
        with pytest.raises(SwiftgenError, match=r"no GGUF file .*tiny-00003-of-00003\.gguf") as caught:
            load(parts[0])
        assert "All 3 parts" in caught.value.hint
        parts[2].write_bytes(parts[1].read_bytes())
        assert "is part 2 of 3" in self.failure(parts[2]).message
        data = third.read_bytes()
        for num_bytes in (len(data) - 1, 100, 0):
            parts[2].write_bytes(data[:num_bytes])
            self.failure(parts[2])

    @pytest.mark.parametrize(("rules", "is_known"), [("llama-bpe", True), ("smollm", True), ("squid", False)])
    def test_rules_to_split_text(
        self, rules: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        add = gguf.GGUFWriter.add_tokenizer_pre
        monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, _: add(writer, rules))
        path = write_quantised(tmp_path / "tiny.gguf", new_model(), UNIFORM)
        if is_known:
            load(path)
        else:
            assert "rules that transformers does not know: squid" in self.failure(path).message

    @pytest.mark.parametrize("damage", ["cut short", "empty", "no list", "other fields", "missing"])
    def test_a_damaged_description(self, damage: str, tmp_path: Path):
        path = tmp_path / "tiny.gguf"
        path.write_bytes(file_of().read_bytes())
        file = self.description_of(path).folder / "tensors.json"
        text = file.read_text(encoding="utf-8")
        damaged: Mapping[str, str] = {
            "cut short": text[: len(text) // 2],
            "empty": "",
            "no list": json.dumps({"architecture": "llama", "tensors": 5}),
            "other fields": json.dumps({"architecture": "llama", "tensors": [{"name": "a", "shape": []}]}),
        }
        if damage in damaged:
            file.write_text(damaged[damage], encoding="utf-8")
        else:
            file.unlink()
        with pytest.raises(SwiftgenError, match="is damaged") as caught:
            load(path)
        assert "\n" not in caught.value.message
