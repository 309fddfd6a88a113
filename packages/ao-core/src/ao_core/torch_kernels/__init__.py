"""The kernels that need nothing but torch."""

from __future__ import annotations

from ao_core.torch_kernels.linear import LINEAR_KERNELS
from ao_core.torch_kernels.mm import MM_KERNELS
from ao_core.torch_kernels.producers import PRODUCER_KERNELS
from ao_core.torch_kernels.reference import REFERENCE_KERNELS
from ao_core.torch_kernels.rotation import ROTATION_KERNELS

__all__ = ["BUILTIN_KERNELS"]

BUILTIN_KERNELS = (
    *REFERENCE_KERNELS,
    *PRODUCER_KERNELS,
    *ROTATION_KERNELS,
    *LINEAR_KERNELS,
    *MM_KERNELS,
)
