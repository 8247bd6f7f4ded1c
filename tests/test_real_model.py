"""The main job on the real default model: drafts never change a byte.

The model is fetched on first use; without a network the tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swiftgen.engine import load
from swiftgen.system.devices import resolve_dtype
from swiftgen.system.errors import SwiftgenError

PROMPT = "Write a long novel about a lighthouse keeper who finds a map of a country that does not exist."
# Small enough that the draft pass forgets most of the text, and selects anew many times.
SMALL_CACHE = {"kv_budget": 64, "sink": 4, "W": 48, "theta": 1.15}


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def write(
    draft: str, dtype: str, temperature: float, seed: int, num_tokens: int
) -> tuple[list[int], str, int]:
    """Token ids, text, and the number of accepted drafts."""
    try:
        engine = load(
            None,
            {**SMALL_CACHE, "draft": draft, "model.dtype": dtype, "sampler.temperature": temperature},
        )
    except SwiftgenError as error:
        if "network" in f"{error.message} {error.hint}":
            pytest.skip(f"the default model cannot be fetched: {error.message}")
        raise
    events = list(engine.stream(PROMPT, num_tokens=num_tokens, seed=seed))
    token_ids = [token for event in events for token in event.token_ids]
    return token_ids, "".join(e.text for e in events), sum(e.num_accepted for e in events)


def assert_drafts_change_nothing(
    drafts: tuple[str, ...], dtype: str, temperature: float, seed: int, num_tokens: int
) -> None:
    expected_ids, expected_text, _ = write("none", dtype, temperature, seed, num_tokens)
    assert len(expected_ids) == num_tokens
    for draft in drafts:
        token_ids, text, num_accepted = write(draft, dtype, temperature, seed, num_tokens)
        assert token_ids == expected_ids, draft
        assert text == expected_text, draft
        assert num_accepted > (num_tokens / 20 if draft == "paper" else 0), draft


needs_bf16 = pytest.mark.skipif(
    resolve_dtype("auto", torch.device("cpu")) is not torch.bfloat16, reason="this CPU has no bf16 units"
)
DTYPES = [pytest.param("bfloat16", marks=needs_bf16), "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_nothing(dtype: str, temperature: float) -> None:
    assert_drafts_change_nothing(("paper",), dtype, temperature, seed=1, num_tokens=140)


@pytest.mark.slow
@pytest.mark.usefixtures("even_passes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 1), (0.8, 1), (0.8, 2), (1.0, 3)])
def test_drafts_change_nothing_over_2000_tokens(dtype: str, temperature: float, seed: int) -> None:
    assert_drafts_change_nothing(("paper", "auto"), dtype, temperature, seed, num_tokens=2000)


def test_same_seed_same_text_other_seed_other_text() -> None:
    first = write("auto", "auto", 0.8, seed=5, num_tokens=24)
    assert write("auto", "auto", 0.8, seed=5, num_tokens=24)[:2] == first[:2]
    assert write("auto", "auto", 0.8, seed=6, num_tokens=24)[0] != first[0]
