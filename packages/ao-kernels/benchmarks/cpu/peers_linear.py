"""Contenders of other Python packages, where they are installed: torchao and bitsandbytes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from rotation import Contender, Maker, copies, matmul, rolled
from torch import Tensor, nn

#: a layer (a bfloat16 nn.Linear) -> one that is quantized
Quantize = Callable[[nn.Linear], nn.Module]


def peers_linear() -> dict[str, Maker]:
    """Name -> what makes the contender for a weight, of the packages that are installed."""
    found = {**torchao(), **bitsandbytes()}
    return {name: partial(module, name=name, **fields) for name, fields in found.items()}


def module(weight: Tensor, *, name: str, quantize: Quantize, bits: float) -> Contender:
    """The call of a layer that the package made of a dense one.

    Args:
        weight: (N, K), float32.
        name: of the contender.
        quantize: makes the layer.
        bits: of a weight, with its share of scales and zero points.
    """
    nbytes = int(weight.numel() * bits / 8)
    layers = []
    for number in copies(nbytes):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        dense = rolled(weight, number).bfloat16()
        layer.weight = nn.Parameter(dense, requires_grad=False)
        layers.append(quantize(layer).eval())
        layers[-1](dense[:1])  # some arrange their weight at the first call
    return matmul(name, layers, nbytes, lambda x, layer: layer(x), weight.shape[1])


def torchao() -> dict[str, dict[str, object]]:
    """Its formats that run on a CPU; of int4 only a prototype does."""
    if find_spec("torchao") is None:
        return {}
    logging.getLogger("torchao").setLevel(logging.ERROR)  # its CUDA libraries are missing
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    def quantized(layer: nn.Linear, config: object) -> nn.Module:
        model = nn.Sequential(layer)
        quantize_(model, config)
        return model[0]

    int4 = partial(PrototypeInt4WeightOnlyConfig, set_inductor_config=False)
    int8 = Int8WeightOnlyConfig(set_inductor_config=False)
    dynamic = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    return {
        "torchao int4 g32, bf16": {
            "quantize": partial(quantized, config=int4(group_size=32)),
            "bits": 5,
        },
        "torchao int4 g128, bf16": {
            "quantize": partial(quantized, config=int4(group_size=128)),
            "bits": 4.25,
        },
        "torchao int8, bf16": {"quantize": partial(quantized, config=int8), "bits": 8},
        "torchao int8 dynamic, bf16": {"quantize": partial(quantized, config=dynamic), "bits": 8},
    }


def bitsandbytes() -> dict[str, dict[str, object]]:
    """Its two linear layers."""
    if find_spec("bitsandbytes") is None:
        return {}
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="bitsandbytes")
    import bitsandbytes as bnb

    def four_bit(layer: nn.Linear) -> nn.Module:
        new = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            device="meta",
        )
        new.weight = bnb.nn.Params4bit(layer.weight, requires_grad=False, quant_type="nf4")
        return new.to("cpu")

    def eight_bit(layer: nn.Linear) -> nn.Module:
        new = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=False, has_fp16_weights=False, device="meta"
        )
        new.weight = bnb.nn.Int8Params(
            layer.weight.data, requires_grad=False, has_fp16_weights=False
        )
        return new.to("cpu")

    return {
        "bitsandbytes nf4, bf16": {"quantize": four_bit, "bits": 4.25},
        "bitsandbytes int8, bf16": {"quantize": eight_bit, "bits": 8},
    }
