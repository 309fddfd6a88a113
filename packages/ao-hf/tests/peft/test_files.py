"""Corrections of ao-quant as adapters that PEFT loads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ao_core import quantize_
from ao_core.ext import ConfigError
from ao_hf.peft import save_adapter
from ao_quant import GPTQConfig, UIntxWeightOnlyConfig, low_rank_corrections


class Pair(NamedTuple):
    b: Tensor
    a: Tensor


@torch.no_grad()
def test_peft_adds_what_was_computed(tmp_path: Path) -> None:
    """The adapted model has the decoded weights plus B A, and is nearer to the original."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    dense = transformers.LlamaForCausalLM(config).eval()
    made, ids = copy.deepcopy(dense), torch.randint(96, (4, 24))
    data = [{"input_ids": each[None], "use_cache": False} for each in ids]
    quantize_(made, GPTQConfig(UIntxWeightOnlyConfig(2, 32)), data=data)
    found = low_rank_corrections(made, dense, data, rank=8)
    assert len(found) == 14 + 1
    save_adapter(tmp_path, found, "somewhere/llama")
    expected = copy.deepcopy(made)
    for name, each in found.items():
        layer = expected.get_submodule(name.removesuffix(".weight"))
        layer.weight = torch.nn.Parameter(layer.weight.dequantize() + each.b @ each.a)
    wanted, plain = dense(ids).logits, made(ids).logits
    corrected = expected(ids).logits
    adapted = peft.PeftModel.from_pretrained(made, tmp_path)
    torch.testing.assert_close(adapted(ids).logits, corrected, rtol=1e-3, atol=1e-3)
    errors = [float((each - wanted).square().mean()) for each in (plain, corrected)]
    assert errors[1] < 0.5 * errors[0]
    written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert written["base_model_name_or_path"] == "somewhere/llama"


def _pair(rank: int) -> Pair:
    return Pair(torch.ones(2, rank), torch.ones(rank, 2))


@pytest.mark.parametrize(
    ("corrections", "text"),
    [
        ({}, "no corrections"),
        ({"a.weight": _pair(1), "b.weight": _pair(2)}, r"ranks \[1, 2\]"),
        ({"a.bias": _pair(1)}, "'a.bias'"),
    ],
    ids=["none", "ranks", "name"],
)
def test_wrong_corrections(corrections: dict[str, Pair], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        save_adapter(tmp_path / "adapter", corrections)
    assert not (tmp_path / "adapter").exists()
