"""The Python API on a tiny model in a local folder: text, drafts, prompts, ends, errors before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import swiftgen
from support.commands import PROMPT
from support.model_files import EOS, HIDDEN_SIZE, MAX_POSITIONS, VOCAB_SIZE, save_model, tiny_tokenizer
from swiftgen.decoding.decode import StepEvent
from swiftgen.engine import Engine
from swiftgen.heads.files import HeadsInfo, save_heads
from swiftgen.heads.modules import new_heads
from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import Preset
from swiftgen.system.errors import SwiftgenError

pytestmark = pytest.mark.usefixtures("module_cache")

DRAFTS = ("auto", "paper", "lookup", "self")


@pytest.fixture(scope="module", params=["linear", "recurrent"])
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads that can draft half of the tokens."""
    folder = tmp_path_factory.mktemp("heads")
    torch.manual_seed(1)
    options = {"width": 16} if request.param == "recurrent" else {}
    vocabulary = torch.arange(0, VOCAB_SIZE, 2)
    random_heads = new_heads(request.param, HIDDEN_SIZE, 3, 1e-6, vocabulary=vocabulary, **options)
    for parameter in random_heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_heads(random_heads, folder, HeadsInfo(base_model="tiny", vocab_size=VOCAB_SIZE))
    return folder


@pytest.fixture(scope="module")
def engine(preset_file: Path) -> Engine:
    """One engine for all tests that change nothing."""
    return swiftgen.load(str(preset_file))


def changed(engine: Engine, **changes: Any) -> Preset:
    """Its preset with other settings, those of the model too."""
    model = {key: value for key, value in changes.items() if key in type(engine.preset.model).model_fields}
    preset = engine.preset.model_copy(update={key: v for key, v in changes.items() if key not in model})
    return preset.model_copy(update={"model": preset.model.model_copy(update=model)})


