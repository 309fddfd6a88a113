"""A quantized language model through torch.export gives what eager mode gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ao_hf.export.logits import LogitsModel

IDS, LONGER = torch.arange(12).reshape(2, 6), torch.arange(18).reshape(2, 9)
SHAPES = {"input_ids": {1: torch.export.Dim("sequence", min=2, max=64)}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "strict"),
    [("int4_weight_only/g32-asymmetric", False), ("int8_dynamic_activation_int8_weight", True)],
)
def test_exported_for_any_length(
    recipe: str, strict: bool, make_llama: Callable[..., LogitsModel], tmp_path: Path
) -> None:
    model = make_llama(recipe)
    with torch.no_grad():
        program = torch.export.export(model, (IDS,), dynamic_shapes=SHAPES, strict=strict)
        torch.export.save(program, tmp_path / "model.pt2")
        again = torch.export.load(tmp_path / "model.pt2").module()
        for ids in (IDS, LONGER):
            assert torch.equal(again(ids), model(ids))
