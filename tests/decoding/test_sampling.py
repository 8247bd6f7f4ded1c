"""The penalty, the processors, and that picks follow the distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.sampling import VOCAB_SIZE, chi_square_limit, random_history, random_tree
from support.tiny import sampler
from swiftgen.decoding import sampling
from swiftgen.decoding.noise import keyed_gumbel
from swiftgen.decoding.sampling import NEG_INF, Sampler, penalise
from swiftgen.forward.tree import DraftTree
from swiftgen.native.build import kernels_for
from swiftgen.settings.schema import SamplerSettings

NO_WINDOW = torch.zeros(1, 1, dtype=torch.int64)


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, vocab_size, generator=generator)


class TestPenalty:
    def test_a_seen_token_loses_once_whatever_its_sign(self):
        logits = torch.tensor([[3.0, -3.0, 0.0, 4.0, -4.0]])
        penalise(logits, torch.tensor([[0, 1, 0, 0, 2]]), theta=1.5)
        assert logits.tolist() == [[2.0, -4.5, 0.0, 4.0, -4.0]]

    def test_every_row_has_its_own_window(self):
        logits = torch.tensor([[3.0, 3.0], [3.0, 3.0]])
        penalise(logits, torch.tensor([[0, 0], [1, 1]]), theta=3.0)
        assert logits.tolist() == [[1.0, 3.0], [3.0, 1.0]]

    @pytest.mark.parametrize("W", [1, 2, 3, 7, 20, 100])
    def test_it_equals_a_slow_reference_at_every_node_of_a_tree(self, W: int):
        rng = random.Random(W)
        for seed in range(10):
            text = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 30]))]
            history, tree = random_history(text), random_tree(seed, text[-1])
            logits = random_logits(len(tree), seed)
            expected = logits.clone()
            for node in range(len(tree)):
                seen = [*text, *(tree.tokens[step] for step in tree.path(node)[1:])][-W:]
                for token in set(seen):
                    before = expected[node, token].item()
                    expected[node, token] = before / 1.3 if before > 0 else before * 1.3
            processed = sampler(W=W, theta=1.3).process(logits, history.windows(tree, W))
            torch.testing.assert_close(processed, expected, rtol=1e-6, atol=0)

    def test_theta_one_is_off(self):
        logits = random_logits(1)
        processed = sampler(W=8, theta=1.0).process(logits.clone(), torch.tensor([[0, 1, 2]]))
        assert torch.equal(processed, logits)

    def test_W_zero_is_off(self):
        history, tree = random_history([1, 2, 3]), DraftTree(3, 0)
        logits = random_logits(1)
        penalised = sampler(W=0, theta=2.0)
        assert torch.equal(penalised.process(logits.clone(), history.windows(tree, 0)), logits)


Settings = dict[str, float]
FILTERS: dict[str, Settings] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": VOCAB_SIZE + 5},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 0.01},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "eta": {"eta": 0.02},
    "large eta": {"eta": 0.5},
    "temperature and top_p": {"temperature": 1.7, "top_p": 0.7},
    "top_k and top_p": {"top_k": 12, "top_p": 0.6},
    "top_k and eta": {"top_k": 30, "eta": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "eta": 0.01},
}


def transformers_processors(
    settings: Settings, theta: float, suppressed: list[int], keep: int
) -> LogitsProcessorList:
    """As `generate` builds them: penalty, suppression, temperature, top-k, top-p, min-p, eta."""
    processors = LogitsProcessorList()
    if theta != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(theta))
    if suppressed:
        processors.append(SuppressTokensLogitsProcessor(suppressed, device="cpu"))
    if "temperature" in settings:
        processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(int(settings["top_k"]), min_tokens_to_keep=keep))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"], min_tokens_to_keep=keep))
    if "min_p" in settings:
        processors.append(MinPLogitsWarper(settings["min_p"], min_tokens_to_keep=keep))
    if "eta" in settings:
        processors.append(EtaLogitsWarper(settings["eta"], min_tokens_to_keep=keep))
    return processors


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalised"])
@pytest.mark.parametrize("name", FILTERS)
def test_processors_equal_those_of_transformers(name: str, penalised: bool, keep: int):
    settings, theta = FILTERS[name], 1.4 if penalised else 1.0
    suppressed = [5, 11] if penalised else []
    windows = torch.randint(VOCAB_SIZE, (50, 9), generator=torch.Generator().manual_seed(1))
    logits = random_logits(50)
    processors = transformers_processors(settings, theta, suppressed, keep)
    expected = processors(windows, logits.clone())
    ours = Sampler(SamplerSettings(**settings, min_tokens_to_keep=keep), 0, 9, theta, suppressed)
    actual = ours.process(logits.clone(), windows)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    if name != "temperature" and "above" not in name:
        assert (actual == -math.inf).sum() > 50 * len(suppressed)


@pytest.mark.parametrize("filters", [{"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 2}, {"eta": 0.5}])
def test_at_least_as_many_as_there_are_is_all_of_them(filters: Settings):
    for keep in (VOCAB_SIZE, VOCAB_SIZE + 1, 10**30):
        settings = SamplerSettings(**filters, min_tokens_to_keep=keep)
        processed = Sampler(settings, 0, 0, 1.0, {3}).process(random_logits(4), torch.zeros(4, 0).long())
        assert torch.equal(processed > NEG_INF, torch.arange(VOCAB_SIZE).expand(4, -1) != 3)


def test_the_picks_of_many_rows_are_those_of_each():
    num_rows = 2 * sampling._PICKED_ROWS + 7
    logits, positions = random_logits(num_rows), torch.arange(num_rows)
    windows = torch.randint(VOCAB_SIZE, (num_rows, 5), generator=torch.Generator().manual_seed(0))
    ours = Sampler(SamplerSettings(min_p=0.05), 7, 5, 1.2)
    each = [
        ours.pick(logits[row : row + 1].clone(), positions[row : row + 1], windows[row : row + 1])[0]
        for row in range(num_rows)
    ]
    assert ours.pick(logits.clone(), positions, windows) == each


def test_top_p_reaches_beyond_its_shortlist_in_a_flat_distribution():
    logits = random_logits(3, vocab_size=4000) / 100
    expected = TopPLogitsWarper(0.9)(NO_WINDOW, logits.clone())
    actual = sampler(top_p=0.9).process(logits.clone(), NO_WINDOW)
    kept = (actual > -math.inf).sum(dim=-1)
    assert (kept > 3000).all()
    # The sums of 4,000 float32 probabilities differ in the last digits: one token more or less.
    assert ((expected > -math.inf).sum(dim=-1) - kept).abs().max() <= 1


def dense_scores(ours: Sampler, logits: Tensor, positions: Tensor, windows: Tensor) -> Tensor:
    """Scores of the whole vocabulary; tokens that were left out cannot occur."""
    dense = torch.full(logits.shape, -math.inf, dtype=torch.float64)
    scores, ids = ours.scores(logits, positions, windows)
    dense[:, ids] = scores
    return dense


class TestPicks:
    def test_a_greedy_tie_goes_to_the_lowest_id(self):
        logits = torch.zeros(2, 1000)
        logits[0, [7, 400, 999]] = 1.0
        logits[1, [1, 2]] = 1.0
        picks = sampler(temperature=0.0).pick(logits, torch.tensor([1, 1]), NO_WINDOW.expand(2, -1))
        assert picks == [7, 1]

    @pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
    def test_suppressed_tokens_are_never_picked_or_ranked(self, temperature: float):
        ours = Sampler(SamplerSettings(temperature=temperature), 1, 0, 1.0, suppressed=[0, 3, 4])
        logits = torch.zeros(200, 6)
        logits[:, 3] = 20.0
        positions, windows = torch.arange(200), NO_WINDOW.expand(200, -1)
        picks = ours.pick(logits.clone(), positions, windows)
        assert set(picks) == ({1} if temperature == 0 else {1, 2, 5})
        for candidates in ours.rank(logits.clone(), positions, windows, width=6):
            assert sorted(token for token, _ in candidates) == [1, 2, 5]

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 3.7])
    @pytest.mark.parametrize("min_p", [1e-4, 0.1, 1.0])
    def test_leaving_out_what_min_p_filters_changes_no_score(
        self, min_p: float, temperature: float, scale: float
    ):
        ours = sampler(W=6, theta=1.2, min_p=min_p, temperature=temperature, top_k=7)
        logits, positions = random_logits(40) * scale, torch.arange(40)
        windows = torch.randint(VOCAB_SIZE, (40, 6), generator=torch.Generator().manual_seed(2))
        processed = ours.process(logits.clone(), windows)
        noise = keyed_gumbel(ours.seed, positions[:, None], torch.arange(VOCAB_SIZE)[None])
        assert torch.equal(dense_scores(ours, logits.clone(), positions, windows), processed.double() + noise)

    def test_drafts_that_are_no_numbers_are_ranked_too(self):
        logits = torch.full((1, VOCAB_SIZE), math.nan)
        ours = sampler(W=6, theta=1.2, min_p=0.1)
        assert len(ours.rank(logits, torch.tensor([4]), NO_WINDOW, width=3)) == 1

    @pytest.mark.parametrize("settings", [*FILTERS.values(), {"temperature": 0.0}])
    def test_a_row_does_not_depend_on_the_others(self, settings: Settings):
        windows = torch.randint(VOCAB_SIZE, (40, 6), generator=torch.Generator().manual_seed(2))
        positions = torch.arange(40) // 3
        ours = sampler(W=6, theta=1.2, **settings)
        together = dense_scores(ours, random_logits(40), positions, windows)
        for row in range(40):
            one = slice(row, row + 1)
            alone = dense_scores(ours, random_logits(40)[one], positions[one], windows[one])
            assert torch.equal(alone[0], together[row])

    def test_a_pick_depends_on_seed_and_position_but_not_on_the_row(self):
        logits, positions = torch.zeros(30, VOCAB_SIZE), torch.arange(30) % 10
        picks = sampler(seed=4).pick(logits.clone(), positions, NO_WINDOW.expand(30, -1))
        assert picks[:10] == picks[10:20] == picks[20:]
        assert len(set(picks[:10])) > 5
        assert picks != sampler(seed=5).pick(logits.clone(), positions, NO_WINDOW.expand(30, -1))

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_the_first_ranked_token_is_the_picked_one(self, temperature: float):
        ours = sampler(temperature=temperature, min_p=0.05)
        positions, windows = torch.arange(50), NO_WINDOW.expand(50, -1)
        ranked = ours.rank(random_logits(50), positions, windows, width=4)
        firsts = [candidates[0].token for candidates in ranked]
        assert firsts == ours.pick(random_logits(50), positions, windows)
        dense = dense_scores(ours, random_logits(50), positions, windows)
        for candidates, scores in zip(ranked, dense, strict=True):
            possible = int((scores > -math.inf).sum())
            best = sorted(range(VOCAB_SIZE), key=lambda token: -scores[token].item())
            assert [token for token, _ in candidates] == best[: min(4, possible)]

    @pytest.mark.parametrize(
        "settings", [{"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9}], ids=["plain", "top_p"]
    )
    def test_picks_over_many_seeds_follow_the_distribution(self, settings: Settings):
        num_seeds = 10_000
        logits = random_logits(1, seed=3, vocab_size=12) / 2
        wide = logits[0].double() / settings["temperature"]
        if "top_p" in settings:
            order = wide.softmax(0).argsort(descending=True).tolist()
            mass, kept = 0.0, []
            while mass < settings["top_p"]:
                kept.append(order.pop(0))
                mass += wide.softmax(0)[kept[-1]].item()
            wide[order] = -math.inf
        expected = wide.softmax(0) * num_seeds
        ours, counts = sampler(**settings), torch.zeros(12)
        for seed in range(num_seeds):
            ours.seed = seed
            counts[ours.pick(logits.clone(), torch.tensor([17]), NO_WINDOW)[0]] += 1
        possible = expected > 0
        assert expected[possible].min() > 5
        assert counts[~possible].sum() == 0
        chi_square = ((counts - expected) ** 2 / expected)[possible].sum().item()
        assert chi_square < chi_square_limit(int(possible.sum()) - 1)


class TestConfidence:
    """A draft's share among the candidates that come nearest, by hand."""

    def ranked(self, weights: list[float], width: int, **settings: float) -> list[tuple[int, float]]:
        logits = torch.tensor([weights]).log()
        (candidates,) = sampler(temperature=0.0, **settings).rank(logits, torch.tensor([4]), NO_WINDOW, width)
        return [(candidate.token, pytest.approx(candidate.confidence)) for candidate in candidates]

    def test_it_is_the_share_of_all_where_there_are_few(self):
        assert self.ranked([1, 8, 2, 4, 1], width=2) == [(1, 8 / 16), (3, 4 / 16)]

    def test_only_the_nearest_eight_count(self):
        weights = [16.0, 8, 2, 1, 1, 1, 1, 1, 0.5, 0.5]  # 31 in the first eight
        assert self.ranked(weights, width=2) == [(0, 16 / 31), (1, 8 / 31)]

    def test_more_than_eight_count_if_more_are_asked_for(self):
        confidences = [confidence for _, confidence in self.ranked([3.0] + [1.0] * 11, width=10)]
        assert confidences == [3 / 12] + [1 / 12] * 9

    def test_the_only_token_that_can_occur_is_certain(self):
        ours = sampler(temperature=1.0, top_k=1)
        (candidates,) = ours.rank(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([4]), NO_WINDOW, 3)
        assert candidates == [(1, 1.0)]

    def test_the_noise_counts(self):
        logits = torch.tensor([[0.3, -0.2, 0.9]])
        noise = keyed_gumbel(3, torch.tensor(4), torch.arange(3))
        weights = [
            math.exp(logit / 0.5 + g) for logit, g in zip(logits[0].tolist(), noise.tolist(), strict=True)
        ]
        (candidates,) = sampler(temperature=0.5).rank(logits.clone(), torch.tensor([4]), NO_WINDOW, 3)
        expected = sorted(
            ((weight / sum(weights), token) for token, weight in enumerate(weights)), reverse=True
        )
        assert [token for token, _ in candidates] == [token for _, token in expected]
        assert [share for _, share in candidates] == pytest.approx([share for share, _ in expected])


