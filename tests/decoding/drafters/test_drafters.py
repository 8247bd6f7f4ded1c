"""Drafters: counts of n-grams, the heads, and the draft pass."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.tiny import (
    DRAFT_VOCABULARY,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Priced,
    ar_planner,
    new_cache,
    random_heads,
    ready_heads,
    run,
    sampler,
    tiny_model,
    tiny_target,
)
from support.upkeep import committed
from swiftgen.decoding.acceptance import calibrated
from swiftgen.decoding.drafters import ngram, self_draft
from swiftgen.decoding.drafters.base import Committed, Drafter
from swiftgen.decoding.drafters.heads import BIAS, PRIOR, HeadsDrafter, ReadyHeads
from swiftgen.decoding.drafters.ngram import NgramDrafter, NgramTable
from swiftgen.decoding.drafters.self_draft import MAX_PASSES, SelfDrafter
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.history import History
from swiftgen.decoding.noise import keyed_gumbel
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.heads.modules import DraftHeads, new_heads
from swiftgen.native.build import kernels_for

KINDS = ("linear", "recurrent")
KERNELS = kernels_for("auto", torch.device("cpu"), torch.float32, 64)
PROMPT = [5, 17, 3, 5, 17, 8, 60]


def random_text(seed: int, num_tokens: int, alphabet: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(num_tokens)]


class TestNgramTable:
    @pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 4), (4, 5), (4, 100)])
    def test_the_most_frequent_are_those_of_a_full_count(self, n: int, k: int):
        table, text = NgramTable(n, k, seed=1), random_text(n * k, 300)
        written = 0
        while written < len(text):
            table.extend(text[written : written + 7])
            written = min(written + 7, len(text))
            counts = Counter(tuple(text[i : i + n]) for i in range(written - n + 1))
            for first in range(3):
                grams = {gram: count for gram, count in counts.items() if gram[0] == first}
                found = [(first, *rest) for rest in table.most_frequent(first)]
                assert len(found) == len(set(found)) == min(k, len(grams))
                # Which of equally frequent ones are chosen is open, but not how frequent the chosen are.
                assert [grams[gram] for gram in found] == sorted(grams.values(), reverse=True)[:k]

    def test_counts_by_hand(self):
        table = NgramTable(3, 2, seed=0)
        table.extend([1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 5, 5])
        # 1 2 4 twice, 1 2 3 and 1 5 5 once each
        assert table.most_frequent(1)[0] == (2, 4)
        assert table.most_frequent(1)[1] in [(2, 3), (5, 5)]
        assert table.most_frequent(9) == []

    def test_an_ngram_spans_the_border_between_two_steps(self):
        table = NgramTable(3, 5, seed=0)
        for step in ([1], [2], [3, 4]):
            table.extend(step)
        assert table.most_frequent(1) == [(2, 3)]
        assert table.most_frequent(2) == [(3, 4)]

    def test_an_ngram_that_was_dropped_comes_back_with_its_whole_count(self):
        table = NgramTable(2, 1, seed=0)
        table.extend([1, 2, 1, 2, 9])  # 1 2 leads with two
        table.extend([1, 3, 9, 1, 3, 9])  # a tie at two, whichever leads
        table.extend([1, 3])
        assert table.most_frequent(1) == [(3,)]

    def test_ties_are_broken_by_the_seed(self):
        text = [token for i in range(2, 40) for token in (1, i)]  # 38 successors of 1, once each

        def chosen(seed: int) -> list[tuple[int, ...]]:
            table = NgramTable(2, 5, seed)
            table.extend(text)
            return table.most_frequent(1)

        assert chosen(3) == chosen(3)
        assert len({tuple(chosen(seed)) for seed in range(5)}) == 5
        assert len({gram for seed in range(30) for gram in chosen(seed)}) > 30  # no place is preferred

    def test_the_list_at_hand_is_never_longer_than_k(self):
        table = NgramTable(3, 4, seed=0)
        for token in random_text(1, 2000, alphabet=6):
            table.extend([token])
            assert max(map(len, table._best.values()), default=0) <= 4
        assert len(table._entries) > 150  # there was much to choose from

    def test_of_too_many_the_rarer_and_older_are_forgotten(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ngram, "MAX_GRAMS", 100)
        table = NgramTable(2, 3, seed=0)
        table.extend([1, 2, 1, 2, 1, 2])
        for token in range(10, 1_000):
            table.extend([token])
            assert len(table._entries) <= 100
        assert table.most_frequent(1)[0] == (2,)
        assert not table.most_frequent(10)
        assert table.most_frequent(998) == [(999,)]
        at_hand = [(first, *rest) for first in table._best for rest in table.most_frequent(first)]
        assert set(at_hand) <= set(table._entries)


class TestNgramDrafter:
    def test_chains_hang_below_every_first_candidate(self):
        drafter = NgramDrafter(3, 5, seed=0)
        drafter.observe(committed([7, 8, 9, 1, 2, 3]))
        drafter.observe(committed([7, 8, 9, 7]))
        tree = DraftTree(7, max_depth=5)
        tree.add_path(0, [1, 5], "base")
        tree.add(0, 9, "base")
        drafter.propose(tree, History(1))
        paths = {tuple(tree.tokens[step] for step in tree.path(node)[1:]) for node in range(1, len(tree))}
        expected = {(1,), (1, 5), (1, 2), (1, 2, 3), (9,), (9, 1), (9, 1, 2)}
        assert paths == expected
        assert [tree.sources[node] for node in tree.children(1)] == ["base", "ngram"]

    def test_of_none_to_draft_none_are_counted(self):
        drafter = NgramDrafter(2, 0, seed=0)
        drafter.observe(committed([1, 2, 1, 2]))
        assert not drafter._table._entries

    def test_without_a_candidate_there_is_nothing_to_hang_them_below(self):
        drafter = NgramDrafter(2, 3, seed=0)
        drafter.observe(committed([1, 2, 1, 2]))
        tree = DraftTree(1, max_depth=5)
        drafter.propose(tree, History(1))
        assert len(tree) == 1

    def test_the_most_frequent_are_drafted_first(self):
        drafter = NgramDrafter(2, 3, seed=0)
        drafter.observe(committed([1, 2, 1, 3, 1, 3, 1, 4, 1, 4, 1, 4, 1]))
        tree = DraftTree(9, max_depth=5)
        tree.add(0, 1, "base")
        drafter.propose(tree, History(1))
        assert tree.tokens == [9, 1, 4, 3, 2]


def after_prompt() -> tuple[Committed, History]:
    """The prompt as drafters see it."""
    target = tiny_target()
    cache = new_cache(target, len(PROMPT))
    prefill = target.prefill(PROMPT[:-1], cache)
    assert prefill is not None
    history = History(100)
    history.extend(PROMPT)
    return Committed(PROMPT, cache, 0, prefill.queries[:, :, :, -1], prefill.hidden[-1]), history


def drafted_by(drafter: Drafter, max_depth: int = 9) -> DraftTree:
    """What a drafter hangs below the last token of the prompt."""
    prompt, history = after_prompt()
    drafter.observe(prompt)
    tree = DraftTree(PROMPT[-1], max_depth)
    drafter.propose(tree, history)
    return tree


def draft_pass(heads: ReadyHeads | None, shape: list[int], sample: Sampler, max_depth: int = 9) -> DraftTree:
    """The tree of one draft pass after the prompt, with a partial cache that holds all of it."""
    partial = PartialCache(tiny_target().cache_shape, budget=100, num_sinks=2)
    return drafted_by(SelfDrafter(tiny_target(), sample, partial, heads, shape), max_depth)


def by_heads(
    heads: ReadyHeads | DraftHeads | str,
    widths: list[int],
    sample: Sampler,
    beam: int | None = None,
    max_depth: int = 9,
    floor: float = 0.0,
) -> DraftTree:
    """The tree that heads draft after the prompt."""
    ready = heads if isinstance(heads, ReadyHeads) else ready_heads(heads)
    return drafted_by(HeadsDrafter(tiny_target(), sample, ready, widths, beam, floor), max_depth)


def tokens_below(tree: DraftTree, node: int) -> list[int]:
    return [tree.tokens[child] for child in tree.children(node)]


class SlowHeads:
    """What heads give the tokens after a path, computed for that path alone by transformers' parts."""

    def __init__(self, heads: DraftHeads, text: list[int], temperature: float, seed: int = 3) -> None:
        self._model, self._heads = tiny_model(), heads
        self._text, self._temperature, self._seed = text, temperature, seed
        norm, self._model.model.norm = self._model.model.norm, torch.nn.Identity()
        with torch.inference_mode():  # the last token of the text has not been read yet
            self._state = self._model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        self._model.model.norm = norm

    @torch.inference_mode()
    def nearest(self, path: list[int]) -> list[tuple[int, float]]:
        """The eight best tokens after a path below the text, with their shares."""
        state = self._state
        for depth, token in enumerate([self._text[-1], *path], start=1):
            state = self._heads.advance(state, self._model.model.embed_tokens.weight[token], depth)
        scores = (self._model.lm_head.weight @ self._heads.output(state, len(path) + 1)).double()
        if self._temperature:
            position = torch.tensor(len(self._text) + len(path))
            scores = scores / self._temperature + keyed_gumbel(self._seed, position, torch.arange(VOCAB_SIZE))
        if self._heads.vocabulary is not None:
            others = [token for token in range(VOCAB_SIZE) if token not in self._heads.vocabulary]
            scores[others] = -torch.inf
        best = scores.topk(8)
        return list(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))

    def check(self, tree: DraftTree, widths: list[int]) -> None:
        """A full tree of these widths is as it should be, node by node."""
        assert tree.depth == len(widths)
        for node in range(len(tree)):
            if tree.depths[node] == len(widths):
                continue
            path = [tree.tokens[step] for step in tree.path(node)[1:]]
            expected = self.nearest(path)[: widths[tree.depths[node]]]
            assert tokens_below(tree, node) == [token for token, _ in expected]
            chances = [tree.chances[child] for child in tree.children(node)]
            assert chances == pytest.approx(
                [calibrated(share, BIAS) for _, share in expected], rel=1e-2, abs=1e-4
            )


