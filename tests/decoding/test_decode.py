"""The decoding loop: equal to transformers' greedy search, exact lengths, ends of text, and its reports."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import swiftgen.decoding.decode
from support.tiny import FAMILIES, VOCAB_SIZE, ar_planner, new_cache, run, sampler, tiny_model, tiny_target
from swiftgen.decoding.decode import StepEvent, decode
from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree

PROMPT = [5, 17, 3, 5, 17, 8, 60]


class ScriptedPlanner(Planner):
    """Drafts the given paths, one list of them a step (then nothing); `right` stands for the right text."""

    def __init__(self, target: Target, text: Sequence[int], steps: Sequence[Sequence[str]]) -> None:
        super().__init__([[]])
        self._text, self._steps = list(text), list(steps)
        self.num_written = 0
        self.max_depths: list[int] = []

    def draft(self, tree: DraftTree, history: History) -> DraftTree:
        """A path is a word like `rrw`: two right tokens, then a wrong one."""
        self.max_depths.append(tree.max_depth)
        for word in self._steps.pop(0) if self._steps else ():
            following = self._text[self.num_written : self.num_written + len(word)]
            path = [
                token if kind == "r" else (token + 1) % VOCAB_SIZE
                for kind, token in zip(word, following, strict=False)
            ]
            tree.add_path(0, path, "base" if "w" not in word else "ngram")
        return tree

    def observe(self, tree, path, committed) -> None:  # type: ignore[no-untyped-def]
        self.num_written += len(committed.token_ids)


class CheatingPlanner(ScriptedPlanner):
    """Drafts as many right tokens as the tree may hold."""

    def draft(self, tree: DraftTree, history: History) -> DraftTree:
        self._steps = [["r" * 200]]
        return super().draft(tree, history)


def written(num_tokens: int, sample: Sampler, prompt: list[int] = PROMPT) -> list[int]:
    """By AR decoding."""
    target = tiny_target()
    return run(target, ar_planner(target), sample, prompt, num_tokens).token_ids


@functools.cache
def _long_text() -> tuple[int, ...]:
    return tuple(written(200, sampler()))


def ar_text(num_tokens: int) -> list[int]:
    """What AR decoding writes after the prompt."""
    return list(_long_text()[:num_tokens])


def scripted(steps: Sequence[Sequence[str]], num_tokens: int, **options: object) -> list[StepEvent]:
    target, text = tiny_target(), ar_text(num_tokens)
    planner = ScriptedPlanner(target, text, steps)
    return run(target, planner, sampler(), PROMPT, num_tokens, **options).events


class TestAgainstTransformers:
    def greedy(self, family: str, num_tokens: int, theta: float, prompt: list[int]) -> list[int]:
        config = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, repetition_penalty=theta, eos_token_id=None
        )
        config.pad_token_id = 0
        model = tiny_model(family)
        model.generation_config = config
        ids = model.generate(torch.tensor([prompt]), generation_config=config)
        return ids[0, len(prompt) :].tolist()

    def drafting(self, target: Target, sample: Sampler) -> Planner:
        partial = PartialCache(target.cache_shape, budget=40, num_sinks=4)
        way = [
            SelfDrafter(target, sample, partial, None, [3]),
            NgramDrafter(4, 20, seed=0),
        ]
        return Planner([way])

    @pytest.mark.parametrize("theta", [1.0, 1.3], ids=["plain", "penalised"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_greedy_text_equals_theirs(self, family: str, theta: float):
        num_tokens = 130  # past a block boundary
        expected = self.greedy(family, num_tokens, theta, PROMPT)
        target = tiny_target(family)
        for plan in (ar_planner, self.drafting):
            sample = sampler(temperature=0.0, theta=theta, W=1000)
            planner = plan(target) if plan is ar_planner else plan(target, sample)
            assert run(target, planner, sample, PROMPT, num_tokens).token_ids == expected
        assert len(set(expected)) > (30 if theta > 1 else 1)

    def test_a_prompt_of_one_token_is_enough(self):
        target, sample = tiny_target(), sampler(temperature=0.0)
        actual = run(target, ar_planner(target), sample, [42], 30)
        assert actual.token_ids == self.greedy("llama", 30, 1.0, [42])

    @pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300])
    def test_a_prefill_in_chains_gives_their_hidden_states_and_keys(self, num_tokens: int):
        target = tiny_target()
        ids = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(num_tokens)]
        cache = new_cache(target, num_tokens)
        done: list[int] = []
        output = target.prefill(ids, cache, done.append)
        assert output is not None
        assert done == [*range(BLOCK_TOKENS, num_tokens, BLOCK_TOKENS), num_tokens]
        assert cache.length == num_tokens

        theirs = tiny_model()
        theirs.model.norm = torch.nn.Identity()
        with torch.inference_mode():
            expected = theirs.model(torch.tensor([ids]), use_cache=True)
        last_chain = len(output.hidden)
        assert last_chain == (num_tokens - 1) % BLOCK_TOKENS + 1
        torch.testing.assert_close(
            output.hidden, expected.last_hidden_state[0, -last_chain:], rtol=1e-3, atol=1e-3
        )
        for layer, entry in enumerate(expected.past_key_values.layers):
            torch.testing.assert_close(cache.keys[layer, :, :num_tokens], entry.keys[0], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(
                cache.values[layer, :, :num_tokens], entry.values[0], rtol=1e-3, atol=1e-3
            )

    def test_logits_of_a_pass_equal_theirs(self):
        target = tiny_target()
        cache = new_cache(target, len(PROMPT))
        output = target.prefill(PROMPT, cache)
        assert output is not None
        with torch.inference_mode():
            expected = tiny_model()(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(target.logits(output.hidden), expected, rtol=1e-3, atol=1e-3)

    def test_a_prefill_of_nothing_is_no_pass(self):
        assert tiny_target().prefill([], new_cache(tiny_target(), 1)) is None


class TestLength:
    @pytest.mark.parametrize("num_tokens", [1, 2, 127, 128, 129])
    def test_exactly_as_many_tokens_are_written_as_asked_for(self, num_tokens: int):
        target, text = tiny_target(), ar_text(140)
        assert written(num_tokens, sampler()) == text[:num_tokens]
        planner = CheatingPlanner(target, text, [])
        done = run(target, planner, sampler(), PROMPT, num_tokens)
        assert done.token_ids == text[:num_tokens]
        assert [event.stop_reason for event in done.events[:-1]] == [None] * (len(done.events) - 1)
        assert done.events[-1].stop_reason == "length"
        assert len(done.events) <= 3  # the whole block was accepted at once

    def test_no_tree_crosses_a_block_boundary_or_the_end(self):
        target = tiny_target()
        planner = CheatingPlanner(target, ar_text(200), [])
        run(target, planner, sampler(), PROMPT, 200)
        # The root is at position 6, so 121 levels reach 127; at 128 there are 78 tokens left to write.
        assert planner.max_depths == [121, 77]

    def test_the_last_token_of_a_block_is_a_root_without_drafts(self):
        target, prompt = tiny_target(), (PROMPT * 19)[:BLOCK_TOKENS]  # its last token is at position 127
        planner = CheatingPlanner(target, written(20, sampler(), prompt), [])
        done = run(target, planner, sampler(), prompt, 20)
        assert planner.max_depths == [0, 18]
        assert done.token_ids == written(20, sampler(), prompt)

    def test_prompts_around_a_block_boundary_are_continued_alike(self):
        for num_prompt in (127, 128, 129, 130):
            prompt = (PROMPT * 19)[:num_prompt]
            text = written(12, sampler(), prompt)
            with torch.inference_mode():
                logits = tiny_model()(torch.tensor([prompt + text[:-1]])).logits[0, num_prompt - 1 :]
            positions = num_prompt + torch.arange(12)
            nothing = torch.zeros(12, 1, dtype=torch.int64)
            assert text == sampler().pick(logits.clone(), positions, nothing)


class TestEndOfText:
    def test_the_text_ends_at_the_first_end_inside_an_accepted_block(self):
        text = ar_text(40)
        stop = text[20]
        first = text.index(stop)
        target = tiny_target()
        planner = CheatingPlanner(target, text, [])
        done = run(target, planner, sampler(), PROMPT, 40, stop_token_ids={stop})
        assert done.token_ids == text[: first + 1]
        assert done.token_ids[-1] == stop
        (event,) = done.events  # the draft went on beyond the end
        assert event.stop_reason == "eos"
        assert event.draft_depth > event.num_accepted == first + 1
        assert event.context_tokens == len(PROMPT) + first + 1

    def test_an_end_right_after_the_accepted_path_counts_too(self):
        text = ar_text(40)
        stop = text[20]
        first = text.index(stop)
        target = tiny_target()
        planner = ScriptedPlanner(target, text, [["r" * first]])
        done = run(target, planner, sampler(), PROMPT, 40, stop_token_ids={stop})
        assert done.token_ids == text[: first + 1]
        assert [(e.stop_reason, e.num_accepted) for e in done.events] == [("eos", first)]

    def test_an_end_beyond_the_length_is_not_reached(self):
        text = ar_text(40)
        stop = next(token for i, token in enumerate(text) if token not in text[:i] and i > 5)
        first = text.index(stop)
        target = tiny_target()
        planner = CheatingPlanner(target, text, [])
        for num_tokens, reason in ((first, "length"), (first + 1, "eos")):
            planner.num_written = 0
            done = run(target, planner, sampler(), PROMPT, num_tokens, stop_token_ids={stop})
            assert (len(done.token_ids), done.events[-1].stop_reason) == (num_tokens, reason)

    def test_any_of_several_ends_stops(self):
        text = ar_text(40)
        target = tiny_target()
        done = run(target, ar_planner(target), sampler(), PROMPT, 40, stop_token_ids=(text[30], text[3]))
        assert done.token_ids == text[: min(text.index(text[30]), text.index(text[3])) + 1]

    def test_a_suppressed_end_is_never_written(self):
        text, target = ar_text(100), tiny_target()
        suppressed = {text[0], text[10], text[50]}
        sample = Sampler(sampler().settings, 3, 0, 1.0, suppressed)
        done = run(target, ar_planner(target), sample, PROMPT, 100, stop_token_ids=suppressed)
        assert len(done.token_ids) == 100
        assert suppressed.isdisjoint(done.token_ids)


class TestSeeds:
    def test_a_seed_gives_one_text_and_another_seed_another(self):
        texts = [written(50, sampler(seed=seed)) for seed in (0, 0, 1, 2)]
        assert texts[0] == texts[1]
        assert len({tuple(text) for text in texts}) == 3

    def test_without_temperature_the_seed_does_not_matter(self):
        texts = {tuple(written(30, sampler(seed=seed, temperature=0.0))) for seed in range(3)}
        assert len(texts) == 1

    def test_a_small_penalty_window_is_applied_below_the_root_as_in_AR(self):
        # W smaller than the tree is deep: even the root has left the window of the deepest nodes.
        target = tiny_target()
        texts = {W: written(60, sampler(W=W, theta=20.0, temperature=0.3)) for W in (1, 2, 3)}
        assert len(set(map(tuple, texts.values()))) == 3
        for W, text in texts.items():
            planner = CheatingPlanner(target, text, [])
            done = run(target, planner, sampler(W=W, theta=20.0, temperature=0.3), PROMPT, 60)
            assert done.token_ids == text
            assert len(done.events) == 1


class TestEvents:
    def test_fields_by_hand(self):
        events = scripted([["rrr"], ["rrw"], ["w"], [], ["rw", "rrrr"]], num_tokens=14)
        text = ar_text(14)
        assert (
            [event.token_ids for event in events]
            == [
                tuple(text[:4]),  # three accepted and the target's own
                tuple(text[4:7]),  # two accepted
                tuple(text[7:8]),  # none
                tuple(text[8:9]),  # nothing was drafted
                tuple(text[9:14]),  # the right one of two paths
            ]
        )
        assert [event.num_accepted for event in events] == [3, 2, 0, 0, 4]
        assert [event.draft_depth for event in events] == [3, 3, 1, 0, 4]
        assert [event.num_rows for event in events] == [4, 4, 2, 1, 6]
        assert [event.context_tokens for event in events] == [7 + n for n in (4, 7, 8, 9, 14)]
        assert [event.stop_reason for event in events] == [None] * 4 + ["length"]
        assert events[0].sources == ("base",) * 3
        assert events[1].sources == ("ngram",) * 2
        assert events[4].sources == ("ngram", "base", "base", "base")  # "rw" was there first
        assert all(event.text == "" for event in events)

    def test_acceptance_rate_and_tokens_per_step_follow(self):
        events = scripted([["rrr"], ["rrw"], ["w"], [], ["rw", "rrrr"]], num_tokens=14)
        # 3 + 2 + 0 + 0 + 4 accepted of 3 + 3 + 1 + 0 + 4 drafted levels; 14 tokens in 5 steps
        assert sum(e.num_accepted for e in events) / sum(e.draft_depth for e in events) == 9 / 11
        assert sum(len(e.token_ids) for e in events) / len(events) == 14 / 5

    def test_kv_memory_is_that_of_the_committed_tokens(self):
        events = scripted([["rrr"]], num_tokens=5)
        # 2 layers x 2 KV heads x 8 numbers x 4 bytes, keys and values; the newest token has no key yet
        per_token = 2 * 2 * 8 * 4 * 2
        assert [event.kv_bytes for event in events] == [per_token * (7 + 4 - 1), per_token * (7 + 5 - 1)]

    def test_seconds_are_measured_and_add_up(self):
        begin = swiftgen.decoding.decode.time.perf_counter()
        events = scripted([["rrr"]], num_tokens=8)
        elapsed = swiftgen.decoding.decode.time.perf_counter() - begin
        parts = [(event.draft_s, event.verify_s, event.sample_s) for event in events]
        assert all(part > 0 for event_parts in parts for part in event_parts)
        assert sum(map(sum, parts)) < elapsed

    def test_the_prefill_reports_its_progress(self):
        target, prompt = tiny_target(), PROMPT * 40
        done: list[int] = []
        run(target, ar_planner(target), sampler(), prompt, 1, on_prefill=done.append)
        assert done == [128, 256, 279]  # the last of the 280 tokens is the root

    def test_a_planner_sees_the_prompt_and_then_what_was_committed(self):
        seen: list[tuple[list[int], int, int]] = []

        class Watching(ScriptedPlanner):
            def read(self, committed) -> None:  # type: ignore[no-untyped-def]
                seen.append((list(committed.token_ids), committed.begin, committed.cache.length))

            def observe(self, tree, path, committed) -> None:  # type: ignore[no-untyped-def]
                super().observe(tree, path, committed)
                seen.append((list(committed.token_ids), committed.begin, committed.cache.length))

        target, text = tiny_target(), ar_text(5)
        run(target, Watching(target, text, [["rr"]]), sampler(), PROMPT, 5)
        assert seen == [(PROMPT, 0, 6), (text[:3], 6, 9), (text[3:4], 9, 10), (text[4:5], 10, 11)]

    def test_a_planner_gets_queries_and_state_of_the_last_token_with_a_key(self):
        target, text = tiny_target(), ar_text(12)
        given: dict[int, Committed] = {}

        class Watching(ScriptedPlanner):
            def read(self, committed) -> None:  # type: ignore[no-untyped-def]
                given[committed.cache.length] = committed

            def observe(self, tree, path, committed) -> None:  # type: ignore[no-untyped-def]
                super().observe(tree, path, committed)
                given[committed.cache.length] = committed

        run(target, Watching(target, text, [["rrw", "rrrr"], ["rrw"]]), sampler(), PROMPT, 12)
        assert list(given) == [6, 11, 14, 15, 16, 17, 18]
        for length, committed in given.items():
            ids = [*PROMPT, *text][:length]
            cache = new_cache(target, length)
            target.prefill(ids[:-1], cache)
            alone = target.forward(DraftTree(ids[-1], 0), length - 1, cache)
            assert committed.queries is not None
            assert committed.queries.shape == (2, 2, 3, 8)
            torch.testing.assert_close(committed.queries, alone.queries[:, :, :, 0], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(committed.state, alone.hidden[0], rtol=1e-3, atol=1e-3)

    def test_a_prompt_of_one_token_leaves_no_queries_and_no_state(self):
        seen: list[Committed] = []

        class Watching(ScriptedPlanner):
            def read(self, committed) -> None:  # type: ignore[no-untyped-def]
                seen.append(committed)

        target = tiny_target()
        run(target, Watching(target, [], []), sampler(), [5], 2)
        assert [(list(c.token_ids), c.begin, c.queries, c.state) for c in seen] == [([5], 0, None, None)]

    def test_nothing_is_computed_before_the_first_event_is_asked_for(self):
        target = tiny_target()
        cache = new_cache(target, 20)
        events = decode(target, ar_planner(target), sampler(), cache, PROMPT, 5)
        assert cache.length == 0
        next(events)
        assert cache.length == len(PROMPT)


def test_the_loop_imports_no_command_line_no_panel_no_transformers_and_no_files():
    tree = ast.parse(Path(swiftgen.decoding.decode.__file__).read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    ours = {name for name in imported if name.startswith("swiftgen")}
    assert {name.split(".")[0] for name in imported - ours} <= {"torch", *sys.stdlib_module_names}
    for name in ("typer", "rich", "transformers", "pathlib", "io", "os", "json", "shutil", "tempfile", "sys"):
        assert name not in {module.split(".")[0] for module in imported}
    assert {name.split(".")[1] for name in ours} == {"decoding", "forward"}
    called = {
        node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }
    assert called.isdisjoint({"open", "print", "input", "exec", "eval", "__import__"})