def tokens_of(events: Sequence[StepEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text_of(events: Sequence[StepEvent]) -> str:
    return "".join(event.text for event in events)


def failure(call: Any) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        call()
    assert "\n" not in caught.value.message
    return caught.value


class TestUnder:
    def test_other_settings_share_the_model(self, engine: Engine):
        engine.prepare(1, 2)
        other = engine.under(changed(engine, theta=1.3))
        assert other.loaded is engine.loaded
        assert engine.preset.theta == 1.1

    @pytest.mark.parametrize(
        "changes",
        [{"long_context": "yarn"}, {"heads": "somewhere"}, {"dtype": "bfloat16"}, {"attention": "sdpa"}],
    )
    def test_what_needs_another_model_is_refused(self, engine: Engine, changes: dict[str, Any]):
        with pytest.raises(ValueError, match="load an engine"):
            engine.under(changed(engine, **changes))

    def test_heads_may_be_left_unused(self, preset_file: Path, heads: Path):
        engine = swiftgen.load(str(preset_file), {"heads": str(heads)})
        assert engine.under(changed(engine, heads=None)).preset.heads is None


class TestText:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_the_text_of_all_events_is_that_of_all_tokens(self, engine: Engine, seed: int):
        events = list(engine.stream(PROMPT, num_tokens=200, seed=seed))
        token_ids = tokens_of(events)
        assert len(token_ids) == 200
        assert text_of(events) == engine.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert [event.stop_reason for event in events].count(None) == len(events) - 1
        assert events[-1].stop_reason == "length"

    def test_a_text_that_ends_inside_a_character_shows_that(self, engine: Engine):
        whole = tokens_of(list(engine.stream(PROMPT, num_tokens=60)))
        cut = [n for n in range(1, 61) if engine.tokenizer.decode(whole[:n]).endswith("\ufffd")]
        for num_tokens in cut[:5]:
            events = list(engine.stream(PROMPT, num_tokens=num_tokens))
            assert text_of(events) == engine.tokenizer.decode(whole[:num_tokens])
        assert len(cut) >= 5

    def test_each_event_reports_the_context_so_far(self, engine: Engine):
        prompt_ids = engine.encode(PROMPT)
        context = len(prompt_ids)
        for event in engine.stream(PROMPT, num_tokens=20):
            context += len(event.token_ids)
            assert event.context_tokens == context

    def test_the_same_seed_gives_the_same_text_and_another_another(self, engine: Engine):
        texts = [text_of(list(engine.stream(PROMPT, num_tokens=60, seed=seed))) for seed in (5, 6, 5)]
        assert texts[0] == texts[2] != texts[1]

    def test_token_ids_are_a_prompt_too(self, engine: Engine):
        from_text = list(engine.stream(PROMPT, num_tokens=20))
        from_ids = list(engine.stream(engine.encode(PROMPT), num_tokens=20))
        assert tokens_of(from_ids) == tokens_of(from_text)

    def test_another_prompt_gives_another_text(self, engine: Engine):
        texts = [tokens_of(list(engine.stream(prompt, num_tokens=20))) for prompt in (PROMPT, PROMPT + "!")]
        assert texts[0] != texts[1]

    def test_a_prompt_of_one_token_is_continued(self, engine: Engine):
        done: list[tuple[int, int]] = []
        events = engine.stream("x", num_tokens=10, on_prefill=lambda *progress: done.append(progress))
        assert len(tokens_of(list(events))) == 10
        assert done == []

    def test_the_prefill_reports_its_progress(self, engine: Engine):
        done: list[tuple[int, int]] = []
        prompt = [1, 2, 3] * 60
        list(engine.stream(prompt, num_tokens=1, on_prefill=lambda *progress: done.append(progress)))
        assert done == [(128, 179), (179, 179)]


@pytest.mark.usefixtures("even_passes")
class TestDrafts:
    def test_every_way_to_draft_writes_the_text_of_none(self, preset_file: Path, heads: Path):
        def written(**overrides: Any) -> tuple[list[int], int]:
            engine = swiftgen.load(str(preset_file), overrides)
            events = list(engine.stream(PROMPT, num_tokens=160, seed=2))
            assert engine.exactness.startswith("lossless (")
            return tokens_of(events), sum(event.draft_depth for event in events)

        expected, num_drafted = written(draft="none")
        assert num_drafted == 0
        for draft in DRAFTS:
            actual, num_drafted = written(draft=draft)
            assert actual == expected, draft
            assert num_drafted > 0 or draft == "lookup", draft  # the text may repeat nothing
        for draft in ("auto", "heads", "self"):
            actual, num_drafted = written(draft=draft, heads=str(heads))
            assert actual == expected, draft
            assert num_drafted > 0, draft
        actual, num_drafted = written(draft="paper", heads=str(heads), tree=[1, 3, 3, 3], refresh="recent")
        assert actual == expected
        assert num_drafted > 3 * 25  # four levels a step, unless a block ends there

    def test_what_stood_in_the_prompt_is_drafted(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file), {"draft": "lookup"})
        first, *_ = engine.stream([1, 2, 3] * 60, num_tokens=40, seed=2)
        assert first.draft_depth > 8

    def test_the_heads_draft_by_themselves_if_asked_to(self, preset_file: Path, heads: Path):
        engine = swiftgen.load(str(preset_file), {"draft": "heads", "heads": str(heads)})
        events = list(engine.stream(PROMPT, num_tokens=160, seed=2))
        assert {source for event in events for source in event.sources} == {"heads"}

    def test_to_draft_by_heads_there_must_be_some(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file), {"draft": "heads"})
        error = failure(lambda: list(engine.stream(PROMPT, num_tokens=5)))
        assert "no draft heads" in error.message
        assert "`heads`" in error.hint

    def test_the_seed_of_the_noise_decides_whatever_is_drafted(self, preset_file: Path):
        texts = []
        for draft in ("none", "paper"):
            engine = swiftgen.load(str(preset_file), {"draft": draft})
            texts += [tokens_of(list(engine.stream(PROMPT, num_tokens=40, seed=seed))) for seed in (0, 1)]
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]

    def test_a_second_stream_starts_afresh(self, engine: Engine):
        first = list(engine.stream(PROMPT, num_tokens=50, seed=4))
        list(engine.stream("Something else", num_tokens=90, seed=9))
        assert tokens_of(list(engine.stream(PROMPT, num_tokens=50, seed=4))) == tokens_of(first)

    def test_two_streams_may_run_side_by_side(self, engine: Engine):
        expected = [tokens_of(list(engine.stream(PROMPT, num_tokens=30, seed=seed))) for seed in (0, 1)]
        streams = [engine.stream(PROMPT, num_tokens=30, seed=seed) for seed in (0, 1)]
        written: list[list[int]] = [[], []]
        for _ in range(30):
            for stream, token_ids in zip(streams, written, strict=True):
                token_ids += next(stream, StepEvent((), (), 0, 0, 0, 0, 0, 0, 0)).token_ids
        assert written == expected


