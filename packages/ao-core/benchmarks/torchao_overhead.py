"""Eager overhead of a quantized linear layer over nn.Linear at batch 1, ours and torchao's."""

from __future__ import annotations

import copy
from functools import partial

from overhead import TEXT, Calls, measure
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from benchmarking import arguments, record

CONFIGS = {
    "torchao int8": Int8WeightOnlyConfig(),
    "torchao int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
}


def torchao(layer: nn.Linear, x: Tensor) -> Calls:
    """The layer as torchao quantizes it. Its arithmetic is part of the times: it has no bare kernel."""
    calls: Calls = {}
    for name, config in CONFIGS.items():
        model = nn.Sequential(copy.deepcopy(layer))
        quantize_(model, config)
        calls[name] = partial(model[0], x)
    return calls


if __name__ == "__main__":
    args = arguments(__doc__, rounds=60, repeats=200)
    title = "Overhead of an eager call, compared with torchao"
    record(args.json, title, TEXT, measure(args.rounds, args.repeats, torchao))
