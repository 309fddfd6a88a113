"""One rank of test_sharded.py: telemetry and fallback while FSDP2 shards the layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ao_core import quantize_
from ao_core.ext import ConfigError
from ao_core.testing.base import gaussian
from ao_core.testing.programs import one_of_the_ranks
from ao_float8 import (
    Float8LinearConfig,
    PrecisionRecord,
    float8_fallback,
    precision_telemetry,
)
from ao_float8.distributed import precompute_float8_dynamic_scale_for_fsdp


def make(gathered: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(36, 44), nn.GELU(), nn.Linear(44, 20))
    for position, parameter in enumerate(model.parameters()):
        parameter.data.copy_(gaussian(parameter.shape, seed=position) / 6)
    config = Float8LinearConfig.from_recipe_name(
        "tensorwise", enable_fsdp_float8_all_gather=gathered
    )
    quantize_(model, config)
    return model


def train(
    model: nn.Module, batch: Tensor, gathered: bool, falls_back: bool
) -> list[PrecisionRecord]:
    """Two steps in low precision; two more, for which the first layer falls back where it can."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with precision_telemetry(model) as telemetry:
        for step in range(4):
            if step == 2 and gathered:
                before = [
                    parameter.to_local().matmuls
                    for parameter in model.parameters()
                    if parameter.dim() > 1
                ]
                with pytest.raises(ConfigError, match=r"0\.weight has been gathered as float8"):
                    float8_fallback(model, "0")
                after = [
                    parameter.to_local().matmuls
                    for parameter in model.parameters()
                    if parameter.dim() > 1
                ]
                assert before == after
            elif step == 2 and falls_back:
                report = float8_fallback(model, "0")
                assert [record.status for record in report.records] == ["unchanged", "changed"]
            if gathered:
                precompute_float8_dynamic_scale_for_fsdp(model)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            telemetry.step()
    assert telemetry.unobserved == (("0.weight", "2.weight") if gathered else ())
    return telemetry.records


def check(gathered: bool) -> None:
    """With the same batch on every rank, the records are those of one process."""
    alone, sharded = make(False), make(gathered)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    fully_shard(sharded)
    batch = gaussian((8, 36), seed=5)
    expected, found = (
        train(alone, batch, False, not gathered),
        train(sharded, batch, gathered, not gathered),
    )

    def named(records: list[PrecisionRecord]) -> dict[tuple[int, str, str, str], PrecisionRecord]:
        return {(r.step, r.layer, r.matmul, r.tensor): r for r in records}

    one, other = named(expected), named(found)
    if gathered:  # the weights are codes on every rank
        one = {key: record for key, record in one.items() if record.tensor != "weight"}
    assert set(one) == set(other), set(one) ^ set(other)
    assert {r.step for r in found if r.layer == "0"} == ({0, 1, 2, 3} if gathered else {0, 1})
    assert {r.step for r in found if r.layer == "2"} == {0, 1, 2, 3}
    for key, record in one.items():
        assert other[key].elements == record.elements, key
        assert other[key].amax == pytest.approx(record.amax, rel=0.02), key
        assert other[key].scale_max == pytest.approx(record.scale_max, rel=0.02), key
    sys.stdout.write(f"gathered in float8: {gathered}, {len(found)} records\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])):
        for gathered in (False, True):
            check(gathered)
        assert dist.get_world_size() == 2
