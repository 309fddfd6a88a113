"""A kernel that takes an input step itself: activations are scaled in float32, and never rounded between."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ao_core import WHOLE, Kernel, Spec, explain, kernels, quantize_tensor, register
from ao_core.ext import SCALE, hadamard_step


# --8<-- [start:kernel]
def scaled_rows_linear(x, w, bias):
    """The op "linear" for int8 weights with one scale per row; takes the input step "scale" itself."""
    x_MK = x.float()
    if w.spec.input:  # what is left of the steps: nothing, or the scale
        x_MK = x_MK * w.in_scale.reshape(-1)
    out_MN = F.linear(x_MK, w.qdata.float()) * w.scale.float().reshape(-1)
    return (out_MN if bias is None else out_MN + bias).to(x.dtype)


def refuses(call):
    spec = call.spec
    if (spec.dtype, spec.block, spec.zero_point, spec.act) != (
        "int8",
        (1, WHOLE),
        "none",
        None,
    ):
        return f"needs int8 weights with one scale per row, found {spec}"
    if isinstance(spec.scale_dtype, Spec):
        return "needs scales that are not quantized themselves"
    return None


SCALED_ROWS = Kernel(
    name="scaled_rows",
    op="linear",
    layout="plain",
    device="*",
    fn=scaled_rows_linear,
    priority=2,
    refuses=refuses,
    fuses=("scale",),
)
# --8<-- [end:kernel]

# --8<-- [start:use]
register(SCALED_ROWS)

generator = torch.Generator().manual_seed(0)
weight = torch.randn(64, 96, generator=generator)
x = torch.randn(4, 96, generator=generator)
x[:, 7] *= 20  # an outlier channel

# the logical weight stays what it was: dequantize() undoes the steps
in_scale = 1 / x.abs().amax(0).sqrt()
smooth = quantize_tensor(
    weight, Spec("int8", (1, WHOLE), input=(SCALE,)), in_scale=in_scale
)
assert (smooth.dequantize() - weight).norm() < 0.03 * weight.norm()

# a step that the kernel does not declare is taken before it, and with it all steps before that one
rotated = quantize_tensor(
    weight,
    Spec("int8", (1, WHOLE), input=(hadamard_step(48), SCALE)),
    in_scale=in_scale,
)
for q in smooth, rotated:
    with kernels("reference"):
        expected = F.linear(x, q)
    torch.testing.assert_close(F.linear(x, q), expected, rtol=1e-4, atol=1e-3)
    print(explain(q, x), end="\n\n")
# --8<-- [end:use]