class TestPrompts:
    def test_raw_text_is_encoded_as_it_stands(self, engine: Engine):
        assert engine.preset.chat is False
        assert engine.encode(PROMPT) == engine.tokenizer.encode(PROMPT)
        assert engine.tokenizer.decode(engine.encode(PROMPT)) == PROMPT

    def test_chat_goes_through_the_template_of_the_model(self, engine: Engine):
        chat = engine.tokenizer.decode(engine.encode(PROMPT, chat=True))
        assert chat == f"[user]{PROMPT}[assistant]"
        chat = engine.tokenizer.decode(engine.encode(PROMPT, chat=True, system="Be brief."))
        assert chat == f"[system]Be brief.[user]{PROMPT}[assistant]"

    def test_the_preset_decides_unless_the_call_does(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file), {"chat": True, "system": "Be brief."})
        chat = engine.tokenizer.decode(engine.encode(PROMPT))
        assert chat == f"[system]Be brief.[user]{PROMPT}[assistant]"
        assert engine.tokenizer.decode(engine.encode(PROMPT, system="No.")).startswith("[system]No.[user]")
        assert engine.encode(PROMPT, chat=False) == engine.tokenizer.encode(PROMPT)

    def test_chat_without_a_template_is_refused(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file))
        engine.tokenizer.chat_template = None
        error = failure(lambda: engine.encode(PROMPT, chat=True))
        assert "no chat template" in error.message
        assert "--raw" in error.hint

    def test_an_empty_prompt_is_refused(self, engine: Engine):
        assert "empty" in failure(lambda: engine.encode("")).message
        assert "empty" in failure(lambda: engine.stream("", num_tokens=5)).message


class TestLimits:
    @pytest.mark.parametrize("num_tokens", [0, -3])
    def test_nothing_to_write_is_refused(self, engine: Engine, num_tokens: int):
        error = failure(lambda: engine.stream(PROMPT, num_tokens=num_tokens))
        assert str(num_tokens) in error.message

    def test_a_text_beyond_the_positions_is_refused_with_the_numbers(self, engine: Engine):
        num_prompt = len(engine.encode(PROMPT))
        error = failure(lambda: engine.stream(PROMPT, num_tokens=MAX_POSITIONS))
        assert f"{num_prompt} tokens of prompt" in error.message
        assert str(MAX_POSITIONS) in error.message
        assert f"at most {MAX_POSITIONS - num_prompt} tokens" in error.hint

    def test_the_last_position_can_be_written(self, engine: Engine):
        prompt = [1, 2, 3] * 168
        events = list(engine.stream(prompt, num_tokens=MAX_POSITIONS - len(prompt)))
        assert events[-1].context_tokens == MAX_POSITIONS
        failure(lambda: engine.stream(prompt, num_tokens=MAX_POSITIONS - len(prompt) + 1))

    def test_errors_come_before_the_weights_are_loaded(
        self, preset_file: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("swiftgen.engine.load_weights", lambda *_: pytest.fail("loaded"))
        engine = swiftgen.load(str(preset_file))
        failure(lambda: engine.stream(PROMPT, num_tokens=MAX_POSITIONS))
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda _: 1000)
        assert "memory" in str(failure(lambda: engine.stream(PROMPT, num_tokens=5)))

    def test_a_longer_second_stream_must_fit_into_memory_too(
        self, preset_file: Path, monkeypatch: pytest.MonkeyPatch
    ):
        engine = swiftgen.load(str(preset_file))
        list(engine.stream(PROMPT, num_tokens=1))
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda _: 1000)
        failure(lambda: engine.stream(PROMPT, num_tokens=MAX_POSITIONS - 50))

    def test_heads_of_another_model_are_refused(self, preset_file: Path, tmp_path: Path):
        def refusal(hidden_size: int, info: HeadsInfo) -> SwiftgenError:
            save_heads(new_heads("linear", hidden_size, 1, 1e-6), tmp_path, info)
            engine = swiftgen.load(str(preset_file), {"heads": str(tmp_path)})
            return failure(lambda: engine.stream(PROMPT, num_tokens=5))

        error = refusal(HIDDEN_SIZE + 1, HeadsInfo("other"))
        assert "hidden size 33, the model has 32" in error.message
        assert "other" in error.hint
        error = refusal(HIDDEN_SIZE, HeadsInfo("other", vocab_size=32_000))
        assert f"for 32,000 tokens, the model has {VOCAB_SIZE}" in error.message

    def test_a_longer_stream_does_not_change_what_a_shorter_one_writes(self, preset_file: Path):
        """YaRN stretches the positions for the length asked for; that must not outlive the stream."""
        engine = swiftgen.load(str(preset_file), {"long_context": "yarn"})
        short = tokens_of(list(engine.stream(PROMPT, num_tokens=30)))
        list(engine.stream(PROMPT, num_tokens=MAX_POSITIONS + 20))
        assert tokens_of(list(engine.stream(PROMPT, num_tokens=30))) == short


