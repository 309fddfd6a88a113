"""`torch.export` and AOTInductor of quantized models, as the pages of torch show them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.subclass_parametrization import (
    unwrap_tensor_subclass_parameters,
)
from zoo import MODELS

from ao_core import quantize_
from ao_core.ext.numerics import sqnr

RECIPES = (
    "int8_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int8_dynamic_activation_int8_weight",
    "nf4_weight_only",
)


def small(recipe: str) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).bfloat16().eval()
    quantize_(model, recipe)
    return model, torch.randn(5, 64).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_and_saved(recipe: str, strict: bool, tmp_path: Path) -> None:
    model, x = small(recipe)
    rows = torch.export.Dim("rows", min=1, max=1024)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (x, x[:1]):
        assert float(sqnr(model(batch), loaded(batch))) > 40


def test_language_model() -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    quantize_(model, "int8_weight_only")
    program = torch.export.export(model, (), {**inputs, "use_cache": False})
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
    assert float(sqnr(expected, program.module()(**inputs, use_cache=False).logits)) > 80


@pytest.mark.slow
@pytest.mark.parametrize("unwrapped", [False, True])
def test_compiled_ahead_of_time(unwrapped: bool, tmp_path: Path) -> None:
    model, x = small("int8_weight_only")
    expected = model(x)
    if unwrapped:
        unwrap_tensor_subclass_parameters(model)
    program = torch.export.export(model, (x,))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    assert float(sqnr(expected, torch._inductor.aoti_load_package(package)(x))) > 40
