"""The search for scales on the CPU: a row stays in the cache while all candidates are tried."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ao_core import Call, Kernel, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import SCALE_STORAGE, SearchPlan, zero_storage
from ao_kernels.cpu.formats import Format, format_of
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.quantize import ELEMENTS
from ao_kernels.cpu.sums import refuses_sums

__all__ = ["SEARCH_KERNELS", "search_scales"]

#: kinds of zero points, as the C++ code numbers them
_POINTS = {"none": 0, "int": 1, "float": 2, "offset": 3}


def search_scales(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    importance: Tensor | None,
    plan: SearchPlan,
    spec: Spec,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The best scale and zero point of each row, and whether they are better without doubt, all (B, 1).

    The same bits for any number of threads.
    """
    fmt = format_of(registry.dtypes.get(spec.dtype))
    assert isinstance(fmt, Format)  # the kernel has accepted the call
    storage, least, greatest = SCALE_STORAGE[str(spec.scale_dtype)]
    points = torch.float32 if spec.zero_point == "int" else zero_storage(spec.zero_point, storage)
    found, point, better = torch.ops.ao_kernels.search_scales(
        x, scale, zero_point, importance, plan.power, plan.gain, *_factors(plan.stages), plan.fits,
        _POINTS[spec.zero_point], storage, points, least, greatest, torch.finfo(points).max, *fmt,
    )  # fmt: skip
    return found, None if zero_point is None else point, better


@lru_cache(maxsize=64)
def _factors(stages: tuple[tuple[tuple[float, ...], ...], ...]) -> tuple[Tensor, Tensor]:
    """Those of all stages, (2, all of them), and how many each has."""
    rows = [[factor for ends in stages for factor in ends[end]] for end in range(2)]
    counts = torch.tensor([len(low) for low, _ in stages], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.float32).reshape(2, -1), counts


def _refuses(call: Call) -> str | None:
    name = call.spec.scale_dtype
    if (
        not isinstance(name, str)
        or name not in SCALE_STORAGE
        or SCALE_STORAGE[name][0] not in ELEMENTS
    ):
        return f"rounds scales to float32, bfloat16 and float16, not {name}"
    return refuses_sums(call)


SEARCH_KERNELS = (
    Kernel(
        "cpu_search_scales",
        "search_scales",
        "plain",
        "cpu",
        search_scales,
        50,
        unavailable,
        _refuses,
        lambda call: isa(),
    ),
)
