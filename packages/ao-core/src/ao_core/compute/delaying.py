"""Weights whose fake-quantize rule waits: they are trained in high precision until it begins."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ao_core.compute.matmuls import DELAYED, rule_name
from ao_core.compute.weight import ComputeWeight
from ao_core.tensor.sharding import local_shard

__all__ = ["delay_", "prepared_weights"]


def prepared_weights(model: nn.Module) -> list[ComputeWeight]:
    """The weights of a model, or this rank's shards of them, that a fake-quantize rule rounds."""
    weights = [local_shard(parameter) for parameter in model.parameters()]
    return [w for w in weights if isinstance(w, ComputeWeight) and rule_name(w.matmuls.output)]


def delay_(model: nn.Module, waits: bool) -> None:
    """Let all fake-quantize rules of a model wait, or begin; the parameters stay the same objects."""
    for weight in prepared_weights(model):
        spec = weight.matmuls.output
        assert spec is not None
        options = {**dict(spec.options), DELAYED: True}
        if not waits:
            del options[DELAYED]
        output = replace(spec, options=tuple(sorted(options.items())))
        weight.matmuls = weight.matmuls._replace(output=output)