class TestRestrictedSampler:
    """Logits over a few tokens and a last column for all others."""

    VOCABULARY = torch.tensor([2, 3, 7, 20, 21, 40, 58])

    def restricted_logits(self, logits: Tensor) -> Tensor:
        others = torch.full((len(logits), 1), 50.0)  # would win if it could be chosen
        return torch.cat([logits[:, self.VOCABULARY], others], dim=1)

    @pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalised"])
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_it_scores_its_tokens_as_the_whole_one_does(self, temperature: float, penalised: bool):
        whole = Sampler(
            SamplerSettings(temperature=temperature), 5, 12, 1.4 if penalised else 1.0, suppressed=[7, 9, 21]
        )
        restricted = whole.restricted_to(self.VOCABULARY, VOCAB_SIZE)
        logits, positions = random_logits(40), torch.arange(40)
        # Windows hold tokens of the vocabulary and, mostly, others; some of them twice.
        windows = torch.randint(VOCAB_SIZE, (40, 12), generator=torch.Generator().manual_seed(1))
        expected = whole.scores(logits.clone(), positions, windows)[0][:, self.VOCABULARY]
        actual, ids = restricted.scores(self.restricted_logits(logits), positions, windows)
        assert ids[:-1].tolist() == self.VOCABULARY.tolist()
        assert torch.equal(actual[:, :-1], expected)
        assert (actual[:, -1] == -math.inf).all()
        assert (actual[:, [2, 4]] == -math.inf).all()  # 7 and 21
        assert (actual[:, [0, 1, 3, 5, 6]] > -math.inf).all()

    def test_the_penalty_reaches_only_the_tokens_of_the_window(self):
        restricted = sampler(W=4, theta=2.0, temperature=0.0).restricted_to(torch.tensor([3, 6, 8]), 10)
        windows = torch.tensor([[1, 6, 9, 6], [0, 1, 2, 4]])
        processed = restricted.process(torch.tensor([[4.0, 4.0, -4.0, 4.0]] * 2), windows)
        assert processed.tolist() == [[4.0, 2.0, -4.0, -math.inf], [4.0, 4.0, -4.0, -math.inf]]

    def test_it_ranks_ids_of_tokens_and_never_the_column_of_the_others(self):
        restricted = sampler(temperature=0.0).restricted_to(torch.tensor([3, 6, 8]), 10)
        logits = torch.tensor([[1.0, 2.0, 4.0, 8.0]]).log()
        (candidates,) = restricted.rank(logits, torch.tensor([4]), NO_WINDOW, width=9)
        assert [token for token, _ in candidates] == [8, 6, 3]
        assert [share for _, share in candidates] == pytest.approx([4 / 7, 2 / 7, 1 / 7])

    @pytest.mark.parametrize("settings", [*FILTERS.values(), {"temperature": 0.0}])
    def test_over_all_tokens_it_ranks_as_the_whole_one_does(self, settings: Settings):
        whole = sampler(W=6, theta=1.2, **settings)
        restricted = whole.restricted_to(torch.arange(VOCAB_SIZE), VOCAB_SIZE)
        windows = torch.randint(VOCAB_SIZE, (30, 6), generator=torch.Generator().manual_seed(2))
        logits, positions = random_logits(30), torch.arange(30)
        expected = whole.rank(logits.clone(), positions, windows, 4)
        wider = torch.cat([logits, torch.full((30, 1), 50.0)], dim=1)
        assert restricted.rank(wider, positions, windows, 4) == expected

    def test_the_whole_sampler_stays_as_it_was(self):
        whole = Sampler(SamplerSettings(temperature=0.0), 5, 4, 2.0, suppressed=[7])
        whole.restricted_to(self.VOCABULARY, VOCAB_SIZE)
        logits = random_logits(1)
        expected = logits.clone()
        expected[0, 7] = -math.inf
        expected[0, 2] = expected[0, 2] / 2 if expected[0, 2] > 0 else expected[0, 2] * 2
        assert torch.equal(whole.process(logits, torch.tensor([[2, 2]])), expected)


