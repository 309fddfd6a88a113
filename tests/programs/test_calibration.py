"""Architectures of transformers are visited block by block, with the bits of runs of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import MODELS

from ao_core import Config
from ao_core.ext.calibration import (
    HESSIAN,
    Inputs,
    Visit,
    matrices,
    unmatrices,
    unobservable,
    visit,
)
from ao_core.ext.quantizing import Decision, decide


def _rewrite(entry: Decision, inputs: Inputs) -> Tensor:
    """New values that depend on every bit of the Hessian."""
    new = [
        one.double() * torch.sigmoid(each["hessian"].sum(0) / (1 + each["hessian"].trace()))
        for one, each in zip(
            matrices(entry.tensor.detach(), entry.owners[0]), inputs.statistics, strict=True
        )
    ]
    return unmatrices(torch.stack(new).float(), entry.tensor.shape, entry.owners[0])


def _visited(model: nn.Module, data: list[dict[str, Any]], driver: str) -> Visit:
    entries = [
        e for e in decide(model, Config(), None) if e.config is not None and not unobservable(e)
    ]
    return visit(model, data, entries, lambda entry: (HESSIAN,), _rewrite, driver=driver)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_blocks_are_run_one_by_one_with_the_same_bits(name: str) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    if hasattr(model.config, "use_cache"):
        inputs = {**inputs, "use_cache": False}
    data = [inputs, {k: v[:1] if isinstance(v, Tensor) else v for k, v in inputs.items()}]
    blocks = _visited(model, data, "auto")
    assert blocks.driver == "blocks", blocks.reason
    prefix = _visited(model, data, "prefix")
    assert blocks.values.keys() == prefix.values.keys()
    assert blocks.rows == prefix.rows
    for fqn, value in prefix.values.items():
        assert torch.equal(blocks.values[fqn], value), fqn