class TestHeadsDrafter:
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize("vocabulary", [None, DRAFT_VOCABULARY], ids=["all", "some"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_branch_is_what_the_heads_say_of_its_own_tokens(
        self, kind: str, vocabulary: Tensor | None, temperature: float
    ):
        tree = by_heads(random_heads(kind, vocabulary), [3, 2, 2], sampler(temperature=temperature))
        assert len(tree) == 1 + 3 + 6 + 12
        assert set(tree.sources[1:]) == {"heads"}
        SlowHeads(random_heads(kind, vocabulary), PROMPT, temperature).check(tree, [3, 2, 2])
        if vocabulary is not None:
            assert all(token % 2 == 0 for token in tree.tokens[1:])

    @pytest.mark.parametrize(("kind", "is_conditioned"), [("linear", False), ("recurrent", True)])
    def test_only_recurrent_branches_depend_on_their_tokens(self, kind: str, is_conditioned: bool):
        tree = by_heads(kind, [3, 3, 3], sampler(temperature=0.0))
        for depth in (1, 2):
            below = {
                tuple(tokens_below(tree, node)) for node in range(len(tree)) if tree.depths[node] == depth
            }
            assert (len(below) > 1) == is_conditioned

    def test_the_window_of_a_branch_holds_its_own_tokens(self):
        # Every token of the window is as good as forbidden, so no branch has a token twice.
        plain = by_heads(untrained_heads("linear"), [2, 2, 2], sampler(temperature=0.0))
        assert tokens_below(plain, 1) == tokens_below(plain, 0)  # untrained, they repeat themselves
        penalised = by_heads(
            untrained_heads("linear"), [2, 2, 2], sampler(temperature=0.0, theta=1000.0, W=20)
        )
        for node in range(len(penalised)):
            path = [penalised.tokens[step] for step in penalised.path(node)]
            assert len(set(path)) == len(path)
        assert len(penalised) == 1 + 2 + 4 + 8

    def test_levels_beyond_the_heads_are_left_out(self):
        tree = by_heads(random_heads("recurrent", num_heads=2), [1, 2, 2, 2], sampler())
        assert (tree.depth, len(tree)) == (2, 1 + 1 + 2)

    @pytest.mark.parametrize(("max_depth", "num_nodes"), [(0, 1), (1, 3), (2, 7), (3, 15), (4, 15)])
    def test_levels_beyond_the_block_are_left_out(self, max_depth: int, num_nodes: int):
        for kind in KINDS:
            assert len(by_heads(kind, [2, 2, 2], sampler(), max_depth=max_depth)) == num_nodes

    @pytest.mark.parametrize("floor", [0.05, 0.3, 0.9])
    def test_what_is_unlikely_with_its_path_gets_no_children(self, floor: float):
        tree = by_heads("recurrent", [3, 3, 3], sampler(temperature=1.5), floor=floor)
        joint = [1.0]
        for node in range(1, len(tree)):
            joint.append(joint[tree.parents[node]] * tree.chances[node])
        for node in range(len(tree)):
            grows = tree.depths[node] < 3 and joint[node] >= floor
            assert len(tree.children(node)) == (3 if grows else 0)

    @pytest.mark.parametrize("beam", [1, 2, 5])
    @pytest.mark.parametrize("kind", KINDS)
    def test_only_the_likeliest_of_a_level_get_children(self, kind: str, beam: int):
        whole = by_heads(kind, [3, 3, 3], sampler(temperature=1.5))
        tree = by_heads(kind, [3, 3, 3], sampler(temperature=1.5), beam)
        joint = [1.0]
        for node in range(1, len(tree)):
            joint.append(joint[tree.parents[node]] * tree.chances[node])
        for depth in (1, 2):
            level = [node for node in range(len(tree)) if tree.depths[node] == depth]
            likeliest = sorted(level, key=lambda node: -joint[node])[:beam]
            assert {node for node in level if tree.children(node)} == set(likeliest)
            assert all(len(tree.children(node)) == 3 for node in likeliest)
        assert len(tree) == 1 + 3 + 3 * min(beam, 3) + 3 * min(beam, 9)
        # A beam leaves nodes out; it does not change those that stay.
        for node in range(len(tree)):
            other = 0
            for step in tree.path(node)[1:]:
                other = whole.child(other, tree.tokens[step])
                assert other is not None
            assert whole.chances[other] == pytest.approx(tree.chances[node], rel=1e-3)

    def test_without_a_state_nothing_is_drafted(self):
        drafter = HeadsDrafter(tiny_target(), sampler(), ready_heads("recurrent"), [2, 2], None)
        prompt, history = after_prompt()
        tree = DraftTree(PROMPT[-1], max_depth=9)
        drafter.propose(tree, history)
        assert len(tree) == 1
        drafter.observe(prompt)
        drafter.observe(replace(prompt, state=None))  # what it knew is not the state of this text
        drafter.propose(tree, history)
        assert len(tree) == 1

    def test_a_level_that_costs_more_than_it_promises_is_not_made(self):
        """A level is taken to cost its share of a pass, which took a second."""
        first = by_heads("recurrent", [2], sampler())
        adds = sum(first.chances[1:])  # the first level, and what is learnt of the hit rate
        promised = adds * (1.0 + 0.25 * (adds - 1.0))
        for price, depth in ((0.9 * promised, 2), (1.1 * promised, 1)):
            drafter = HeadsDrafter(
                *(tiny_target(), sampler(), ready_heads("recurrent"), [2, 2], None),
                estimates=(estimates := Priced(price / PRIOR.share)),
            )
            estimates.level("heads", PRIOR).hit = 1.0
            assert drafted_by(drafter).depth == depth

    def test_tokens_that_are_there_already_are_shared_and_grown(self):
        alone = by_heads("recurrent", [2, 2], sampler())
        first = alone.tokens[1]
        drafter = HeadsDrafter(tiny_target(), sampler(), ready_heads("recurrent"), [2, 2], None)
        prompt, history = after_prompt()
        drafter.observe(prompt)
        tree = DraftTree(PROMPT[-1], max_depth=9)
        tree.add(0, first, "ngram", 0.999)
        drafter.propose(tree, history)
        assert tree.tokens == alone.tokens
        assert tree.sources == ["root", "ngram", *["heads"] * 5]
        assert tree.chances[1] == 0.999

    def test_tokens_that_cannot_occur_are_not_drafted(self):
        tree = by_heads("linear", [3, 3, 3], sampler(top_k=2))
        assert len(tree) == 1 + 2 + 4 + 8
        odd_only = Sampler(sampler().settings, 3, 0, 1.0, suppressed=DRAFT_VOCABULARY.tolist())
        assert all(token % 2 for token in by_heads("linear", [3, 3], odd_only).tokens[1:])
        assert len(by_heads(random_heads("linear", DRAFT_VOCABULARY), [3, 3], odd_only)) == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_step_drafts_from_the_state_of_its_own_text(self, kind: str):
        target, sample = tiny_target(), sampler(temperature=0.9)
        trees: dict[int, DraftTree] = {}

        class Recording(HeadsDrafter):
            def propose(self, tree: DraftTree, history: History) -> None:
                super().propose(tree, history)
                trees[len(history)] = tree

        drafter = Recording(target, sample, ready_heads(kind), [3, 2, 2], None)
        done = run(target, Planner([[drafter]]), sample, PROMPT, 60)
        assert sum(event.num_accepted for event in done.events) > 5
        text = PROMPT + done.token_ids
        full = {length: tree for length, tree in trees.items() if len(tree) == 1 + 3 + 6 + 12}
        assert len(full) > 20
        for length, tree in list(full.items())[::4]:
            SlowHeads(random_heads(kind), text[:length], 0.9).check(tree, [3, 2, 2])

    def test_a_prompt_of_one_token_has_no_state(self):
        target, sample = tiny_target(), sampler()
        drafter = HeadsDrafter(target, sample, ready_heads("recurrent"), [2, 2], None)
        planner = Planner([[drafter]])
        done = run(target, planner, sample, [5], 40)
        assert done.same_bits(run(target, ar_planner(target), sampler(), [5], 40))
        assert [event.draft_depth for event in done.events[:2]] == [0, 2]


def test_the_draft_vocabulary_goes_where_the_heads_go():
    model = tiny_model().to("meta")  # stands for any other device
    ready = ReadyHeads(
        random_heads("recurrent", DRAFT_VOCABULARY),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    )
    assert next(ready.heads.parameters()).device.type == "meta"
    assert ready.vocabulary is not None
    assert ready.vocabulary.device.type == "meta"


@pytest.mark.skipif(KERNELS is None, reason="this machine cannot build the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_the_native_step_is_that_of_the_heads(num_rows: int, dtype: torch.dtype):
    torch.manual_seed(4)
    heads = new_heads("recurrent", 64, 3, 1e-5, vocabulary=DRAFT_VOCABULARY, width=96)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.2)
    embedding, lm_head = torch.nn.Embedding(VOCAB_SIZE, 64), torch.nn.Linear(64, VOCAB_SIZE, bias=False)
    plain, native = (
        ReadyHeads(copy.deepcopy(heads), embedding.to(dtype), lm_head.to(dtype), kernels)
        for kernels in (None, KERNELS)
    )
    assert native._cell is not None
    token_ids = [(7 * row + 1) % VOCAB_SIZE for row in range(num_rows)]
    with torch.inference_mode():
        states = torch.randn(num_rows, 64).to(dtype)
        expected, actual = (each.step(states, token_ids, 1, tiny_target()) for each in (plain, native))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        # Weights and activations have 8 bits.
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
        assert (a - b).float().square().mean().sqrt() < 0.015 * b.abs().max()


def untrained_heads(kind: str) -> ReadyHeads:
    options = {"width": 32} if kind == "recurrent" else {}
    heads = new_heads(kind, HIDDEN_SIZE, 3, tiny_target().config.rms_norm_eps, **options)
    heads.read_like(tiny_target()._norm)
    return ready_heads(heads)


class TestSelfDrafter:
    def test_the_levels_below_the_first_are_grown_from_the_state_of_the_draft_pass(self):
        # The pass reads the last token of the prompt too, so the heads go on from the candidates.
        tree = draft_pass(ready_heads("recurrent"), [2, 2, 2], sampler(temperature=0.8))
        for base in tree.children(0):
            slow = SlowHeads(random_heads("recurrent"), [*PROMPT, tree.tokens[base]], 0.8)
            for node in (base, *tree.children(base)):
                path = [tree.tokens[step] for step in tree.path(node)[2:]]
                assert tokens_below(tree, node) == [token for token, _ in slow.nearest(path)[:2]]

    def test_a_beam_holds_below_the_first_level(self):
        target = tiny_target()
        partial = PartialCache(target.cache_shape, budget=100, num_sinks=2)
        drafter = SelfDrafter(target, sampler(), partial, ready_heads("linear"), [2, 3, 3, 3], beam=2)
        tree = drafted_by(drafter)
        assert len(tree) == 1 + 2 + 2 * 3 + 2 * 3 + 2 * 3

    def test_the_shape_of_the_paper_gives_a_full_tree(self):
        tree = draft_pass(ready_heads("linear"), [1, 3, 3, 3], sampler())
        assert len(tree) == 1 + 1 + 3 + 9 + 27
        for node in range(len(tree)):
            assert len(tree.children(node)) == ([1, 3, 3, 3, 0][tree.depths[node]])
            chances = [tree.chances[child] for child in tree.children(node)]
            assert chances == sorted(chances, reverse=True)
            assert sum(chances) < 1
            if node:
                assert tree.sources[node] == ("base" if tree.depths[node] == 1 else "heads")

    def test_without_heads_only_the_first_level_is_drafted(self):
        tree = draft_pass(None, [2, 3, 3, 3], sampler())
        assert (len(tree), tree.depth, tree.sources) == (3, 1, ["root", "base", "base"])
        assert 1 > tree.chances[1] > tree.chances[2] > 0

    def test_levels_beyond_the_heads_are_left_out(self):
        assert draft_pass(ready_heads("linear"), [1, 1, 1, 1, 2, 2], sampler()).depth == 4

    def test_levels_beyond_the_block_are_left_out(self):
        heads = ready_heads("linear")
        assert len(draft_pass(heads, [1, 3, 3, 3], sampler(), max_depth=2)) == 1 + 1 + 3
        assert len(draft_pass(heads, [1, 3, 3, 3], sampler(), max_depth=0)) == 1

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_passes_in_a_chain_draft_what_the_target_writes_if_the_partial_cache_holds_all(
        self, temperature: float
    ):
        target, sample = tiny_target(), sampler(temperature=temperature, theta=1.3)
        expected = run(target, ar_planner(target), sample, PROMPT, MAX_PASSES).token_ids
        tree = self.chained(sample, Priced(1e-9))
        firsts = [tree.children(0)[0]]
        while len(firsts) < MAX_PASSES:
            firsts.append(tree.children(firsts[-1])[0])
        assert [tree.tokens[node] for node in firsts] == expected
        assert {tree.sources[node] for node in firsts} == {"base"}
        assert len(tree) == 1 + 2 * MAX_PASSES  # two candidates a pass

    def test_the_heads_go_on_from_the_last_pass(self):
        tree = self.chained(sampler(temperature=0.8), Priced(1e-9), ready_heads("recurrent"))
        sources = {(tree.depths[node], tree.sources[node]) for node in range(1, len(tree))}
        passes = {(depth, "base") for depth in range(1, MAX_PASSES + 1)}
        assert sources == passes | {(MAX_PASSES + depth, "heads") for depth in (1, 2)}

    def test_a_pass_that_costs_more_than_it_promises_is_not_made(self):
        assert self.chained(sampler(), None).depth == 1
        assert self.chained(sampler(), Priced(1e9)).depth == 1
        # What it promises is the chance of the candidate times how often one of a pass is right.
        chance = self.chained(sampler(), Priced(1e9)).chances[1]
        prior = self_draft.PRIOR
        promised = chance * (prior.hit + self.moved(chance))
        for price, is_deep in ((0.98 * promised, True), (1.02 * promised, False)):
            assert (self.chained(sampler(), Priced(price / prior.share)).depth > 1) is is_deep

    def moved(self, chance: float) -> float:
        """What the first candidate adds to the hit rate."""
        estimates = Priced(1.0)
        level = estimates.level("base", self_draft.PRIOR)
        before = level.hit
        level.observe(1.0, chance)
        return level.hit - before

    def test_a_chain_of_passes_ends_with_the_block(self, monkeypatch: pytest.MonkeyPatch):
        assert self.chained(sampler(), Priced(1e-9), max_depth=3).depth == 3
        target, forward, num_passes = tiny_target(), tiny_target().forward, 0

        def counting(*args: object, **options: object) -> object:
            nonlocal num_passes
            num_passes += isinstance(args[2], PartialCache)
            return forward(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(target, "forward", counting)
        self.chained(sampler(), Priced(1e-9), max_depth=3)
        assert num_passes == 3

    def test_a_chain_of_passes_may_be_longer_than_a_pass(self):
        small = tiny_target().with_pass_sizes((2, 4))
        assert self.chained(sampler(), Priced(1e-9), target=small).depth == MAX_PASSES

    def chained(
        self,
        sample: Sampler,
        estimates: Estimates | None,
        heads: ReadyHeads | None = None,
        max_depth: int = 20,
        target: Target | None = None,
    ) -> DraftTree:
        target = target or tiny_target()
        partial = PartialCache(target.cache_shape, budget=100, num_sinks=2)
        drafter = SelfDrafter(target, sample, partial, heads, [2, 2, 2], estimates=estimates)
        return drafted_by(drafter, max_depth)

    def test_no_draft_pass_is_made_where_nothing_may_be_drafted(self, monkeypatch: pytest.MonkeyPatch):
        target = tiny_target()
        drafter = SelfDrafter(target, sampler(), PartialCache(target.cache_shape, 100, 2), None, [1])
        monkeypatch.setattr(target, "forward", lambda *_: pytest.fail("a pass was made"))
        drafter.propose(DraftTree(5, max_depth=0), History(1))

    def test_tokens_that_cannot_occur_are_not_drafted(self):
        assert len(draft_pass(None, [3], sampler(top_k=2))) == 3

    @pytest.mark.parametrize("kind", KINDS)
    def test_untrained_heads_predict_what_the_base_predicts(self, kind: str):
        tree = draft_pass(untrained_heads(kind), [3, 3, 3, 3], sampler(temperature=0.0))
        best = [tree.tokens[node] for node in tree.children(0)]
        assert len(set(best)) == 3
        for node in range(len(tree)):
            if tree.depths[node] < 4:
                assert tokens_below(tree, node) == best

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_level_is_drafted_with_the_noise_of_its_own_position(self, kind: str):
        # The same logits at every level, so only the noise differs: sample each level again by hand.
        tree = draft_pass(untrained_heads(kind), [1, 1, 1, 1], sampler(temperature=1.0))
        target = tiny_target()
        cache = new_cache(target, len(PROMPT))
        target.prefill(PROMPT[:-1], cache)
        hidden = target.forward(DraftTree(PROMPT[-1], 0), len(PROMPT) - 1, cache).hidden
        logits = target.logits(hidden).expand(4, -1).clone()
        positions = len(PROMPT) + torch.arange(4)
        expected = sampler(temperature=1.0).pick(logits, positions, torch.zeros(4, 1, dtype=torch.int64))
        assert tree.tokens[1:] == expected
        assert len(set(expected)) > 1

    def test_a_partial_cache_that_holds_everything_drafts_what_the_target_picks(self):
        target, sample = tiny_target(), sampler(temperature=1.0, theta=1.2, W=30)
        partial = PartialCache(target.cache_shape, budget=1000, num_sinks=4)
        drafter = SelfDrafter(target, sample, partial, None, [1])
        planner = Planner([[drafter]])
        actual = run(target, planner, sample, PROMPT, 200)
        expected = run(target, ar_planner(target), sampler(temperature=1.0, theta=1.2, W=30), PROMPT, 200)
        assert actual.token_ids == expected.token_ids
        assert len(set(actual.token_ids)) > 20
        depths = sum(event.draft_depth for event in actual.events)
        assert depths > 90  # two tokens a step
        assert sum(event.num_accepted for event in actual.events) >= depths - 1  # a rounding may flip one

    def test_the_partial_cache_follows_the_text(self):
        target, sample = tiny_target(), sampler()
        partial = PartialCache(target.cache_shape, budget=1000, num_sinks=4)
        drafter = SelfDrafter(target, sample, partial, None, [1])
        planner = Planner([[drafter]])
        done = run(target, planner, sample, PROMPT, 30)
        drafter._follow()  # what the last step has added; the next draft pass would have done it
        length = len(PROMPT) + 29  # the last token has no key yet
        assert partial.length == length
        assert torch.equal(partial.keys[:, :, :length], done.cached[0])
        assert torch.equal(partial.values[:, :, :length], done.cached[1])

    def test_a_prompt_of_one_token_has_nothing_to_look_back_at(self):
        target, sample = tiny_target(), sampler()
        partial = PartialCache(target.cache_shape, budget=20, num_sinks=4)
        drafter = SelfDrafter(target, sample, partial, None, [1])
        planner = Planner([[drafter]])
        expected = run(target, ar_planner(target), sampler(), [5], 40)
        assert run(target, planner, sample, [5], 40).same_bits(expected)
