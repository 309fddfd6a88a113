"""Makes the example's modules importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from bytelm.model import ByteLM, ModelConfig, initialize


@pytest.fixture
def config() -> ModelConfig:
    """Sizes that no power of two divides well."""
    return ModelConfig(
        hidden_size=36,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )


@pytest.fixture
def model(config: ModelConfig) -> ByteLM:
    """A model with random weights, large enough to matter, and norms that are not one."""
    made = ByteLM(config)
    initialize(made, seed=0)
    for name, parameter in made.named_parameters():
        parameter.data.mul_(5) if parameter.ndim == 2 else parameter.data.uniform_(0.5, 1.5)
        assert parameter.requires_grad, name
    return made
