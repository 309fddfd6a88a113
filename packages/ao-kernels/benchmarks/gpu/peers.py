"""Other libraries' matmuls with quantized weights, where they can be imported; METHOD.md names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Contender, Setup, compiled
from torch import Tensor, nn

#: (setup, dense weight) -> a contender
Maker = Callable[[Setup, Tensor], Contender]


@dataclass(frozen=True)
class Peer:
    """A library, and what of it is measured beside which formats of ours."""

    #: the name that it is imported by
    module: str
    #: of the activations: what it serves best
    dtype: torch.dtype
    formats: tuple[str, ...]
    makers: Mapping[str, Maker]

    @property
    def is_there(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.module) is not None


def tinygemm(setup: Setup, shape: tuple[int, ...]) -> Contender:
    """Torch's own int4 with zero points, on random codes."""
    n, k = shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=setup.device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    qparams = torch.rand(k // 128, n, 2, dtype=torch.bfloat16, device=setup.device)
    size = n * k // 2 + 2 * qparams.numel()
    multiply = torch.ops.aten._weight_int4pack_mm
    return Contender(
        setup.copies((packed, qparams), size),
        lambda x, weight: multiply(x, weight[0], 128, weight[1]),
        size,
        lambda x: "_weight_int4pack_mm",
    )


def gemlite(setup: Setup, dense: Tensor) -> Contender:
    """Its layer of random codes, which chooses a kernel by rows; tuned as it is by default."""
    from gemlite.core import TORCH_TO_DTYPE, GemLiteLinear

    n, k = dense.shape
    dtype, of_groups = TORCH_TO_DTYPE[dense.dtype], (n * k // 128, 1)
    layer = GemLiteLinear(
        4,
        group_size=128,
        in_features=k,
        out_features=n,
        input_dtype=dtype,
        output_dtype=dtype,
    )
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=setup.device)
    scales = torch.full(of_groups, 0.01, dtype=dense.dtype, device=setup.device)
    layer.pack(codes, scales, torch.full_like(scales, 8), None)
    size = n * k // 2 + 2 * 2 * scales.numel()
    return Contender(setup.copies(layer, size), _of_layer, size)


def marlin(setup: Setup, dense: Tensor) -> Contender:
    """Its layer, with random codes: every word is a valid one."""
    from marlin import Layer

    n, k = dense.shape
    layer = Layer(k, n, groupsize=128).to(setup.device)
    layer.B.random_()
    layer.s.fill_(0.01)
    size = n * k // 2 + 2 * layer.s.numel()
    return Contender(setup.copies(layer, size), _of_layer, size)


def bitsandbytes(setup: Setup, dense: Tensor) -> Contender:
    """nf4 with a float32 scale for 64 weights."""
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import quantize_4bit

    weight = quantize_4bit(dense, blocksize=64, compress_statistics=False, quant_type="nf4")
    size = dense.numel() // 2 + 4 * dense.numel() // 64
    return Contender(
        setup.copies(weight, size), lambda x, w: matmul_4bit(x, w[0].t(), quant_state=w[1]), size
    )


def of_torchao(config: str) -> Maker:
    """A weight-only format of torchao, compiled as it asks to be."""

    def make(setup: Setup, dense: Tensor) -> Contender:
        import torchao.quantization as of

        size = dense.numel()
        chosen = getattr(of, config)()
        copies = [torchao_weight(dense, chosen) for _ in range(setup.count(size))]
        return Contender(copies, compiled_linear(), size)

    return make


def torchao_weight(dense: Tensor, config: Any) -> Tensor:
    """What torchao makes of the weight of a layer."""
    from torchao.quantization import quantize_

    layer = nn.Linear(dense.shape[1], dense.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(dense.clone(), requires_grad=False)
    quantize_(layer, config)
    return layer.weight


@cache
def compiled_linear() -> Callable[[Tensor, Tensor], Tensor]:
    """`F.linear`, compiled once for all."""
    return compiled(lambda x, weight: F.linear(x, weight))


def _of_layer(x: Tensor, layer: nn.Module) -> Any:
    return layer(x)


_BF16, _FP16 = torch.bfloat16, torch.float16
PEERS = (
    Peer("gemlite", _FP16, ("int4 g128",), {"gemlite int4 g128": gemlite}),
    Peer("marlin", _FP16, ("int4 g128",), {"Marlin int4 g128": marlin}),
    Peer("bitsandbytes", _BF16, ("nf4 g64",), {"bitsandbytes nf4 g64": bitsandbytes}),
    Peer(
        "torchao",
        _BF16,
        ("int8", "float8"),
        {
            "torchao int8": of_torchao("Int8WeightOnlyConfig"),
            "torchao float8": of_torchao("Float8WeightOnlyConfig"),
        },
    ),
)
