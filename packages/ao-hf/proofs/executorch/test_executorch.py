"""ExecuTorch gives what the quantized model gives, and XNNPACK takes the linear layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from executorch.runtime import Runtime

from ao_core import FqnToConfig
from ao_hf.export.executorch import export_executorch
from ao_hf.export.logits import LogitsModel

ASYMMETRIC = "int8_dynamic_activation_int8_weight/asymmetric"
INT4 = FqnToConfig(
    {
        "lm_head": ASYMMETRIC,
        "model.embed_tokens": None,
        "*": "int8_dynamic_activation_int4_weight",
    }
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "left"),
    [
        (ASYMMETRIC, {}),
        (INT4, {}),
        # XNNPACK has no matmul of float32 and int8: ExecuTorch dequantizes eight weights itself
        ("int8_weight_only", {"quantized_decomposed.dequantize_per_channel.default": 8}),
    ],
    ids=["int8", "int4", "int8-weights"],
)
def test_a_llama(
    config: str | FqnToConfig,
    left: dict[str, int],
    make_llama: Callable[..., LogitsModel],
    tmp_path: Path,
) -> None:
    model, path, ids = make_llama(config), tmp_path / "model.pte", torch.arange(12).reshape(2, 6)
    lowered = export_executorch(model, (ids,), path)
    assert lowered.left == left
    assert lowered.delegates > 0
    assert lowered.nbytes == path.stat().st_size
    linears = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert len(linears) == 8
    # bytes of codes, of scales and of the graph; dense weights have four for each element
    elements = sum(layer.weight.numel() for layer in linears)
    embedding = model.model.model.embed_tokens.weight.nbytes
    assert elements / 2 < lowered.nbytes - embedding < 3 * elements
    found = Runtime.get().load_program(path).load_method("forward").execute([ids])[0]
    with torch.no_grad():
        expected = model(ids)
    # where an activation lies between two codes, XNNPACK may take the other one
    bound = 1e-5 if config == "int8_weight_only" else 2e-2
    assert float((found - expected).norm() / expected.norm()) < bound
