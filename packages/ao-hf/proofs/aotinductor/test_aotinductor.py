"""A package of AOTInductor, which runs without Python, gives what the quantized model gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ao_hf.export.logits import LogitsModel

SHAPES = {"input_ids": {1: torch.export.Dim("sequence", min=2, max=64)}}


def test_a_llama(make_llama: Callable[..., LogitsModel], tmp_path: Path) -> None:
    model, ids = make_llama("int4_weight_only/g32-asymmetric"), torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=SHAPES)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        packaged = torch._inductor.aoti_load_package(path)
        for tokens in (ids, torch.arange(18).reshape(2, 9)):
            torch.testing.assert_close(packaged(tokens), model(tokens), rtol=1e-4, atol=1e-5)
