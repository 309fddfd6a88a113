"""Ways to quantize all linear layers of a bfloat16 model in place: ours, torch's, and torchao's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from ours import stored
from torch import nn

import ao_core
from ao_quant import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
)

Quantizer = Callable[[nn.Module], object]
#: the end of the name of what is run by a compiled program
BY_PROGRAM = ", compiled"

CONFIGS = {
    "ao int4 g32": Int4WeightOnlyConfig(group_size=32, symmetric=True),
    "ao int4 g32 dynamic": Int8DynamicActivationInt4WeightConfig(group_size=32),
    "ao int8": Int8WeightOnlyConfig(),
    "ao int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
}


def quantizers() -> dict[str, Quantizer]:
    """Name -> what quantizes a model, of the packages that are installed."""
    found: dict[str, Quantizer] = {
        name: partial(ao_core.quantize_, config=config) for name, config in CONFIGS.items()
    }
    return found | {"quantize_dynamic x86": quantize_dynamic} | torchao()


def torchao() -> dict[str, Quantizer]:
    """Its weight-only formats that run on a CPU; of int4 only a prototype does."""
    if find_spec("torchao") is None:
        return {}
    logging.getLogger("torchao").setLevel(logging.ERROR)  # its CUDA libraries are missing
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    int4 = PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)
    int8 = Int8WeightOnlyConfig(set_inductor_config=False)
    return {
        "torchao int4 g32": partial(quantize_, config=int4),
        "torchao int8": partial(quantize_, config=int8),
    }


def quantize_dynamic(model: nn.Module) -> None:
    """`torch.ao.quantization.quantize_dynamic`, in place; the model then computes in float32."""
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import default_dynamic_qconfig

    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
    torch.backends.quantized.engine = "x86"
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                child.qconfig = default_dynamic_qconfig
                setattr(module, name, Linear.from_float(child.float()))
    model.float()


def linear_bytes(model: nn.Module) -> int:
    """Bytes of the weights of all linear layers, with their scales."""
    from torch.ao.nn.quantized.dynamic import Linear

    dense = sum(stored(m.weight) for m in model.modules() if isinstance(m, nn.Linear))
    packed = (m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear))
    return dense + sum(packed)
