"""The kernels that decode tiles: rows for embeddings, whole weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.kernels import select
from ao_core.testing import KernelSuite
from ao_kernels.cpu.embedding import TILE_KERNELS

SPECS = (
    Spec("int4", (1, 32), "bfloat16"),
    Spec("uint3", (1, 24), "float16", "int"),
    Spec("nf4", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("f6e3m2", (1, 32), "e8m0"),
    Spec("uint5", (1, 16), Spec("uint6", (1, 4), "float16", layout="packed"), "offset"),
    Spec("int8", (1, WHOLE)),
    Spec("f8e4m3", (16, 64), "e4m3", "float"),
)


def layouts_of(spec: Spec) -> tuple[str, str]:
    bits = registry.dtypes.get(spec.dtype).bits
    return ("plain", "cpu_tiles8") if bits == 8 else ("packed", "cpu_tiles")


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_the_table(spec: Spec, dtype: torch.dtype) -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    canonical, tiles = layouts_of(spec)
    q = quantize_tensor(x, Spec(**{**spec.__dict__, "layout": canonical}))
    w, values = to_layout(q, tiles), q.dequantize()
    assert (
        select(Call("embedding", w.spec, (50, 96), (2, 3), dtype, "cpu")).name
        == f"{tiles}_embedding"
    )
    for ids in (torch.tensor([[0, 49, 7], [7, 16, 15]]), torch.tensor(3), torch.zeros(0, 2).long()):
        rows = F.embedding(ids, w)
        assert rows.dtype == dtype
        assert torch.equal(rows, values[ids])
    assert torch.equal(w.dequantize(), values)


@pytest.mark.parametrize("index", [50, -1])
def test_out_of_range_as_in_torch(index: int) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    w = to_layout(quantize_tensor(x, Spec("int4", (1, 32), layout="packed")), "cpu_tiles")
    for table in (x, w):
        with pytest.raises(IndexError, match="out of range"):
            F.embedding(torch.tensor([1, index]), table)


class Decoding(KernelSuite):
    """Every kind of spec in one shape: `test_tiles_ops.py` has the sizes."""

    shapes = ((33, 70), (3, 8, 40))
    dtypes = (torch.bfloat16,)


for _kernel in TILE_KERNELS:
    _name = f"Test{_kernel.name.title().replace('_', '')}"
    globals()[_name] = type(_name, (Decoding,), {"kernel": _kernel.name})
