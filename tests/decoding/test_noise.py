"""Keyed noise: it is Gumbel noise, and depends on seed, position and token alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.sampling import chi_square_limit
from swiftgen.decoding import noise as hashing
from swiftgen.decoding.noise import keyed_gumbel


def grid(seed: int, num_positions: int, num_tokens: int) -> Tensor:
    return keyed_gumbel(seed, torch.arange(num_positions)[:, None], torch.arange(num_tokens)[None])


class TestKeyedNoise:
    def test_the_same_key_gives_the_same_noise(self):
        assert torch.equal(grid(7, 20, 30), grid(7, 20, 30))

    def test_seed_position_and_token_each_change_it(self):
        values = torch.cat([grid(seed, 40, 50).flatten() for seed in (0, 1, 2, 2**40, -1)])
        assert len(values.unique()) == 5 * 40 * 50

    def test_a_value_does_not_depend_on_what_is_computed_with_it(self):
        whole = grid(3, 13, 37)
        flat = keyed_gumbel(3, torch.arange(13).repeat_interleave(37), torch.arange(37).repeat(13))
        assert torch.equal(flat.view(13, 37), whole)
        for position in range(13):
            row = keyed_gumbel(3, torch.tensor(position), torch.arange(37).flip(0)).flip(0)
            assert torch.equal(row, whole[position])
            alone = keyed_gumbel(3, torch.tensor([position]), torch.tensor([31]))
            assert alone.item() == whole[position, 31].item()

    def test_it_has_the_moments_of_gumbel_noise(self):
        noise = grid(11, 1000, 1000)
        # Standard error of the mean: sqrt(pi^2 / 6 / 10^6) = 0.0013; of the variance, kurtosis 5.4: 0.0034.
        assert noise.mean().item() == pytest.approx(0.5772, abs=4 * 0.0013)
        assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=4 * 0.0034)

    def test_its_deciles_are_those_of_gumbel_noise(self):
        uniform = torch.exp(-torch.exp(-grid(5, 1000, 1000).flatten()))
        counts = torch.histc(uniform, bins=10, min=0, max=1)
        assert ((counts - 1e5) ** 2 / 1e5).sum().item() < chi_square_limit(9)

    def test_neighbours_are_not_correlated(self):
        def correlation(a: Tensor, b: Tensor) -> float:
            return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()

        noise = grid(0, 501, 501)  # 250,000 pairs: standard error 0.002
        assert abs(correlation(noise[1:], noise[:-1])) < 0.008  # positions
        assert abs(correlation(noise[:, 1:], noise[:, :-1])) < 0.008  # tokens
        assert abs(correlation(noise[1:, :-1], noise[:-1, 1:])) < 0.008  # both, in opposite directions
        assert abs(correlation(noise, grid(1, 501, 501))) < 0.008  # seeds

    @pytest.mark.parametrize(("bits", "sign"), [(2**64 - 1, 1), (0, -1)])
    def test_even_the_extreme_hashes_give_finite_noise(self, bits: int, sign: int):
        token = token_with_hash(bits, seed=0, position=9)
        noise = keyed_gumbel(0, torch.tensor([9]), torch.tensor([token])).item()
        assert 3.5 < sign * noise < 37  # -log(-log(u)) for u within 2^-52 of 0 or 1


def token_with_hash(bits: int, seed: int, position: int) -> int:
    """The token id whose hash is `bits`: every step of splitmix64 has an inverse."""
    word, golden = 2**64 - 1, hashing._GOLDEN

    def undo_shift(y: int, by: int) -> int:
        x = y
        for _ in range(64 // by):
            x = y ^ (x >> by)
        return x

    x = undo_shift(bits, 31)
    x = undo_shift(x * pow(hashing._MIX2, -1, 2**64) & word, 27)
    x = undo_shift(x * pow(hashing._MIX1, -1, 2**64) & word, 30)
    key = hashing._mix(hashing._mix(torch.tensor(seed) * golden + 1) + torch.tensor(position) * golden)
    token = (x - int(key)) * pow(golden, -1, 2**64) & word
    return token - ((token >> 63) << 64)
