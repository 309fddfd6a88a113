"""The fake of every op, with symbolic sizes: no size becomes a number, and no number of tokens recompiles."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from ao_kernels.triton.bsr import launch as bsr
from ao_kernels.triton.cast import op as cast
from ao_kernels.triton.fake_quantize import op as fake_quantize
from ao_kernels.triton.hadamard import op as hadamard
from ao_kernels.triton.rows import op as rows
from ao_kernels.triton.scaled_mm import launch as scaled_mm
from ao_kernels.triton.shared.ops import DEFINED
from ao_kernels.triton.sparsify import op as sparsify
from ao_kernels.triton.trellis import op as trellis
from ao_kernels.triton.w4a8 import launch as w4a8
from ao_kernels.triton.weight_only import op as weight_only
from ao_kernels.triton.weight_only import op_experts

MODULES = (
    bsr,
    cast,
    fake_quantize,
    hadamard,
    rows,
    scaled_mm,
    sparsify,
    trellis,
    w4a8,
    weight_only,
    op_experts,
)
HALF, INT8, INT16, INT32, FLOAT = torch.float16, torch.int8, torch.int16, torch.int32, torch.float32
#: numbers of tokens: symbols in each test
M, BATCH = 37, 5


def words(*lead):
    return torch.zeros(*lead, 2, 2, 1, 128, 64, dtype=INT16), torch.zeros(*lead, 2, 8, 128)


QDATA, SCALE = words()
TABLE, OFFS, BY = torch.zeros(16, dtype=INT32), torch.zeros(3, dtype=INT32), torch.zeros(M, 1)
X, CODES = torch.zeros(BATCH, M, 300, dtype=HALF), torch.zeros(M, 300, dtype=INT8)
SIZES = (140, 300, 64, "int4")
BLOCKS = torch.zeros(6, 16, 16, dtype=HALF)
MATRIX = torch.zeros(M, 320, dtype=HALF)
INDEX = torch.zeros(5, dtype=INT32)
#: op → (arguments, shapes of results)
CALLS = {
    "plane16_linear": ((X, QDATA, SCALE, None, TABLE, None, *SIZES), [(BATCH, M, 140)]),
    "plane16_dequantize": ((QDATA, SCALE, None, TABLE, *SIZES, HALF), [(140, 300)]),
    "plane16_embedding": (
        (torch.zeros(BATCH, M, dtype=torch.int64), QDATA, SCALE, None, TABLE, *SIZES, HALF), [(BATCH, M, 300)]
    ),
    "plane16_grouped_linear": (
        (X[0], *words(3), None, TABLE, OFFS, *SIZES), [(M, 140)]
    ),
    "plane32_linear": (
        (
            CODES, BY, None, torch.zeros(2, 2, 128, 32, dtype=INT32), SCALE, None, None, None, 140, 64,
            "int4",
            HALF,
        ),
        [(M, 140)],
    ),
    "scaled_matmul": (
        (CODES, torch.zeros(48, 300, dtype=INT8), BY, torch.zeros(48, 1), "row", "row", HALF), [(M, 48)]
    ),
    "bsr_linear": ((X, BLOCKS, INDEX, INDEX, INDEX, None, 60, 300), [(BATCH, M, 60)]),
    "cast_dual": ((MATRIX, "f8e4m3", "row"), [(M, 320), (M, 1), (320, M), (320, 1)]),
    "cast_plain": ((MATRIX, "f8e5m2", "block"), [(M, 320), (M, 3)]),
    "row_codes": ((MATRIX, None, "uint8", "plain"), [(M, 320), (M, 1), (M, 1)]),
    "round_blocks": ((X, "f8e4m3", 32, "e8m0", "floor"), [(BATCH, M, 300)]),
    "hadamard_blocks": ((MATRIX, 64, False), [(M, 320)]),
    "sparsify24": ((MATRIX,), [(M, 160), (M, 40)]),
    "sparsify24_both": (
        (MATRIX, "cutlass"), [(64, 160), (64, 2, 10), (320, 32), (320, 2, 2), (8, 40, 8)]
    ),
    "ring_linear": (
        (X, torch.zeros(2, 300 * 32, dtype=torch.uint8), torch.zeros(140, 1), None, 2, 140), [(BATCH, M, 140)]
    ),
    "ring_dequantize": (
        (torch.zeros(2, 300 * 32, dtype=torch.uint8), torch.zeros(140, 1), 2, 140, 300, HALF), [(140, 300)]
    ),
    "tile_mask": ((MATRIX,), [(M, 320)]),
}  # fmt: skip


def _values(env):
    """What symbols stand for; torch has given the attribute another name."""
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    return getattr(env, name)


def test_every_op_has_a_call():
    assert all(module.__name__.startswith("ao_kernels.triton") for module in MODULES)
    assert CALLS.keys() == DEFINED.keys()


@pytest.mark.parametrize("name", CALLS)
def test_no_size_becomes_a_number(name):
    arguments, shapes = CALLS[name]
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def symbolic(x):
        """With a symbol for each number of tokens."""
        sizes = [
            DimDynamic.DYNAMIC if size in (M, BATCH) else DimDynamic.STATIC for size in x.shape
        ]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(sizes))

    made = [symbolic(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    with mode:
        found = DEFINED[name](*made)
    found = found if isinstance(found, (tuple, list)) else [found]
    assert not env.replacements
    # that a slice ends within its tensor is asked, and holds for every size
    assert not any(isinstance(guard.expr, sympy.Equality) for guard in env.guards)
    hints = {symbol: int(value) for symbol, value in _values(env).items()}
    assert [
        tuple(
            int(size.node.expr.subs(hints)) if isinstance(size, torch.SymInt) else size
            for size in x.shape
        )
        for x in found
    ] == shapes
