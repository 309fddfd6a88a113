"""The layout `bsr_sorted`, and what its matmul says where it cannot serve."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import NO_SCALE, registry
from ao_kernels.triton.bsr import launch as bsr
from ao_kernels.triton.bsr.layout import SIDES, BsrSorted

KERNEL = registry.kernels.get("triton_bsr_sorted_linear")
LAYOUT = BsrSorted()
SPEC = Spec("bf16", (1, WHOLE), NO_SCALE, layout="bsr_sorted")


def sized(side, name="bf16"):
    return Spec(name, (1, WHOLE), NO_SCALE, layout="bsr_sorted", options=(("blocksize", side),))


def parts():
    """Rows of 1, 3, none and 2 blocks."""
    return {
        "qdata": torch.arange(6 * 16 * 16).view(6, 16, 16).bfloat16(),
        "col_indices": torch.tensor([1, 0, 1, 2, 0, 2], dtype=torch.int32),
        "crow_indices": torch.tensor([0, 1, 4, 4, 6], dtype=torch.int32),
    }


def test_and_back():
    fmt = registry.dtypes.get("bf16")
    there = LAYOUT.from_canonical(parts(), sized(16), (60, 40), fmt)
    assert there["row_order"].tolist() == [1, 3, 0, 2]
    assert there["row_order"].dtype == torch.int32
    back = LAYOUT.to_canonical(there, sized(16), (60, 40), fmt)
    assert back.keys() == parts().keys()
    assert all(torch.equal(back[name], part) for name, part in parts().items())


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (Spec("int8", (1, WHOLE)), (64, 64), "not int8"),
        (SPEC, (2, 64, 64), "2 dimensions"),
        (SPEC, (0, 64), "not empty"),
        (sized(48), (64, 64), "found blocksize=48"),
        (Spec("bf16", (1, WHOLE), NO_SCALE, act=Spec("int8", (1, WHOLE))), (64, 64), "activations"),
    ],
)
def test_what_does_not_fit(spec, shape, words):
    assert words in LAYOUT.refuses(spec, shape, registry.dtypes.get(spec.dtype))


def test_what_fits():
    for name in ("bf16", "fp16", "fp32"):
        for side in SIDES:
            assert LAYOUT.refuses(sized(side, name), (70, 33), registry.dtypes.get(name)) is None


def test_calls():
    def call(dtype=torch.bfloat16, m=3):
        return Call("linear", SPEC, (256, 512), (m, 512), dtype, "cuda")

    assert KERNEL.refuses(call()) is None
    assert "torch.bfloat16, found torch.float16" in KERNEL.refuses(call(torch.float16))
    assert KERNEL.describe(call(m=5000)).startswith("tiles of 128 rows")
    assert KERNEL.describe(call()).startswith("tiles of 16 rows")


@pytest.mark.parametrize(
    ("side", "programs", "blocks", "rows", "splits"),
    [
        (64, 64, 64 * 64, 64, 2),  # 64 rows: two each make 128
        (64, 16, 16 * 256, 16, 8),
        (64, 16, 16 * 15, 16, 1),  # no program gets fewer than 8 blocks
        (64, 448, 448 * 64, 448, 1),  # enough of them
        (16, 32, 32 * 256, 32, 4),  # smaller blocks, more of them
        (64, 64, 0, 64, 1),
    ],
)
def test_splits(side, programs, blocks, rows, splits):
    assert bsr.splits_of(side, programs, blocks, rows, 132) == splits
