"""SparseGPT and Wanda as algorithms of a matrix and statistics: they pass the suite of all algorithms."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ao_core import Algorithm, Config, Solved
from ao_core.ext.calibration import HESSIAN, SQUARES
from ao_core.testing import AlgorithmSuite
from ao_sparsity import NofM
from ao_sparsity.masks import n_of_m_mask
from ao_sparsity.prune.sparsegpt import sparsegpt
from ao_sparsity.prune.wanda import wanda_scores


@dataclass(frozen=True)
class SparseGPT(Config):
    """2 of 4, with what stays made to make up for what goes."""


@dataclass(frozen=True)
class Wanda(Config):
    """2 of 4, by magnitude times the norm of the inputs."""


def solve_sparsegpt(weight, statistics, config, target):
    pairs = zip(weight, statistics, strict=True)
    new = [sparsegpt(one, each["hessian"], NofM(2, 4))[0] for one, each in pairs]
    return Solved(torch.stack(new))


def solve_wanda(weight, statistics, config, target):
    kept = n_of_m_mask(wanda_scores(weight, statistics), 2, 4)
    return Solved(weight.masked_fill(~kept, 0))


class Pruned(AlgorithmSuite):
    sqnr_range = (2.0, 20.0)

    def nearest(self, weight):
        return weight.masked_fill(~n_of_m_mask(weight.abs(), 2, 4), 0)


class TestSparseGPT(Pruned):
    records = (Algorithm("sparsegpt", SparseGPT, lambda config: (HESSIAN,), solve_sparsegpt),)
    config = SparseGPT()


class TestWanda(Pruned):
    records = (Algorithm("wanda", Wanda, lambda config: (SQUARES,), solve_wanda, sequential=False),)
    config = Wanda()
    # it takes columns for independent, which one row of correlated inputs does not average out
    error_range = (0.005, 1.3)


def test_wanda_by_hand():
    """Two weights of four stay: those of the greatest |w| times the norm of their column."""

    class Inputs(dict):
        rows = 2

    statistics = [Inputs(squares=torch.tensor([1.0, 100.0, 4.0, 0.0], dtype=torch.float64))]
    weight = torch.tensor([[[3.0, -0.2, 1.0, 9.0]]])
    scores = wanda_scores(weight, statistics)
    assert scores.tolist() == [[pytest.approx([3.0, 2.0, 2.0, 0.0])]]
