"""The kernels of `plane24` in Triton's interpreter, on ragged shapes, against float64; see `test_plane16`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import pack_bits
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared.tile_config import LaunchConfig
from ao_kernels.triton.weight_only import op
from ao_kernels.triton.weight_only.launch import tile_config_of
from ao_kernels.triton.weight_only.layout24 import Plane24

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def problem(shape, group, scale=torch.float16):
    """Values in float64, and the operands of the op."""
    generator = torch.Generator().manual_seed(sum(shape))
    n, k = shape
    fours = -(-k // 4)
    places = torch.rand(n, fours, 4, generator=generator).argsort(-1)[..., :2].sort(-1).values
    kept = torch.randint(-8, 8, (n, fours, 2), generator=generator)
    dense = torch.zeros(n, fours, 4, dtype=torch.int64).scatter_(-1, places, kept).flatten(1)
    index = F.pad(places[..., 0] | places[..., 1] << 2, (0, fours % 2), value=0b0100)
    width = k if group == WHOLE else group
    scales = torch.rand(n, -(-k // width), generator=generator).to(scale)
    parts = {
        "qdata": pack_bits((kept & 15).to(torch.uint8).flatten(1), 4),
        "index": pack_bits(index.to(torch.uint8), 4),
        "scale": scales,
    }
    dtype = registry.dtypes.get("int4")
    spec = Spec("int4", (1, group), str(scale).removeprefix("torch."), layout="plane24")
    parts = Plane24().from_canonical(parts, spec, shape, dtype)
    values = dense[:, :k].double() * scales.double().repeat_interleave(width, 1)[:, :k]
    operands = (parts["qdata"], parts["scale"], None, parts["table"])
    return values, operands, (n, k, width, "int4")


@pytest.mark.parametrize(
    ("shape", "group", "scale"),
    [
        ((140, 300), 128, torch.float16),
        ((20, 90), 32, torch.float32),
        ((20, 270), 64, torch.float32),
        ((20, 70), WHOLE, torch.float16),
        pytest.param((140, 600), 256, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_linear(shape, group, scale):
    values, operands, sizes = problem(shape, group, scale)
    n, k = shape
    bias = gaussian((n,), seed=7).half()
    for m, splits in ((0, 1), (3, 2), (17, 1)):
        x = gaussian((m, k), seed=m).half()
        # as launches choose: no split is empty, and a tile has 128 of K
        setting = LaunchConfig(tile_config_of(max(m, 1)), min(splits, -(-k // 128)))
        out = op.launch_linear(x, *operands, bias, *sizes, True, setting=setting)
        expected = x.double() @ values.t() + bias.double()
        assert (out.shape, out.dtype) == ((m, n), torch.float16)
        assert (out.double() - expected).norm() <= 5e-4 * expected.norm()


@pytest.mark.parametrize(("shape", "group"), [((140, 300), 128), ((20, 90), 32), ((5, 70), WHOLE)])
def test_dequantize(shape, group):
    """Rounded once."""
    values, operands, sizes = problem(shape, group)
    for dtype in (torch.float32, torch.float16):
        dense = op.plane16_dequantize(*operands, *sizes, dtype, True)
        assert torch.equal(dense, values.float().to(dtype))


def test_custom_op():
    _, operands, sizes = problem((16, 70), 32)
    x = gaussian((2, 3, 70)).half()
    args = (x, *operands, None, *sizes, True)
    results = torch.library.opcheck(torch.ops.ao_kernels.plane16_linear, args)
    assert set(results.values()) == {"SUCCESS"}, results
