"""Small quantized models with random weights, and what they generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ao_core import quantize_
from ao_quant import Int4WeightOnlyConfig

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
INT4 = Int4WeightOnlyConfig(32, symmetric=True)


def build(kind: str, dtype: torch.dtype = torch.float32, recipe: Any = INT4, **changes: Any) -> Any:
    """A small model with random weights, norms and biases."""
    config = getattr(transformers, f"{kind}Config")
    sizes: dict[str, Any] = {**SIZES, **changes}
    if kind == "GPT2":
        sizes = {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model_class = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, model_class)(config(**sizes)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(0, 0.12)
    if recipe is not None:
        quantize_(model, recipe)
    return model


def logits(model: Any, batch: int = 1, tokens: int = 6, **options: Any) -> tuple[Tensor, Tensor]:
    """Generated tokens and their logits."""
    ids = torch.arange(1, 7 * batch + 1).reshape(batch, 7)
    found = model.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


def served_calls(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[bool]:
    """For each call of fused modules of a kind from now on, whether it did not call their own code."""
    found: list[bool] = []
    own = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        found.append(out is not NotImplemented)
        return out

    monkeypatch.setattr(kind, "run", run)
    return found
