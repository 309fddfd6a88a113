"""The formats of checkpoints that ao-quant brings, one line each."""

from __future__ import annotations

from ao_core.ext.interchange import Interchange
from ao_quant.interchange.autoround import AUTO_ROUND
from ao_quant.interchange.awq import AWQ, AWQ_GEMV, AWQ_GEMV_FAST
from ao_quant.interchange.bitsandbytes import BITSANDBYTES
from ao_quant.interchange.compressed import COMPRESSED
from ao_quant.interchange.fp8 import FBGEMM, FP8
from ao_quant.interchange.gguf import GGUF
from ao_quant.interchange.gptq import GPTQ, GPTQ_V2
from ao_quant.interchange.hqq import HQQ
from ao_quant.interchange.mlx import MLX
from ao_quant.interchange.modelopt import MODELOPT
from ao_quant.interchange.mxfp4 import MXFP4
from ao_quant.interchange.onnx import ONNX
from ao_quant.interchange.torchao import TORCHAO

__all__ = ["INTERCHANGE"]

INTERCHANGE: tuple[Interchange, ...] = (
    GPTQ,
    GPTQ_V2,
    AWQ,
    AWQ_GEMV,
    AWQ_GEMV_FAST,
    COMPRESSED,
    BITSANDBYTES,
    HQQ,
    TORCHAO,
    AUTO_ROUND,
    MODELOPT,
    FP8,
    FBGEMM,
    MXFP4,
    MLX,
    ONNX,
    GGUF,
)
