from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ao_core
from ao_core.ext import registry
from ao_quant.configs import CONFIGS
from ao_quant.recipes import RECIPES

#: the types of GGUF differ in widths; beside the default, test_gguf.py has the suite for each
_RECIPES = [r for r in RECIPES if not r.name.startswith("gguf_weight_only/")]
_WEIGHT_ONLY = [r.name for r in _RECIPES if r.config.weight_format(torch.float32).spec.act is None]
_DYNAMIC = [r.name for r in _RECIPES if r.config.weight_format(torch.float32).spec.act is not None]


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class _WithLogits(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return SimpleNamespace(logits=self.inner(ids))


@pytest.fixture
def with_logits():
    """Makes a model that answers as those of transformers do."""
    return _WithLogits


@pytest.fixture(params=[recipe.name for recipe in _RECIPES])
def recipe(request):
    """Every recipe, of the types of GGUF the default."""
    return request.param


@pytest.fixture(params=[name for name in CONFIGS if name in {r.name for r in RECIPES}])
def default(request):
    """The default recipe of every configuration."""
    return request.param


@pytest.fixture(params=_WEIGHT_ONLY)
def weight_only(request):
    """Every recipe that leaves activations alone."""
    return request.param


@pytest.fixture(params=_DYNAMIC)
def dynamic(request):
    """Every recipe that quantizes activations."""
    return request.param


@pytest.fixture
def act_bits():
    """Bits of the activations under a recipe; 16 where they are left alone."""

    def bits(recipe):
        act = ao_core.resolve_config(recipe).weight_format(torch.float32).spec.act
        return 16 if act is None else registry.dtypes.get(act.dtype).bits

    return bits


@pytest.fixture
def sqnr_db():
    """Signal to quantization noise in dB."""

    def measure(exact, approx):
        exact, approx = exact.detach().double(), approx.detach().double()
        noise = (exact - approx).square().sum()
        return float(10 * torch.log10(exact.square().sum() / noise))

    return measure
