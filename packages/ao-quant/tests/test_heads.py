"""Output heads, tied to an embedding or not, keep 8 bits where they are not named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ao_core
from ao_core import FqnToConfig, QTensor, WeightOnlyConfig
from ao_core.ext import registry
from ao_quant.transforms import for_head

ROWS, WIDTH = 96, 64


class Model(nn.Module):
    def __init__(self, tied: bool, rows: int = ROWS) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(ids)))


def _bits(model: nn.Module, name: str) -> int:
    weight = model.get_parameter(name)
    return registry.dtypes.get(weight.spec.dtype).bits if isinstance(weight, QTensor) else 32


@pytest.mark.parametrize("tied", [True, False])
def test_every_recipe(recipe, tied):
    """At least 8 bits for the head, what the recipe says for the rest, and the report says so."""
    model = Model(tied).requires_grad_(False)
    report = ao_core.quantize_(model, recipe)
    of_recipe = registry.dtypes.get(
        registry.recipes.get(recipe).config.weight_format(torch.float32).spec.dtype
    ).bits
    assert _bits(model, "inner.weight") == of_recipe
    assert _bits(model, "head.weight") == max(of_recipe, 8)
    (record,) = [r for r in report if "head.weight" in (r.fqn, *r.tied)]
    assert ("an output head" in record.reason) == (of_recipe < 8)
    assert ("an output head" in str(report)) == (of_recipe < 8)
    assert (model.head.weight is model.embed.weight) == tied
    assert model(torch.arange(5)).isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        FqnToConfig({"head": "int4_weight_only", "*": "int4_weight_only"}),
        FqnToConfig({"re:.*": "int4_weight_only"}),
        lambda module, name: isinstance(module, nn.Linear),
    ],
    ids=["name", "expression", "filter_fn"],
)
def test_named_heads_are_what_is_asked(config, tied):
    model = Model(tied)
    if isinstance(config, FqnToConfig):
        ao_core.quantize_(model, config)
    else:
        ao_core.quantize_(model, "int4_weight_only", config)
    assert _bits(model, "head.weight") == 4


def test_the_star_names_nothing():
    model = Model(tied=False)
    ao_core.quantize_(model, FqnToConfig({"inner": None, "*": "int4_weight_only"}))
    assert _bits(model, "head.weight") == 8


def test_layers_that_happen_to_have_the_shape():
    """As many as there are embeddings of it may be heads; more are not."""
    model = Model(tied=False, rows=WIDTH)
    ao_core.quantize_(model, "int4_weight_only")
    assert _bits(model, "inner.weight") == _bits(model, "head.weight") == 4


def test_any_format_of_the_core():
    model = Model(tied=True)
    ao_core.quantize_(model, WeightOnlyConfig("uint3", 32, zero_point="int"))
    assert _bits(model, "head.weight") == 8
    assert _bits(model, "inner.weight") == 3


def test_heads_that_can_be_written_to_gguf():
    model = Model(tied=True)
    ao_core.quantize_(model, "gguf_weight_only")
    assert model.head.weight.spec.block == (1, 32)
    assert model.head.weight.spec.scale_dtype == "float16"


def test_a_head_has_no_other_configuration_of_8_bits(recipe):
    config = registry.recipes.get(recipe).config
    found = for_head(config)
    assert found is None or for_head(found) is None
