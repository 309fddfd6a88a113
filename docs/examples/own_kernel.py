"""A kernel of your own: dequantize a few rows of a weight at a time, so that they stay in the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ao_core import Kernel, explain, kernels, quantize_, register

ROWS = 256


# --8<-- [start:kernel]
def row_blocks_linear(x, w, bias):
    """The op "linear": x (..., K), w a QTensor (N, K), bias (N,) or None -> (..., N) in x's dtype."""
    out = x.new_empty(*x.shape[:-1], w.shape[0])
    for start in range(0, w.shape[0], ROWS):
        rows = w[start : start + ROWS].dequantize(x.dtype)
        out[..., start : start + ROWS] = F.linear(x, rows)
    return out if bias is None else out + bias


def refuses(call):
    """None, or the reason why not. Shapes, dtypes and the spec only: while tracing there are no values."""
    if call.spec.act is not None:
        return "does not quantize activations"
    if call.spec.block[0] != 1:
        return f"needs blocks within one row, found {call.spec.block}"
    if call.weight_shape[0] <= ROWS:
        return f"pays off from {ROWS} rows of the weight, found {call.weight_shape[0]}"
    return None


ROW_BLOCKS = Kernel(
    name="row_blocks",
    op="linear",
    layout="packed",
    device="cpu",
    fn=row_blocks_linear,
    priority=1,  # above the reference (-100); the bands are 0 torch, 50 compiled, 100 CUDA
    unavailable=lambda: (
        None
    ),  # what the machine lacks, asked once: "needs sm_90, found sm_80"
    refuses=refuses,
)
# --8<-- [end:kernel]

# --8<-- [start:use]
register(
    ROW_BLOCKS
)  # before any kernel is selected; a plugin returns it from ao_kernels()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
quantize_(model, "int4_weight_only")
x = torch.randn(3, 64)

# the same result as the kernel that is always right
with kernels("reference"):
    expected = model(x)
torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)

# the wide layer is served by the new kernel, the narrow one is not, and says why
wide, narrow = explain(model)
assert wide.calls[0].winner.kernel.name == "row_blocks"
assert narrow.calls[0].winner.kernel.name == "reference_linear"
print(explain(model, x))
# --8<-- [end:use]
