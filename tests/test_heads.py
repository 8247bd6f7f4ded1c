"""Draft heads: the paper's recurrence, and files that are missing, damaged or for another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftgen.errors import SwiftgenError
from swiftgen.heads import WEIGHTS_FILE, LinearHeads, load_heads, save_heads

HIDDEN_SIZE, EPS = 12, 1e-5


def random_heads(num_heads: int = 3) -> LinearHeads:
    heads = LinearHeads(HIDDEN_SIZE, num_heads, EPS).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads


def rms_norm(state: Tensor, weight: Tensor) -> Tensor:
    return weight * state / torch.sqrt((state * state).mean() + EPS)


def test_heads_follow_the_recurrence_of_the_paper():
    heads = random_heads()
    state = torch.randn(HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).double()
    weights = {name: tensor.double() for name, tensor in heads.state_dict().items()}
    actual = heads(state.float())
    assert actual.shape == (3, HIDDEN_SIZE)
    for i in range(3):  # s_i = s_{i-1} + W_i RMSNorm_i(s_{i-1}), and RMSNorm'_i(s_i) is read by the lm_head
        normed = rms_norm(state, weights[f"heads.{i}.input_layernorm.weight"])
        state = state + weights[f"heads.{i}.linear.weight"] @ normed
        expected = rms_norm(state, weights[f"heads.{i}.post_layernorm.weight"])
        torch.testing.assert_close(actual[i].double(), expected, rtol=1e-5, atol=1e-5)


def test_untrained_heads_leave_the_state_as_it_is():
    state = torch.randn(HIDDEN_SIZE)
    outputs = LinearHeads(HIDDEN_SIZE, 2, EPS)(state)
    for output in outputs:
        torch.testing.assert_close(output, rms_norm(state, torch.ones(HIDDEN_SIZE)))


def test_saved_heads_are_read_back_bit_for_bit(tmp_path: Path):
    heads = random_heads()
    save_heads(heads, tmp_path / "new" / "heads", "some/model")
    for path in (tmp_path / "new" / "heads", tmp_path / "new" / "heads" / WEIGHTS_FILE):
        for given in (path, str(path)):
            loaded = load_heads(given, HIDDEN_SIZE, EPS)
            assert len(loaded.heads) == 3
            assert loaded.state_dict().keys() == heads.state_dict().keys()
            for name, tensor in heads.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor)
    state = torch.randn(HIDDEN_SIZE)
    assert torch.equal(loaded(state), heads(state))  # the eps too


def failure(path: Path, hidden_size: int = HIDDEN_SIZE) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        load_heads(path, hidden_size, EPS)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_heads(random_heads(), tmp_path, "some/model")
    return tmp_path


def rewrite(folder: Path, drop: str = "", **changes: str) -> None:
    """The heads file with other metadata, or without one tensor."""
    state = {name: tensor for name, tensor in random_heads().state_dict().items() if name != drop}
    metadata = {
        "kind": "linear",
        "hidden_size": str(HIDDEN_SIZE),
        "num_heads": "3",
        "base_model": "some/model",
    }
    save_file(state, folder / WEIGHTS_FILE, {**metadata, **changes})


def test_heads_that_are_not_there_are_reported(tmp_path: Path):
    assert f"no draft heads at {tmp_path}" in failure(tmp_path).message  # a folder without them
    assert "no draft heads" in failure(tmp_path / "nowhere").message


def test_heads_of_another_hidden_size_are_refused_by_the_name_of_their_model(folder: Path):
    error = failure(folder, hidden_size=16)
    assert f"hidden size {HIDDEN_SIZE}, the model has 16" in error.message
    assert "some/model" in error.hint


def test_heads_of_another_kind_are_refused(folder: Path):
    rewrite(folder, kind="recurrent")
    assert "kind 'recurrent'" in failure(folder).message


def test_a_safetensors_file_of_something_else_is_refused(folder: Path):
    save_file({"x": torch.zeros(3)}, folder / WEIGHTS_FILE)
    assert "not a swiftgen heads file" in failure(folder).message


@pytest.mark.parametrize("num_bytes", [0, 5, 40, 700, -1])
def test_a_truncated_file_is_reported_as_damaged(folder: Path, num_bytes: int):
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert "is damaged" in failure(folder).message


def test_a_file_that_is_not_safetensors_is_reported_as_damaged(folder: Path):
    (folder / WEIGHTS_FILE).write_bytes(b"PK\x03\x04 this is a pickle in a zip" * 20)
    assert "is damaged" in failure(folder).message


@pytest.mark.parametrize(
    ("changes", "drop"),
    [
        ({"num_heads": "2"}, ""),
        ({"num_heads": "4"}, ""),
        ({"num_heads": "three"}, ""),
        ({}, "heads.1.linear.weight"),
    ],
)
def test_metadata_and_tensors_that_disagree_are_reported_as_damage(
    folder: Path, changes: dict[str, str], drop: str
):
    rewrite(folder, drop, **changes)
    assert "is damaged" in failure(folder).message


def test_tensors_of_a_wrong_shape_are_reported_as_damage(folder: Path):
    rewrite(folder, hidden_size="6")
    assert "is damaged" in failure(folder, hidden_size=6).message
