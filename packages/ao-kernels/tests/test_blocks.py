"""The kernels of `qkv` and `mlp` on the CPU: the suites, and bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import registry, repack
from ao_core.ext.kernels import GATES, BlockOp, Heads, NormBefore, Projection
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian

SPEC = Spec("int4", (1, 32), "bfloat16", layout="packed")


class TestQkv(KernelSuite):
    kernel = "cpu_tiles_qkv"


class TestQkv8(KernelSuite):
    kernel = "cpu_tiles8_qkv"


class TestMlp(KernelSuite):
    kernel = "cpu_tiles_mlp"


class TestMlp8(KernelSuite):
    kernel = "cpu_tiles8_mlp"


def weight(n: int, k: int, dtype: torch.dtype) -> QTensor:
    """In tiles."""
    return repack(quantize_tensor((gaussian((n, k)) / k**0.5).to(dtype), SPEC))


def both(op: str, *args: Any) -> tuple[Any, Any]:
    """What the kernel and the reference give."""
    return tuple(
        registry.kernels.get(f"{name}_{op}").fn(*args) for name in ("cpu_tiles", "reference")
    )


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_that_of_the_reference(dtype: torch.dtype, tokens: int) -> None:
    """Matmuls are the same, and 16-bit numbers hide the order of the sums of norms: nearly all bits agree."""
    norm = NormBefore(gaussian((96,)).to(dtype), 1e-5, "rounded")
    tables = gaussian((2, 2, tokens, 24)).to(dtype)
    x = gaussian((2, tokens, 96), seed=2).to(dtype)
    found = both("qkv", x, norm, Projection(weight(200, 96, dtype)), *tables, Heads(3, 1, 40))
    for a, b in zip(*found, strict=True):
        assert (a == b).float().mean() > 0.999
    rows = Projection(weight(352, 96, dtype)), Projection(weight(96, 176, dtype))
    for gate in GATES:
        a, b = both("mlp", x, gaussian(x.shape, seed=3).to(dtype), norm, None, *rows, gate)
        assert (a == b).float().mean() > 0.995


@pytest.mark.parametrize("gate", GATES)
def test_gates_at_the_ends_of_the_range(gate: str) -> None:
    """NaN stays NaN; large numbers are themselves, or nothing, without an overflow on the way."""
    values = torch.tensor(
        [0.0, -0.0, 1e-30, 80.0, -80.0, 200.0, -200.0, 1e4, -1e4, torch.nan, 3.0, -3.0]
    )
    wide = torch.zeros(16)
    wide[: len(values)] = values
    rows = torch.cat([wide, torch.ones(16)])
    one = repack(quantize_tensor(torch.eye(16), Spec("int8", (1, 16), "float32")))
    both_rows = repack(quantize_tensor(torch.zeros(32, 16), Spec("int8", (1, 16), "float32")))
    fn = registry.kernels.get("cpu_tiles8_mlp").fn
    found = fn(
        torch.zeros(1, 16), None, None, None, Projection(both_rows, rows), Projection(one), gate
    )
    x = wide.double()
    x = x * (x if gate == "silu" else 1.5957691216057308 * (x + 0.044715 * x**3)).sigmoid()
    assert found[0].isnan().any()  # a NaN reaches all rows of the matmul behind it
    clean = torch.where(wide.isnan(), 0.0, wide)
    found = fn(
        torch.zeros(1, 16), None, None, None, Projection(both_rows, torch.cat([clean, torch.ones(16)])),
        Projection(one), gate,
    )  # fmt: skip
    expected = torch.where(wide.isnan(), 0.0, x)
    assert ((found[0].double() - expected).abs() <= 1e-5 * expected.abs() + 1e-5).all()


def test_the_same_bits_for_any_number_of_threads() -> None:
    x = gaussian((1, 50, 96)).bfloat16()
    args = (x, x, NormBefore(torch.ones(96).bfloat16(), 1e-5, "direct"), None)
    rows = Projection(weight(352, 96, x.dtype)), Projection(weight(96, 176, x.dtype))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(registry.kernels.get("cpu_tiles_mlp").fn(*args, *rows, "silu"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_op_finds_the_kernel_and_says_what_is_wrong() -> None:
    dtype = torch.bfloat16
    projection = Projection(weight(80, 96, dtype))
    op = BlockOp("qkv", (projection.weight,))
    x, tables = gaussian((1, 2, 96)).to(dtype), gaussian((2, 1, 2, 16)).to(dtype)
    query, key, value = op(x, None, projection, *tables, Heads(3, 1, 16))
    assert [t.shape for t in (query, key, value)] == [(1, 3, 2, 16), (1, 1, 2, 16), (1, 1, 2, 16)]
    with pytest.raises(RuntimeError, match=r"heads: are 4 \+ 2 \* 1 of 16 elements"):
        op(x, None, projection, *tables, Heads(4, 1, 16))
    with pytest.raises(RuntimeError, match="cosine: has shape"):
        op(x, None, projection, tables[0, :, :1], tables[1], Heads(3, 1, 16))
    norm = NormBefore(torch.ones(96), 1e-5, "rounded")
    with pytest.raises(RuntimeError, match="norm: has dtype Float"):
        op(x, norm, projection, *tables, Heads(3, 1, 16))


def test_fakes_have_the_shapes_of_the_ops() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = torch.bfloat16
    joint, down = weight(80, 96, dtype), weight(96, 40, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, tables = torch.empty(2, 3, 96, dtype=dtype), torch.empty(2, 1, 3, 16, dtype=dtype)
        qkv = registry.kernels.get("cpu_tiles_qkv").fn(
            x, None, Projection(joint), *tables, Heads(3, 1, 16)
        )
        mlp = registry.kernels.get("cpu_tiles_mlp").fn(
            x, None, None, None, Projection(joint), Projection(down), "silu"
        )
    assert [t.shape for t in qkv] == [(2, 3, 3, 16), (2, 1, 3, 16), (2, 1, 3, 16)]
    assert mlp.shape == (2, 3, 96)
