"""Draft heads: their formulas, our own files, published checkpoints, and what is damaged or alien."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import swiftgen.heads.files
from support.tiny import ReadyHeads, new_cache, new_target, sampler, tiny_model
from swiftgen.decoding.acceptance import calibrated
from swiftgen.decoding.drafters import self_draft
from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.drafters.heads import BIAS
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.history import History
from swiftgen.decoding.noise import keyed_gumbel
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.tree import DraftTree
from swiftgen.heads.files import WEIGHTS_FILE, HeadsInfo, check_heads, load_heads, read_reference, save_heads
from swiftgen.heads.modules import DraftHeads, LinearHeads, RecurrentHeads, chain_states, new_heads
from swiftgen.settings.presets import load_preset
from swiftgen.system.errors import SwiftgenError

HIDDEN_SIZE, EPS, WIDTH = 12, 1e-5, 7
KINDS = ("linear", "recurrent")
INFO = HeadsInfo("some/model@abc", "f00d", 99, "a book", 17)


def random_heads(kind: str = "linear", vocabulary: Tensor | None = None) -> DraftHeads:
    options = {"width": WIDTH} if kind == "recurrent" else {}
    heads = new_heads(kind, HIDDEN_SIZE, 3, EPS, vocabulary=vocabulary, **options).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads


def random_states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))


def rms_norm(state: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return weight * state / torch.sqrt((state * state).mean() + eps)


def doubles(heads: DraftHeads) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in heads.state_dict().items()}


class TestFormulas:
    def test_linear_heads_follow_the_recurrence_of_the_paper(self):
        heads, weights = random_heads(), doubles(random_heads())
        actual = random_states()
        state = actual.double()
        for i in range(3):  # s_i = s_{i-1} + W_i RMSNorm_i(s_{i-1}); RMSNorm'_i(s_i) is read by the lm_head
            normed = rms_norm(state, weights[f"heads.{i}.input_layernorm.weight"])
            state = state + weights[f"heads.{i}.linear.weight"] @ normed
            expected = rms_norm(state, weights[f"heads.{i}.post_layernorm.weight"])
            actual = heads.advance(actual, random_states(), i + 1)
            torch.testing.assert_close(actual.double(), state, rtol=1e-5, atol=1e-5)
            output = heads.output(actual, i + 1)
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)

    def test_the_recurrent_cell_follows_its_formula(self):
        heads, weights = random_heads("recurrent"), doubles(random_heads("recurrent"))
        gate, up = weights["gate_up.weight"][:WIDTH], weights["gate_up.weight"][WIDTH:]
        actual = random_states()
        state = actual.double()
        for depth in (1, 2, 3):  # s_i = s_{i-1} + D (silu(G x) * U x), x = [RMSNorm(s_{i-1}), RMSNorm(e)]
            embedded = random_states(seed=10 + depth)
            x = torch.cat(
                [
                    rms_norm(state, weights["state_norm.weight"]),
                    rms_norm(embedded.double(), weights["token_norm.weight"]),
                ]
            )
            gated = gate @ x
            state = state + weights["down.weight"] @ (gated / (1 + torch.exp(-gated)) * (up @ x))
            actual = heads.advance(actual, embedded, depth)
            torch.testing.assert_close(actual.double(), state, rtol=1e-5, atol=1e-5)
            expected = rms_norm(state, weights["post_norm.weight"])
            output = heads.output(actual, depth)
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_are_advanced_each_for_itself(self, kind: str):
        heads, states, embedded = random_heads(kind), random_states(2, 5), random_states(2, 5, seed=2)
        together = heads.advance(states, embedded, 2)
        for i in range(2):
            for j in range(5):
                torch.testing.assert_close(together[i, j], heads.advance(states[i, j], embedded[i, j], 2))

    def test_recurrent_heads_read_the_token_and_linear_ones_do_not(self):
        one, other = random_states(seed=2), random_states(seed=3)
        linear, recurrent, state = random_heads(), random_heads("recurrent"), random_states()
        assert torch.equal(linear.advance(state, one, 1), linear.advance(state, other, 1))
        assert not torch.allclose(recurrent.advance(state, one, 1), recurrent.advance(state, other, 1))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_chain_advances_and_reads_depth_by_depth(self, kind: str):
        heads, states = random_heads(kind), random_states(4)
        embedded = [random_states(4, seed=seed) for seed in (5, 6, 7)]
        outputs = chain_states(heads, states, embedded)
        assert len(outputs) == 3
        for depth, (following, output) in enumerate(zip(embedded, outputs, strict=True), start=1):
            states = heads.advance(states, following, depth)
            assert torch.equal(output, heads.output(states, depth))

    @pytest.mark.parametrize("kind", KINDS)
    def test_untrained_heads_leave_the_state_and_read_it_like_the_base(self, kind: str):
        options = {"width": WIDTH} if kind == "recurrent" else {}
        heads = new_heads(kind, HIDDEN_SIZE, 2, EPS, **options)
        final_norm = nn.RMSNorm(HIDDEN_SIZE, eps=EPS)
        nn.init.normal_(final_norm.weight)
        heads.read_like(final_norm)
        state = random_states()
        for depth in (1, 2):
            assert torch.equal(heads.advance(state, random_states(seed=2), depth), state)
            torch.testing.assert_close(
                heads.output(state, depth), rms_norm(state, final_norm.weight), rtol=1e-5, atol=1e-5
            )
        final_norm.weight.data.zero_()  # a copy was taken
        assert heads.output(state, 1).abs().min() > 0


class TestOwnFiles:
    @pytest.mark.parametrize("vocabulary", [None, torch.tensor([0, 5, 98])], ids=["all", "some"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_saved_heads_are_read_back_bit_for_bit(
        self, kind: str, vocabulary: Tensor | None, tmp_path: Path
    ):
        heads, folder = random_heads(kind, vocabulary), tmp_path / "new" / "heads"
        assert save_heads(heads, folder, INFO) == folder / WEIGHTS_FILE
        assert [file.name for file in folder.iterdir()] == [WEIGHTS_FILE]
        for path in (folder, folder / WEIGHTS_FILE):
            for given in (path, str(path)):
                loaded, info = load_heads(given)
                assert info == INFO
                assert type(loaded) is type(heads)
                assert loaded.state_dict().keys() == heads.state_dict().keys()
                for name, tensor in heads.state_dict().items():
                    assert torch.equal(loaded.state_dict()[name], tensor)
        assert (loaded.vocabulary is None) == (vocabulary is None)
        assert (loaded.num_heads, loaded.hidden_size, loaded.options()) == (3, HIDDEN_SIZE, heads.options())
        state = random_states()  # the eps too
        assert torch.equal(loaded.output(state, 1), heads.output(state, 1))

    def test_what_is_not_known_is_read_back_as_that(self, tmp_path: Path):
        save_heads(random_heads(), tmp_path, HeadsInfo())
        assert load_heads(tmp_path)[1] == HeadsInfo("", "", 0, "", 0)

    def test_saving_again_replaces_the_file(self, tmp_path: Path):
        save_heads(random_heads(), tmp_path, INFO)
        save_heads(random_heads("recurrent"), tmp_path, replace(INFO, num_steps=18))
        heads, info = load_heads(tmp_path)
        assert isinstance(heads, RecurrentHeads)
        assert info.num_steps == 18

    def test_a_folder_that_cannot_be_made_is_reported(self, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(SwiftgenError, match="cannot save the heads"):
            save_heads(random_heads(), tmp_path / "file" / "heads", INFO)


def failure(path: Path) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        load_heads(path)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_heads(random_heads(), tmp_path, INFO)
    return tmp_path


def rewrite(folder: Path, kind: str = "linear", drop: str = "", **changes: str) -> None:
    """The heads file with other metadata, or without one tensor."""
    heads = random_heads(kind)
    state = {name: tensor for name, tensor in heads.state_dict().items() if name != drop}
    metadata = {
        "kind": kind,
        "hidden_size": str(HIDDEN_SIZE),
        "num_heads": "3",
        "eps": str(EPS),
        "options": json.dumps(heads.options()),
        "base_model": "some/model",
    }
    save_file(state, folder / WEIGHTS_FILE, {**metadata, **changes})


class TestDamage:
    def test_heads_that_are_not_there_are_reported(self, tmp_path: Path):
        assert f"no draft heads at {tmp_path}" in failure(tmp_path).message  # a folder without them
        assert "no draft heads" in failure(tmp_path / "nowhere").message

    def test_the_file_of_the_other_tests_is_whole(self, folder: Path):
        for kind in KINDS:
            rewrite(folder, kind)
            assert load_heads(folder)[0].kind == kind

    def test_heads_of_an_unknown_kind_are_refused(self, folder: Path):
        save_file(random_heads().state_dict(), folder / WEIGHTS_FILE, {"kind": "diffusion"})
        error = failure(folder)
        assert "kind 'diffusion'" in error.message
        assert "linear, recurrent" in error.hint

    def test_a_safetensors_file_of_something_else_is_refused(self, folder: Path):
        save_file({"x": torch.zeros(3)}, folder / WEIGHTS_FILE)
        assert "not a swiftgen heads file" in failure(folder).message

    @pytest.mark.parametrize("num_bytes", [0, 5, 40, 700, -1])
    def test_a_truncated_file_is_reported_as_damaged(self, folder: Path, num_bytes: int):
        file = folder / WEIGHTS_FILE
        file.write_bytes(file.read_bytes()[:num_bytes])
        assert "is damaged" in failure(folder).message

    def test_a_file_that_is_not_safetensors_is_reported_as_damaged(self, folder: Path):
        (folder / WEIGHTS_FILE).write_bytes(b"PK\x03\x04 this is a pickle in a zip" * 20)
        assert "is damaged" in failure(folder).message

    @pytest.mark.parametrize(
        ("kind", "changes", "drop"),
        [
            ("linear", {"num_heads": "2"}, ""),
            ("linear", {"num_heads": "4"}, ""),
            ("linear", {"num_heads": "three"}, ""),
            ("linear", {"options": '{"width": 7}'}, ""),
            ("linear", {"options": "{"}, ""),
            ("linear", {"eps": ""}, ""),
            ("linear", {}, "heads.1.linear.weight"),
            ("recurrent", {"options": "{}"}, ""),
            ("recurrent", {"options": '{"width": 8}'}, ""),
            ("recurrent", {}, "down.weight"),
        ],
    )
    def test_metadata_and_tensors_that_disagree_are_reported_as_damage(
        self, folder: Path, kind: str, changes: dict[str, str], drop: str
    ):
        rewrite(folder, kind, drop, **changes)
        assert "is damaged" in failure(folder).message

    def test_tensors_of_a_wrong_shape_are_reported_as_damage(self, folder: Path):
        rewrite(folder, hidden_size="6")
        assert "is damaged" in failure(folder).message


class TestCheck:
    def check(self, heads: DraftHeads, info: HeadsInfo = INFO, hidden_size: int = HIDDEN_SIZE) -> None:
        check_heads(heads, info, "some/heads", hidden_size, 99)

    def failure(self, heads: DraftHeads, **options: Any) -> SwiftgenError:
        with pytest.raises(SwiftgenError) as caught:
            self.check(heads, **options)
        assert "some/heads" in caught.value.message
        return caught.value

    def test_heads_of_the_model_are_accepted(self):
        self.check(random_heads())
        self.check(random_heads("recurrent", torch.tensor([0, 98])))
        self.check(random_heads(), replace(INFO, vocab_size=0))  # not known

    def test_another_hidden_size_is_refused_by_the_name_of_their_model(self):
        error = self.failure(random_heads(), hidden_size=16)
        assert f"hidden size {HIDDEN_SIZE}, the model has 16" in error.message
        assert "some/model@abc" in error.hint
        assert "unnamed" in self.failure(random_heads(), info=HeadsInfo(), hidden_size=16).hint

    def test_another_vocabulary_size_is_refused(self):
        error = self.failure(random_heads(), info=replace(INFO, vocab_size=128_256))
        assert "for 128,256 tokens, the model has 99" in error.message
        assert "some/model@abc" in error.hint

    @pytest.mark.parametrize("ids", [[5, 99], [-1, 5], []])
    def test_a_draft_vocabulary_beyond_the_model_is_damage(self, ids: list[int]):
        heads = random_heads("recurrent", torch.tensor(ids, dtype=torch.int64))
        assert "draft vocabulary" in self.failure(heads).message


REFERENCE_EPS = 3e-3  # far from the usual, so that it is seen to be read
HEADS_SHARD, INDEX_FILE = "model-00002-of-00003.safetensors", "model.safetensors.index.json"


def reference_tensors(tied: bool = False) -> dict[str, Tensor]:
    """A whole model with three heads, named as in the published checkpoints."""
    tensors = {name: t.clone() for name, t in tiny_model(tied=tied).state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(5)
    for i in range(3):
        for part, shape in (("linear", (48, 48)), ("input_layernorm", (48,)), ("post_layernorm", (48,))):
            random = torch.randn(shape, generator=generator)
            tensors[f"model.medusa_layers.{i}.{part}.weight"] = (
                0.1 * random if part == "linear" else 1 + random / 2
            )
    return tensors


def save_reference(folder: Path, sharded: bool, tensors: dict[str, Tensor] | None = None) -> Path:
    """A checkpoint in one file, or in three of which the heads are in the second and third."""
    tensors = reference_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps({"rms_norm_eps": REFERENCE_EPS, "vocab_size": 97}))
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return folder

    def shard(name: str) -> int:
        if "medusa_layers" not in name:
            return 1
        return 3 if "medusa_layers.2" in name else 2

    weight_map = {name: f"model-0000{shard(name)}-of-00003.safetensors" for name in tensors}
    for file in sorted(set(weight_map.values())):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


class TestReference:
    @pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
    def test_the_heads_are_read_from_the_files_of_the_whole_model(self, sharded: bool, tmp_path: Path):
        save_reference(tmp_path, sharded)
        for heads, info in (read_reference(tmp_path), load_heads(tmp_path), load_heads(str(tmp_path))):
            assert isinstance(heads, LinearHeads)
            assert (heads.num_heads, heads.hidden_size, heads.eps) == (3, 48, REFERENCE_EPS)
            assert heads.vocabulary is None
            assert (info.base_model, info.vocab_size) == (str(tmp_path), 97)
            wanted = {n: t for n, t in reference_tensors().items() if "medusa" in n}
            for name, tensor in heads.state_dict().items():
                assert torch.equal(wanted.pop(f"model.medusa_layers.{name.removeprefix('heads.')}"), tensor)
            assert not wanted

    def test_names_without_the_prefix_of_the_model_are_known_too(self, tmp_path: Path):
        heads = {n.removeprefix("model."): t for n, t in reference_tensors().items() if "medusa" in n}
        assert read_reference(save_reference(tmp_path, False, heads))[0].num_heads == 3

    def test_only_the_shards_that_hold_heads_are_opened(self, tmp_path: Path):
        save_reference(tmp_path, sharded=True)
        (tmp_path / "model-00001-of-00003.safetensors").unlink()
        assert read_reference(tmp_path)[0].num_heads == 3

    def test_of_a_hub_repository_only_the_files_that_are_needed_are_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        save_reference(tmp_path, sharded=True)
        fetched: list[str] = []

        def hub_file(repo_id: str, name: str, revision: str | None) -> Path | None:
            assert (repo_id, revision) == ("some/heads", None)
            fetched.append(name)
            return tmp_path / name if (tmp_path / name).is_file() else None

        monkeypatch.setattr(swiftgen.heads.files, "hub_file", hub_file)
        heads, info = load_heads("some/heads")
        assert (heads.num_heads, info.base_model) == (3, "some/heads")
        shards = [HEADS_SHARD, "model-00003-of-00003.safetensors"]
        assert sorted(fetched) == sorted(["config.json", INDEX_FILE, *shards])

    def test_bf16_heads_keep_their_values(self, tmp_path: Path):
        tensors = {name: tensor.bfloat16() for name, tensor in reference_tensors().items()}
        heads, _ = read_reference(save_reference(tmp_path, False, tensors))
        expected = tensors["model.medusa_layers.1.linear.weight"].float()
        assert torch.equal(heads.state_dict()["heads.1.linear.weight"].float(), expected)

    def failure(self, folder: Path) -> SwiftgenError:
        with pytest.raises(SwiftgenError) as caught:
            read_reference(folder)
        assert "\n" not in caught.value.message
        return caught.value

    @pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
    @pytest.mark.parametrize("lost", ["0.linear", "1.post_layernorm", "2.input_layernorm"])
    def test_a_missing_tensor_is_named(self, lost: str, sharded: bool, tmp_path: Path):
        tensors = reference_tensors()
        del tensors[f"model.medusa_layers.{lost}.weight"]
        error = self.failure(save_reference(tmp_path, sharded, tensors))
        assert f"lacks heads.{lost}.weight" in error.message

    @pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
    def test_a_model_without_heads_is_reported(self, sharded: bool, tmp_path: Path):
        tensors = {n: t for n, t in reference_tensors().items() if "medusa" not in n}
        error = self.failure(save_reference(tmp_path, sharded, tensors))
        assert "has no draft heads" in error.message

    def test_a_missing_shard_is_named(self, tmp_path: Path):
        save_reference(tmp_path, sharded=True)
        (tmp_path / HEADS_SHARD).unlink()
        assert f"lacks {HEADS_SHARD}" in self.failure(tmp_path).message

    def test_a_folder_without_weights_is_reported(self, tmp_path: Path):
        (tmp_path / "config.json").write_text("{}")
        assert "lacks model.safetensors" in self.failure(tmp_path).message

    @pytest.mark.parametrize("name", ["../outside", "{tmp_path}/outside", "sub/inside"])
    def test_an_index_that_names_files_outside_its_folder_is_refused(self, name: str, tmp_path: Path):
        folder = tmp_path / "folder"
        (folder / "sub").mkdir(parents=True)
        save_reference(folder, sharded=True)
        for copy in (folder / "sub" / "inside", tmp_path / "outside"):  # good ones
            shutil.copy(folder / HEADS_SHARD, copy)
        index = (folder / INDEX_FILE).read_text()
        (folder / INDEX_FILE).write_text(index.replace(HEADS_SHARD, name.format(tmp_path=tmp_path)))
        assert "outside its folder" in self.failure(folder).message

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
    def test_a_damaged_index_is_reported(self, text: str, tmp_path: Path):
        save_reference(tmp_path, sharded=True)
        (tmp_path / INDEX_FILE).write_text(text)
        assert "is damaged" in self.failure(tmp_path).message

    def test_a_truncated_shard_is_reported_as_damaged(self, tmp_path: Path):
        save_reference(tmp_path, sharded=True)
        file = tmp_path / HEADS_SHARD
        file.write_bytes(file.read_bytes()[:500])
        assert "is damaged" in self.failure(tmp_path).message

    def test_heads_of_a_wrong_shape_are_reported_as_damage(self, tmp_path: Path):
        tensors = reference_tensors()
        tensors["model.medusa_layers.2.linear.weight"] = torch.zeros(48, 47)
        assert "is damaged" in self.failure(save_reference(tmp_path, False, tensors)).message


PROMPT, SHAPE = [5, 17, 3, 5, 17, 8, 60], [2, 3, 2, 2]


def by_a_pass(shares: list[float]) -> list[float]:
    """Chances of the candidates of a draft pass: what the best leaves is shared among the others."""
    best = calibrated(shares[0], self_draft.BIAS)
    return [best, *((1 - best) / (1 - shares[0]) * share for share in shares[1:])]


class TestReferenceDrafts:
    """What a published checkpoint drafts, against the paper's maths on the tensors of its files."""

    def drafted(self, folder: Path, tied: bool, temperature: float) -> DraftTree:
        """By the drafter, after a pass over a partial cache that holds all of the prompt."""
        heads, info = load_heads(folder)
        model = tiny_model(tied=tied)
        check_heads(heads, info, str(folder), 48, 97)
        ready = ReadyHeads(heads, model.get_input_embeddings(), model.get_output_embeddings())
        target = new_target(model)
        cache = new_cache(target, len(PROMPT))
        prefill = target.prefill(PROMPT[:-1], cache)
        assert prefill is not None
        partial = PartialCache(target.cache_shape, budget=100, num_sinks=2)
        drafter = SelfDrafter(target, sampler(temperature=temperature), partial, ready, SHAPE)
        queries = prefill.queries[:, :, :, -1]
        drafter.observe(Committed(PROMPT, cache, 0, queries, prefill.hidden[-1]))
        history = History(100)
        history.extend(PROMPT)
        tree = DraftTree(PROMPT[-1], max_depth=9)
        drafter.propose(tree, history)
        return tree

    def level_logits(self, tied: bool) -> list[Tensor]:
        """lm_head(RMSNorm'_i(s_i)) after each depth, with transformers' own state; the base's first."""
        tensors, model = reference_tensors(tied), tiny_model(tied=tied)
        lm_head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        with torch.inference_mode():
            levels = [model(torch.tensor([PROMPT])).logits[0, -1]]
            model.model.norm = nn.Identity()
            state = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        for i in range(3):
            weights = {
                part: tensors[f"model.medusa_layers.{i}.{part}.weight"]
                for part in ("linear", "input_layernorm", "post_layernorm")
            }
            state = state + weights["linear"] @ rms_norm(state, weights["input_layernorm"], REFERENCE_EPS)
            levels.append(lm_head @ rms_norm(state, weights["post_layernorm"], REFERENCE_EPS))
        return levels

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    @pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
    def test_it_drafts_what_the_paper_says(
        self, sharded: bool, tied: bool, temperature: float, tmp_path: Path
    ):
        save_reference(tmp_path, sharded, reference_tensors(tied))
        tree = self.drafted(tmp_path, tied, temperature)
        assert len(tree) == 1 + 2 + 6 + 12 + 24
        best_of_level = []
        for depth, (logits, width) in enumerate(zip(self.level_logits(tied), SHAPE, strict=True)):
            scores = logits.double()
            if temperature:
                position = torch.tensor(len(PROMPT) + depth)
                scores = scores / temperature + keyed_gumbel(3, position, torch.arange(97))
            shares = scores.topk(8).values.softmax(0).tolist()
            nearest = [calibrated(share, BIAS) for share in shares] if depth else by_a_pass(shares)
            best = scores.argsort(descending=True)[:width].tolist()
            best_of_level.append(best)
            for node in (n for n in range(len(tree)) if tree.depths[n] == depth):
                children = tree.children(node)
                assert [tree.tokens[child] for child in children] == best
                chances = [tree.chances[child] for child in children]
                assert chances == pytest.approx(nearest[:width], rel=1e-2, abs=1e-4)
                assert all(tree.sources[child] == ("heads" if depth else "base") for child in children)
        assert len({tuple(best[:2]) for best in best_of_level}) > 1  # the heads do not repeat the base


def test_the_heads_of_the_default_preset_come_with_it():
    preset = load_preset()
    assert preset.heads is not None
    heads, info = load_heads(preset.heads)
    check_heads(heads, info, preset.heads, hidden_size=576, vocab_size=49_152)
    assert (heads.kind, heads.num_heads) == ("recurrent", 3)
    assert info.base_model == preset.model.source
    assert "/" not in info.data  # no path of the machine they were trained on
