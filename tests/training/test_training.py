"""Training: the loss and its gradients, exact continuation, guards, and judging by replayed decoding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from support.tiny import HIDDEN_SIZE, VOCAB_SIZE, sampler, tiny_model
from swiftgen.heads.modules import DraftHeads, chain_states, new_heads
from swiftgen.system.errors import SwiftgenError
from swiftgen.training import objective as objective_module
from swiftgen.training.base import FrozenBase
from swiftgen.training.judge import _replay, hindsight_noise, judge, widths_for
from swiftgen.training.objective import HeadsObjective, Positions, positions_of
from swiftgen.training.selfwrite import BatchWriter, SelfWriter, openings
from swiftgen.training.states import StateStore
from swiftgen.training.texts import Texts
from swiftgen.training.trainer import Schedule, Trainer

NUM_HEADS = 3
KINDS = [("linear", {}), ("recurrent", {"width": 24})]


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return FrozenBase(tiny_model())


def fresh_heads(base: FrozenBase, kind: str, vocabulary: Tensor | None = None, **options: int) -> DraftHeads:
    torch.manual_seed(5)
    eps = base.config.rms_norm_eps
    heads = new_heads(kind, HIDDEN_SIZE, NUM_HEADS, eps, vocabulary=vocabulary, **options)
    heads.read_like(base.norm)
    return heads


def random_heads(base: FrozenBase, kind: str, vocabulary: Tensor | None = None, **options: int) -> DraftHeads:
    heads = fresh_heads(base, kind, vocabulary, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def some_texts(num_texts: int = 6, num_tokens: int = 40) -> Texts:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB_SIZE, (num_texts, num_tokens), generator=generator, dtype=torch.int32)
    lengths = torch.full((num_texts,), num_tokens)
    lengths[-1] = num_tokens // 2
    return Texts(tokens, lengths, torch.arange(num_texts))


def some_positions(base: FrozenBase) -> Positions:
    texts = some_texts()
    return positions_of(base.states(texts.tokens.long()), texts.tokens.long(), texts.lengths, NUM_HEADS)


class TestPositions:
    def test_every_position_has_its_tokens_and_states(self):
        tokens = torch.arange(20).view(2, 10)
        states = tokens[:, :9, None].expand(-1, -1, 4).float()  # a state is the number of its token
        found = positions_of(states, tokens, torch.tensor([10, 6]), num_heads=2)
        assert found.states[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11, 12]  # 2 + 1 tokens follow each
        assert found.following[0].tolist() == [1, 2, 3]
        assert found.following[-1].tolist() == [13, 14, 15]
        # What head 1 predicts after position 0, token 2, is what the target predicts at token 1.
        assert [found.text_states[found.predicting(depth)[0], 0] for depth in (1, 2)] == [1, 2]

    def test_texts_that_are_too_short_are_an_error(self):
        with pytest.raises(ValueError, match="too short"):
            positions_of(torch.zeros(1, 3, 4), torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]), 3)


class TestObjective:
    @pytest.mark.parametrize(("kind", "options"), KINDS)
    def test_untrained_heads_have_the_loss_of_the_base_itself_at_their_shift(
        self, base: FrozenBase, kind: str, options: dict[str, int]
    ):
        positions = some_positions(base)
        losses = HeadsObjective(base, fresh_heads(base, kind, **options), soft=False).losses(positions)
        logits = base.logits(positions.states)
        for depth in range(1, NUM_HEADS + 1):
            expected = cross_entropy(logits, positions.following[:, depth])
            torch.testing.assert_close(losses[depth - 1], expected)

    @pytest.mark.parametrize("soft", [False, True])
    @pytest.mark.parametrize(("kind", "options"), KINDS)
    def test_gradients_are_those_of_the_whole_loss_however_it_is_chunked(
        self,
        base: FrozenBase,
        kind: str,
        options: dict[str, int],
        soft: bool,
        monkeypatch: pytest.MonkeyPatch,
    ):
        monkeypatch.setattr(objective_module, "CHUNK_ROWS", 7)
        vocabulary = torch.arange(0, VOCAB_SIZE, 2)
        positions = some_positions(base)
        heads = random_heads(base, kind, vocabulary, **options)
        losses, _ = HeadsObjective(base, heads, soft).backward(positions)
        actual = [parameter.grad.clone() for parameter in heads.parameters()]

        heads.zero_grad()
        weight = base.lm_head.weight[vocabulary]
        embedded = [base.embedding(positions.following[:, depth]) for depth in range(NUM_HEADS)]
        total = torch.zeros(())
        for depth, output in enumerate(chain_states(heads, positions.states, embedded), start=1):
            log_p = log_softmax(output @ weight.T, dim=-1)
            wanted = positions.following[:, depth]
            if soft:
                p = torch.softmax(
                    base.logits(positions.text_states[positions.predicting(depth)])[:, vocabulary], dim=-1
                )
                loss = -(p * log_p).sum() / len(positions)
            else:
                inside = wanted % 2 == 0
                loss = -log_p[inside, wanted[inside] // 2].sum() / len(positions)
            torch.testing.assert_close(losses[depth - 1], loss.detach())
            total = total + loss
        total.backward()
        for gradient, parameter in zip(actual, heads.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)

    def test_gradients_reach_every_linear_head(self, base: FrozenBase):
        heads = fresh_heads(base, "linear")
        HeadsObjective(base, heads, soft=False).backward(some_positions(base))
        for name, parameter in heads.named_parameters():
            # W is zero at first, so its own norm cannot matter yet; all else must.
            assert name.endswith("input_layernorm.weight") or parameter.grad.abs().max() > 0, name

    def test_top_1_counts_what_the_head_would_say(self, base: FrozenBase):
        positions = some_positions(base)
        _, top1 = HeadsObjective(base, fresh_heads(base, "linear"), soft=False).backward(positions)
        said = base.logits(positions.states).argmax(dim=-1)
        for depth in range(1, NUM_HEADS + 1):
            assert top1[depth - 1] == (said == positions.following[:, depth]).float().mean()


def trainer(base: FrozenBase, kind: str = "recurrent", **settings: object) -> Trainer:
    texts = some_texts()
    options = {"width": 24} if kind == "recurrent" else {}
    schedule = Schedule(
        **{"num_steps": 12, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 3, **settings}
    )
    heads = fresh_heads(base, kind, **options)
    return Trainer(base, heads, texts, StateStore(base, texts, None), torch.arange(5), schedule)


class TestTrainer:
    @pytest.mark.parametrize("kind", ["linear", "recurrent"])
    def test_training_lowers_the_loss(self, base: FrozenBase, kind: str):
        reports = list(trainer(base, kind, num_steps=60).run())
        assert [report.step for report in reports] == list(range(1, 61))
        assert sum(reports[-1].losses) < 0.9 * sum(reports[0].losses)

    @pytest.mark.parametrize("stop", [1, 5, 11])
    def test_a_run_that_is_continued_ends_with_the_same_weights(
        self, base: FrozenBase, tmp_path: Path, stop: int
    ):
        whole = trainer(base)
        expected = list(whole.run())
        first = trainer(base)
        for _, _ in zip(range(stop), first.run(), strict=False):
            pass
        first.save(tmp_path / "checkpoint")
        second = trainer(base)
        second.restore(tmp_path / "checkpoint")
        assert list(second.run()) == expected[stop:]
        for name, tensor in whole.heads.state_dict().items():
            assert torch.equal(second.heads.state_dict()[name], tensor), name

    def test_every_epoch_sees_every_sequence_once_in_an_order_of_its_own(self, base: FrozenBase):
        run = trainer(base, batch_size=2)
        seen = []
        for run.step in range(10):
            seen += run._batch().tolist()
        epochs = [seen[i : i + 5] for i in range(0, 20, 5)]
        assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1

    def test_several_processes_share_a_batch(self, base: FrozenBase):
        class Process:
            num_processes = 2

            def __init__(self, index: int) -> None:
                self.process_index = index

        parts = []
        for index in range(2):
            run = trainer(base)
            run._processes = Process(index)  # type: ignore[assignment]
            parts.append(run._batch().tolist())
        assert sorted(parts[0] + parts[1]) == sorted(trainer(base)._batch().tolist())

    def test_the_rate_warms_up_and_falls_along_a_cosine(self):
        schedule = Schedule(num_steps=110, learning_rate=1.0, warmup_steps=10)
        assert [schedule.rate(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
        assert schedule.rate(60) == pytest.approx(0.5)
        assert schedule.rate(109) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))

    def test_a_loss_that_is_no_number_stops_with_advice_and_changes_nothing(self, base: FrozenBase):
        run = trainer(base)
        with torch.no_grad():
            next(run.heads.parameters())[0] = math.nan
        before = {name: tensor.clone() for name, tensor in run.heads.state_dict().items()}
        with pytest.raises(SwiftgenError, match="not a number in step 1") as caught:
            next(run.run())
        assert "--learning-rate" in caught.value.hint
        for name, tensor in run.heads.state_dict().items():
            assert torch.equal(tensor, before[name]) or tensor.isnan().any()

    def test_checkpoints_of_other_settings_and_damaged_ones_are_refused(
        self, base: FrozenBase, tmp_path: Path
    ):
        file = tmp_path / "checkpoint"
        run = trainer(base)
        next(run.run())
        run.save(file)
        with pytest.raises(SwiftgenError, match="other settings"):
            trainer(base, seed=9).restore(file)
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(SwiftgenError, match="damaged"):
            trainer(base).restore(file)

    def test_a_save_that_fails_leaves_the_checkpoint_before_it(
        self, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        file = tmp_path / "checkpoint"
        run = trainer(base)
        next(run.run())
        run.save(file)
        before = file.read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("swiftgen.training.trainer.save_file", full)
        with pytest.raises(OSError, match="No space"):
            run.save(file)
        assert file.read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


class TestStates:
    def test_kept_states_are_those_of_the_model_and_are_computed_once(
        self, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        texts = some_texts()
        expected = StateStore(base, texts, None).get(torch.tensor([3, 1]))
        assert torch.equal(
            StateStore(base, texts, tmp_path / "states.bin").get(torch.tensor([3, 1])), expected
        )
        again = StateStore(base, texts, tmp_path / "states.bin")
        monkeypatch.setattr(base, "states", lambda *_: pytest.fail("the model was run again"))
        assert torch.equal(again.get(torch.tensor([3, 1])), expected)


class TestSelfWriting:
    def test_a_batch_writes_what_each_sequence_would_alone(self, base: FrozenBase):
        prompts = [[5, 17, 3], [8], list(range(10, 30))]
        sample = sampler(temperature=0.8, theta=1.2, W=7, min_p=0.02)
        batch = BatchWriter(base, sample, prompts, 60)
        assert list(batch) == list(range(2, 61))
        states = base.states(batch.tokens)
        torch.testing.assert_close(batch.states, states[:, :-1].to(torch.bfloat16), rtol=0.02, atol=0.06)
        for row, prompt in enumerate(prompts):
            text = batch.tokens[row].tolist()
            assert text[: len(prompt)] == prompt
            for position in range(len(prompt), 60):
                window = torch.tensor([text[max(0, position - 7) : position]])
                logits = base.logits(states[row, position - 1 : position])
                noise_position = torch.tensor([(row << 32) + position])
                assert sample.pick(logits, noise_position, window) == [text[position]]

    def test_sequences_with_the_same_prompt_differ(self, base: FrozenBase):
        batch = BatchWriter(base, sampler(), [[5]] * 4, 30)
        list(batch)
        assert len({tuple(row) for row in batch.tokens.tolist()}) == 4

    def test_texts_that_were_stopped_go_on_where_they_were(self, base: FrozenBase, tmp_path: Path):
        prompts = [[i + 1] for i in range(7)]

        def writer(folder: Path) -> SelfWriter:
            folder.mkdir(exist_ok=True)
            return SelfWriter(folder, prompts, 20, lambda seed: sampler(seed), seed=4)

        whole = writer(tmp_path / "a")
        no_store = StateStore(base, whole.texts, None)
        done = list(whole.write(base, no_store, 3))
        assert done[-1] == 7 * 20
        assert done == sorted(done)
        stopped = writer(tmp_path / "b")
        for number in stopped.write(base, no_store, 3):
            if number > 70:  # in the second batch
                break
        del stopped
        again = writer(tmp_path / "b")
        assert next(again.write(base, no_store, 3)) > 60  # the first batch is not written again
        list(again.write(base, no_store, 3))
        assert torch.equal(again.texts.tokens, whole.texts.tokens)
        SelfWriter.clean_up(tmp_path / "b")
        assert not list((tmp_path / "b").iterdir())

    def test_openings_are_many_and_their_order_is_fixed_by_the_seed(self):
        asked = openings(1)
        assert len(set(asked)) == len(asked) > 1000
        assert asked == openings(1) != openings(2)
        assert set(asked) == set(openings(2))


class TestJudging:
    def test_hindsight_noise_makes_the_given_token_win(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(50, 30, generator=generator)
        tokens = torch.randint(30, (50,), generator=generator)
        noise = hindsight_noise(logits, tokens, generator)
        assert (logits + noise).argmax(dim=-1).tolist() == tokens.tolist()

    def test_hindsight_noise_is_gumbel_noise_when_tokens_are_drawn(self):
        # Tokens from the softmax, noise in hindsight: together that is plain Gumbel noise.
        generator = torch.Generator().manual_seed(1)
        logits = torch.tensor([1.0, 0.0, -2.0, -math.inf]).expand(40_000, -1)
        tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)[:, 0]
        noise = hindsight_noise(logits, tokens, generator)
        for column in range(4):
            uniform = torch.exp(-torch.exp(-noise[:, column])).sort().values  # its distribution function
            distance = (uniform - (torch.arange(40_000) + 0.5) / 40_000).abs().max()
            assert distance < 1.63 / math.sqrt(40_000)  # Kolmogorov-Smirnov, 1 %
        assert torch.corrcoef(noise.T)[0, 1].abs() < 0.02

    def test_replayed_steps_by_hand(self):
        # Ranks of two heads at six positions; trees of one candidate, then two.
        ranks = torch.tensor([[0, 1, 0, 0, 0, 5], [1, 0, 2, 0, 0, 0]])
        # position 0: both accepted, 3 tokens; 3: both, 3 tokens; then the end
        assert _replay(ranks, [1, 2]) == (2, 6)
        # one candidate each: 0 accepts one (2 tokens); 2 accepts one; 4 both
        assert _replay(ranks, [1, 1]) == (3, 7)

    def test_widths_begin_below_the_first_level_of_the_tree(self):
        assert widths_for([1, 3, 3, 3], 3) == [3, 3, 3]
        assert widths_for([1, 4, 2], 4) == [4, 2, 2, 2]
        assert widths_for([5], 2) == [5, 5]

    @pytest.mark.parametrize("vocabulary", [None, torch.arange(0, VOCAB_SIZE, 3)])
    def test_figures_agree_with_counting_by_hand(self, base: FrozenBase, vocabulary: Tensor | None):
        texts = some_texts()
        heads = random_heads(base, "recurrent", vocabulary, width=24)
        store = StateStore(base, texts, None)
        found = judge(base, heads, texts, store, torch.arange(6), sampler(theta=1.1), [2, 2, 2])
        ids = list(range(VOCAB_SIZE)) if vocabulary is None else vocabulary.tolist()
        hits = {(n, d): 0 for n in (1, 3, 5) for d in range(NUM_HEADS)}
        total = 0
        for index in range(6):
            length = int(texts.lengths[index])
            text = texts.tokens[index, :length].tolist()
            states = store.get(torch.tensor([index]))[0].float()
            for position in range(length - 1 - NUM_HEADS):
                total += 1
                state = states[position]
                for depth in range(1, NUM_HEADS + 1):
                    state = heads.advance(state, base.embedding.weight[text[position + depth]], depth)
                    logits = heads.output(state, depth) @ base.lm_head.weight[ids].T
                    best = [ids[i] for i in logits.topk(5).indices.tolist()]
                    for n in (1, 3, 5):
                        hits[n, depth - 1] += text[position + 1 + depth] in best[:n]
        assert found.num_positions == total
        for (n, depth), count in hits.items():
            assert found.top[n][depth] == pytest.approx(count / total, abs=2 / total)

    def test_heads_that_know_the_target_are_accepted(self, base: FrozenBase, monkeypatch: pytest.MonkeyPatch):
        # Instead of heads, the target's own next states: every draft is what the target picks.
        sample = sampler(temperature=0.9, theta=1.2, W=9)
        batch = BatchWriter(base, sample, [[3], [4]], 50)
        list(batch)
        texts = Texts(batch.tokens.to(torch.int32), torch.tensor([50, 50]), torch.arange(2))
        heads = fresh_heads(base, "recurrent", width=8)

        def know(self: HeadsObjective, positions: Positions) -> list[Tensor]:
            return [base.norm(positions.text_states[positions.predicting(d)].float()) for d in (1, 2, 3)]

        monkeypatch.setattr(HeadsObjective, "outputs", know)
        found = judge(base, heads, texts, StateStore(base, texts, None), torch.arange(2), sample, [1, 1, 1])
        assert min(found.drafted[1]) > 0.97  # states are kept in bfloat16
        assert found.tokens_per_step > 3.8
