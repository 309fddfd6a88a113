"""A known-answer test: what the kernels compute on a device, against float64, before they serve anybody.

It runs every kernel once: each way to store weights, with all codes, both dtypes of activations and each
number of rows that a kernel is compiled for. A right answer is kept on disk, see `ao_kernels.answers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core.ext.kernels import neutral

__all__ = ["Case", "cases", "problem", "reference"]

#: (x, qdata, scale, zero_point, bias, n, k, group, format) → y, as the op `cuda_linear`
Linear = Callable[..., Tensor]
#: sizes whose last tiles are not full
_N, _K = 160, 1000
#: of results in this dtype, relative to their norm
_MOST_ERROR = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Case(NamedTuple):
    """A way to store weights; `zero_point` is the dtype, where there are any."""

    name: str
    format: int
    group: int
    scale: torch.dtype
    zero_point: torch.dtype | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Of activations: one number for each kernel."""
        return (1, 13, 32) if self.zero_point not in (None, torch.uint8) else (1, 13, 32, 50)

    @property
    def plane(self) -> int:
        """K of a plane."""
        return min(self.group, 64)

    @property
    def planes(self) -> int:
        """Codes of a word."""
        return 2 if self.format else 4


CASES = (
    Case("int4 in groups of 128", 0, 128, torch.bfloat16),
    Case("int4 in rows", 0, _K, torch.float32),
    Case("int4 in groups of 32", 0, 32, torch.float16),
    Case("uint4 with integer zero points", 0, 64, torch.bfloat16, torch.uint8),
    Case("uint4 with integer zero points, in groups of 32", 0, 32, torch.bfloat16, torch.uint8),
    Case("uint4 with zero points in bfloat16", 0, 64, torch.bfloat16, torch.bfloat16),
    Case("uint4 with zero points in float32, in groups of 32", 0, 32, torch.float32, torch.float32),
    Case("int8 in rows", 1, _K, torch.float32),
    Case("f8e4m3 in rows", 2, _K, torch.float32),
)


def cases(
    case: Case, dtype: torch.dtype, rows: int, device: torch.device
) -> tuple[Tensor | int | None, ...]:
    """The arguments of the op for a case: random codes, and so all of them."""
    generator = torch.Generator().manual_seed(rows)
    width = case.planes * case.plane
    blocks, tiles = -(-_N // 128), -(-_K // width)
    codes = torch.randint(
        0, 256, (blocks, tiles, 1, 128, 2 * case.plane), dtype=torch.uint8, generator=generator
    )
    if case.format == 2:  # no NaN
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
    groups = 1 if case.group >= _K else tiles * (width // case.group)
    grid = blocks, groups, 128
    scale = (torch.rand(grid, generator=generator) + 0.5).to(case.scale)
    zero_point = None
    if case.zero_point is not None:
        zeros = torch.randint(0, 16, grid, generator=generator)
        whole = case.zero_point == torch.uint8
        zero_point = (zeros if whole else zeros + 0.25).to(case.zero_point).to(device)
    x = torch.randn(rows, _K, generator=generator).to(dtype)
    bias = torch.randn(_N, generator=generator).to(dtype)
    tensors = (
        x.to(device),
        codes.view(torch.int16).to(device),
        scale.to(device),
        zero_point,
        bias.to(device),
    )
    return (*tensors, _N, _K, case.group, case.format)


def reference(case: Case, arguments: tuple[Tensor | int | None, ...]) -> Tensor:
    """The result in float64, by the layout's description alone."""
    x, words, scale, zero_point, bias = (
        each.cpu() if isinstance(each, Tensor) else each for each in arguments[:5]
    )
    assert isinstance(x, Tensor)
    assert isinstance(words, Tensor)
    assert isinstance(scale, Tensor)
    bits = 16 // case.planes
    planes = [(words.int() >> bits * j) & (1 << bits) - 1 for j in range(case.planes)]
    # [blocks, tiles, 1, 128, plane] of each plane → [N, K]
    codes = torch.stack(planes, -2).squeeze(2).permute(0, 2, 1, 3, 4)
    codes = codes.reshape(codes.shape[0] * 128, -1)
    if case.format == 2:
        weight = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        weight = codes.double() - (128 if case.format else 8 if zero_point is None else 0)

    def spread(grid: Tensor) -> Tensor:
        each = grid.double().transpose(1, 2).reshape(len(weight), -1)
        return each.repeat_interleave(weight.shape[1] // each.shape[1], 1)

    if isinstance(zero_point, Tensor):
        weight = weight - spread(zero_point)
    dense = (weight * spread(scale))[:_N, :_K]
    out = x.double() @ dense.T
    return out + bias.double() if isinstance(bias, Tensor) else out


def problem(linear: Linear, device: torch.device) -> str | None:
    """None, or a sentence that says which kernel is wrong on a device, or what the device says."""
    with neutral(), torch.no_grad():  # a first call may be inside of a trace
        for case in CASES:
            for dtype in _MOST_ERROR:
                for rows in case.rows:
                    if reason := _problem(linear, device, case, dtype, rows):
                        return f"their known-answer test failed: {reason}"
    return None


def _problem(
    linear: Linear, device: torch.device, case: Case, dtype: torch.dtype, rows: int
) -> str | None:
    arguments = cases(case, dtype, rows, device)
    where = f"{case.name}, {rows} rows in {str(dtype).removeprefix('torch.')}"
    try:
        found = linear(*arguments).cpu().double()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as told:
        # of shared memory: such calls are refused
        return None if "shared memory" in str(told) else f"{where}: {told}"
    expected = reference(case, arguments)
    error = float((found - expected).norm() / expected.norm())
    return None if error <= _MOST_ERROR[dtype] else f"{where}: off by {error:.1g} of the result"
