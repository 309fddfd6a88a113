"""An op of your own: a linear layer whose weight is the product of two quantized factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Kernel, Op, QTensor, Spec, kernels, quantize_tensor, register
from ao_core.ext.kernels import candidates, run
from ao_core.ext.numerics import scale_to_float
from ao_core.testing import OpTrial

ROW = Spec("int8", (1, -1))
GROUPS = Spec("int4", (1, 32), "bfloat16", layout="packed")


# --8<-- [start:call]
@dataclass(frozen=True)
class LowRankCall:
    """What kernels may look at; `op`, `layout`, `device` and `specs` are what selection needs."""

    down: Spec  # of the factor (R, K)
    up: Spec  # of the factor (N, R)
    m: int  # rows of x
    x_dtype: torch.dtype
    device: str
    op: str = "low_rank_linear"

    @property
    def layout(self) -> str:
        return self.down.layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        return self.down, self.up


# --8<-- [end:call]


# --8<-- [start:op]
def low_rank_linear(x: Tensor, down: QTensor, up: QTensor) -> Tensor:
    """The reference: plain torch, right for every format, shape and device."""
    return F.linear(F.linear(x, down.dequantize(x.dtype)), up.dequantize(x.dtype))


def trials():
    """How kernels of the op are tested; a package imports the class here, from a module of its own."""
    return LowRankTrial()


LOW_RANK = Op(
    name="low_rank_linear",
    call=LowRankCall,
    reference=low_rank_linear,
    doc="y = x @ (up @ down).T. x is (..., K), down (R, K), up (N, R); y is (..., N) in the dtype of x.",
    trials=trials,
)
# --8<-- [end:op]


# --8<-- [start:kernel]
def low_rank_codes(x: Tensor, down: QTensor, up: QTensor) -> Tensor:
    """Multiply by the codes, and scale the results: one scale per row of each factor."""
    hidden = F.linear(x.float(), down.qdata.float()) * scale_to_float(down.scale).view(
        -1
    )
    out = F.linear(hidden, up.qdata.float()) * scale_to_float(up.scale).view(-1)
    return out.to(x.dtype)


def refuses(call: LowRankCall) -> str | None:
    for name, spec in (("down", call.down), ("up", call.up)):
        if spec != ROW:
            return f"needs {ROW} for {name}, found {spec}"
    return None


CODES = Kernel(
    "low_rank_codes",
    "low_rank_linear",
    "plain",
    "*",
    low_rank_codes,
    1,
    refuses=refuses,
)
# --8<-- [end:kernel]


# --8<-- [start:trial]
class LowRankTrial(OpTrial):
    """A case is a pair of formats, and the shape (N, K) of the whole weight; a batch is that of x."""

    specs = ((ROW, ROW), (ROW, GROUPS), (GROUPS, ROW))
    RANK = 7

    def operands(self, kernel, shape, specs):
        return [pair for pair in specs if kernel.layout in ("*", pair[0].layout)]

    def call(self, op, case, batch):
        rows = torch.Size(batch).numel()
        return LowRankCall(*case.specs, rows, case.dtype, case.device, op)

    def samples(self, case, batch, seed):
        generator = torch.Generator().manual_seed(seed)
        n, k = case.shape
        x, down, up = (
            torch.randn(shape, generator=generator).to(case.device)
            for shape in ((*batch, k), (self.RANK, k), (n, self.RANK))
        )
        x = x.to(case.dtype)
        factors = (
            quantize_tensor(down, case.specs[0]),
            quantize_tensor(up, case.specs[1]),
        )
        dense = [factor.dequantize(torch.float32).double() for factor in factors]
        yield (x, *factors), x.double() @ (dense[1] @ dense[0]).t()


# --8<-- [end:trial]

# --8<-- [start:use]
register(
    LOW_RANK
)  # a plugin returns it from the hook ao_ops(), and the kernel from ao_kernels()
register(CODES)

generator = torch.Generator().manual_seed(0)
x, down, up = (
    torch.randn(shape, generator=generator) for shape in ((5, 256), (16, 256), (64, 16))
)
q_down, q_up = quantize_tensor(down, ROW), quantize_tensor(up, ROW)

call = LowRankCall(q_down.spec, q_up.spec, len(x), x.dtype, x.device.type)
y = run(call, x, q_down, q_up)
with kernels("reference"):
    torch.testing.assert_close(y, run(call, x, q_down, q_up), atol=1e-3, rtol=1e-5)

for up_format in (ROW, GROUPS):
    print(f"up in {up_format}:")
    for candidate in candidates(LowRankCall(ROW, up_format, len(x), x.dtype, "cpu")):
        print(f"  {candidate.kernel.name}: {candidate.refusal or 'serves it'}")
# --8<-- [end:use]