class TestEnds:
    def test_the_end_is_never_written_where_it_is_ignored(self, engine: Engine):
        assert engine.eos_token_ids == (EOS,)
        for seed in range(2):
            token_ids = tokens_of(list(engine.stream(PROMPT, num_tokens=400, seed=seed)))
            assert len(token_ids) == 400
            assert EOS not in token_ids

    def test_the_text_stops_at_the_first_end_and_does_not_show_it(self, preset_file: Path):
        lengths = set()
        for draft in ("none", "paper"):
            engine = swiftgen.load(
                str(preset_file),
                {"eos": "stop", "draft": draft, "sampler.temperature": 1.5, "sampler.min_p": 0},
            )
            for seed in range(5):
                events = list(engine.stream(PROMPT, num_tokens=250, seed=seed))
                token_ids = tokens_of(events)
                ended = EOS in token_ids
                assert events[-1].stop_reason == ("eos" if ended else "length")
                assert token_ids.index(EOS) == len(token_ids) - 1 if ended else len(token_ids) == 250
                assert "<end>" not in text_of(events)
                assert text_of(events) == engine.tokenizer.decode(token_ids, skip_special_tokens=True)
                lengths.add((seed, len(token_ids)))
        assert len(lengths) == 5  # the same with and without drafts
        assert sum(length < 250 for _, length in lengths) >= 2

    def test_suppressed_tokens_are_never_written(self, preset_file: Path, engine: Engine):
        common = sorted(set(tokens_of(list(engine.stream(PROMPT, num_tokens=100)))))[:20]
        suppressing = swiftgen.load(str(preset_file), {"suppress": common})
        token_ids = tokens_of(list(suppressing.stream(PROMPT, num_tokens=300)))
        assert set(common).isdisjoint(token_ids)
        assert len(set(token_ids)) > 10

    def test_ids_without_a_token_are_never_written(self, preset_file: Path, tmp_path: Path):
        """Models pad their vocabulary; an id of the padding has no text."""
        save_model(tmp_path, vocab_size=VOCAB_SIZE + 100, initializer_range=0.25)
        engine = swiftgen.load(str(preset_file), {"model.source": str(tmp_path)})
        token_ids = tokens_of(list(engine.stream(PROMPT, num_tokens=100)))
        assert max(token_ids) < EOS

    def test_suppressing_an_id_beyond_the_vocabulary_is_refused(self, preset_file: Path):
        engine = swiftgen.load(str(preset_file), {"suppress": [1_000_000]})
        error = failure(lambda: list(engine.stream(PROMPT, num_tokens=5)))
        assert "1000000" in error.message

    def test_special_tokens_beyond_the_vocabulary_of_the_model_are_no_trouble(
        self, preset_file: Path, tmp_path: Path
    ):
        """Tokenizers may know more tokens than the model has rows for."""
        save_model(tmp_path, initializer_range=0.25)
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
        assert len(tokenizer) == VOCAB_SIZE + 1
        tokenizer.save_pretrained(tmp_path)
        engine = swiftgen.load(str(preset_file), {"model.source": str(tmp_path)})
        assert len(tokens_of(list(engine.stream(PROMPT, num_tokens=20)))) == 20


class TestLoad:
    def test_a_preset_is_a_name_a_path_or_an_object(self, preset_file: Path):
        preset = load_preset(preset_file, {"theta": 1.3})
        assert swiftgen.load(preset).preset == preset
        assert swiftgen.load(str(preset_file), {"theta": 1.3}).preset == preset
        assert preset.name == "tiny"

    def test_overrides_do_not_go_with_an_object(self, preset_file: Path):
        failure(lambda: swiftgen.load(load_preset(preset_file), {"theta": 1.3}))

    def test_unknown_presets_and_settings_are_refused(self, preset_file: Path):
        assert "smollm2-135m" in str(failure(lambda: swiftgen.load("smollm2")).hint)
        assert "thetta" in failure(lambda: swiftgen.load(str(preset_file), {"thetta": 1})).message

    def test_a_missing_model_is_refused(self, preset_file: Path, tmp_path: Path):
        failure(lambda: swiftgen.load(str(preset_file), {"model.source": str(tmp_path / "nothing")}))

    def test_weights_are_loaded_once_and_when_needed(
        self, preset_file: Path, monkeypatch: pytest.MonkeyPatch
    ):
        import swiftgen.engine

        loaded = []
        load_weights = swiftgen.engine.load_weights
        monkeypatch.setattr("swiftgen.engine.load_weights", lambda *a: loaded.append(a) or load_weights(*a))
        engine = swiftgen.load(str(preset_file))
        with pytest.raises(RuntimeError):
            _ = engine.loaded
        for _ in range(2):
            list(engine.stream(PROMPT, num_tokens=2))
        assert len(loaded) == 1
        assert engine.loaded.max_positions == MAX_POSITIONS

    def test_what_fixes_the_bytes_is_named(self, engine: Engine):
        list(engine.stream(PROMPT, num_tokens=1))
        assert engine.arithmetic["dtype"] == "float32"
        assert engine.arithmetic["torch"] == torch.__version__
        assert str(engine.arithmetic["attention"]).startswith(("native ", "cpu_prefix"))