KERNELS = kernels_for("auto", torch.device("cpu"), torch.float32, 64)


@pytest.mark.skipif(KERNELS is None, reason="this machine cannot build the native kernels")
class TestNative:
    """What the native kernel does with all of the vocabulary is what PyTorch's operators do."""

    @pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
    @pytest.mark.parametrize("vocab_size", [5, 16, 97, 8193])
    @pytest.mark.parametrize(("W", "theta"), [(0, 1.3), (12, 1.0), (12, 1.3), (500, 1.1)])
    def test_scores_are_the_same(self, num_rows: int, vocab_size: int, W: int, theta: float):
        settings = SamplerSettings(temperature=0.8, min_p=0.05)
        suppressed = range(0, vocab_size, 3)
        native = Sampler(settings, 4, W, theta, suppressed, KERNELS)
        plain = Sampler(settings, 4, W, theta, suppressed)
        logits = random_logits(num_rows, vocab_size, vocab_size)
        logits[0, 1] = 9.0
        generator = torch.Generator().manual_seed(W)
        windows = torch.randint(vocab_size, (num_rows, max(1, W)), generator=generator)  # with repetitions
        positions = torch.arange(num_rows) + 10
        for _ in range(2):  # the second time with what the first has made
            (scores, ids), (expected, expected_ids) = (
                each.scores(logits.clone(), positions, windows) for each in (native, plain)
            )
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(scores, expected, rtol=1e-14, atol=1e-14)  # logarithms differ
            picks = native.pick(logits.clone(), positions, windows)
            assert picks == plain.pick(logits.clone(), positions, windows)
        assert not set(picks) & set(suppressed)

    def test_ranks_over_a_few_tokens_are_the_same(self):
        settings = SamplerSettings(temperature=0.8, min_p=0.05)
        vocabulary = torch.arange(1, 300, 7)
        native, plain = (
            Sampler(settings, 4, 20, 1.3, [8, 15], kernels).restricted_to(vocabulary, 300)
            for kernels in (KERNELS, None)
        )
        logits = random_logits(3, 1, len(vocabulary) + 1)
        logits[:, -1] = 50.0  # of all other tokens: never chosen
        windows = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(1))
        ranked = [each.rank(logits.clone(), torch.arange(3), windows, 4) for each in (native, plain)]
        assert [[c.token for c in row] for row in ranked[0]] == [[c.token for c in row] for row in ranked[1]]
        shares = [[c.confidence for row in each for c in row] for each in ranked]
        assert shares[0] == pytest.approx(shares[1])
        assert all(candidate.token in vocabulary for row in ranked[0] for candidate in row)
        assert not {8, 15} & {candidate.token for row in ranked[0] for candidate in row}

    def test_logits_that_do_not_lie_together(self):
        settings = SamplerSettings(temperature=0.8, min_p=0.05)
        logits = random_logits(VOCAB_SIZE, 2, 4).T
        assert not logits.is_contiguous()
        windows = NO_WINDOW.expand(4, -1)
        native, plain = (
            Sampler(settings, 4, 5, 1.3, [3], kernels).pick(logits.clone(), torch.arange(4), windows)
            for kernels in (KERNELS, None)
        )
        assert native == plain
