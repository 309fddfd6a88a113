"""Linear layers spelled in quantization ops give what the quantized layers give."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ao_core import QTensor, quantize_
from ao_core.ext import MissingExtraError, UnsupportedOp
from ao_hf.export.executorch import export_executorch, spell_for_xnnpack
from ao_hf.export.logits import LogitsModel
from ao_hf.export.onnx import export_onnx
from ao_hf.export.spelled import SpelledLinear, spell_linears

RECIPES = [
    "int8_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int8_dynamic_activation_int8_weight/asymmetric",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_intx_weight",
]
IDS = torch.arange(12).reshape(2, 6)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_spelled_model_gives_the_same_logits(
    recipe: str, make_llama: Callable[..., LogitsModel]
) -> None:
    model = make_llama(recipe)
    spelled = spell_linears(model)
    # where an activation lies between two codes, the other one may be taken
    bound = 2e-2 if "activation" in recipe else 1e-5
    with torch.no_grad():
        assert relative_error(spelled(IDS), model(IDS)) < bound
    assert not any(isinstance(p, QTensor) for p in spelled.parameters())
    assert isinstance(model.model.lm_head.weight, QTensor)  # the model is as it was
    embedding = model.model.model.embed_tokens.weight
    assert spelled.get_parameter("model.model.embed_tokens.weight") is embedding


def test_bfloat16_rounds_once_more(make_llama: Callable[..., LogitsModel]) -> None:
    model = make_llama("int8_weight_only", torch.bfloat16)
    with torch.no_grad():
        error = relative_error(spell_linears(model)(IDS), model(IDS))
    assert error < 2e-2


def test_a_single_layer_with_a_bias_and_odd_sizes() -> None:
    layer = nn.Linear(33, 7)
    quantize_(layer, "int8_weight_only")
    spelled = spell_linears(layer)
    assert isinstance(spelled, SpelledLinear)
    x = torch.randn(2, 3, 33)
    torch.testing.assert_close(spelled(x), layer(x), rtol=1e-5, atol=1e-6)
    assert spelled(x[:0]).shape == (0, 3, 7)


def test_a_layer_that_a_model_holds_twice_stays_one() -> None:
    layer = nn.Linear(32, 32)
    quantize_(layer, "int8_weight_only")
    model = nn.Sequential(layer, nn.ReLU(), layer)
    spelled = spell_linears(model)
    assert isinstance(spelled[0], SpelledLinear)  # type: ignore[index]
    assert spelled[2] is spelled[0]  # type: ignore[index]
    x = torch.randn(2, 32)
    torch.testing.assert_close(spelled(x), model(x), rtol=1e-5, atol=1e-6)


def test_the_graph_has_the_ops_that_compilers_match() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, "int8_dynamic_activation_int4_weight")
    program = torch.export.export(spell_for_xnnpack(model), (torch.randn(3, 64),))
    names = [n.target.__name__ for n in program.graph.nodes if n.op == "call_function"]  # type: ignore[union-attr]
    for name in (
        "choose_qparams_per_token_asymmetric.default",
        "quantize_per_token.default",
        "dequantize_per_token.default",
        "dequantize_per_channel_group.default",
        "linear.default",
    ):
        assert names.count(name) == 1


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("nf4_weight_only", "nf4 is no integer format"),
        ("int8_dynamic_activation_int8_weight", "one zero point for each token"),
        ("int4_weight_only", "0.weight.*whole groups of 80 columns"),
    ],
)
def test_what_the_ops_cannot_say_is_refused(recipe: str, reason: str) -> None:
    model = nn.Sequential(nn.Linear(80, 32))
    quantize_(model, recipe)
    with pytest.raises(UnsupportedOp, match=reason):
        spell_linears(model)


def test_a_quantized_embedding_is_refused() -> None:
    from ao_core import FqnToConfig

    model = nn.Sequential(nn.Embedding(32, 64))
    quantize_(model, FqnToConfig({"0": "int8_weight_only"}))
    with pytest.raises(UnsupportedOp, match="Embedding, which is no nn.Linear"):
        spell_linears(model)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("int4_weight_only/g32-asymmetric", "has zero points"),
        ("int8_dynamic_activation_intx_weight", "6 bits; use 4 or 8"),
    ],
)
def test_what_xnnpack_has_no_matmul_for_is_refused(recipe: str, reason: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, recipe)
    with pytest.raises(UnsupportedOp, match=f"0.weight: .*{reason}"):
        spell_for_xnnpack(model)


@pytest.mark.parametrize(
    ("export", "package"), [(export_onnx, "onnxscript"), (export_executorch, "executorch")]
)
def test_a_missing_package_is_named(
    export: Callable[..., Any], package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, "int8_weight_only")
    with pytest.raises(MissingExtraError, match=rf"{package}.*ao-hf\[") as caught:
        export(model, (torch.randn(1, 64),), tmp_path / "model")
    assert "pip install" in str(caught.value)
    assert not list(tmp_path.iterdir())
