"""The kernels of the torch band, which need nothing but torch, and the references of ao-core's ops."""

from __future__ import annotations

from ao_core.torch_kernels.emulated_mm import EMULATED_MM_KERNELS
from ao_core.torch_kernels.linear import LINEAR_KERNELS
from ao_core.torch_kernels.mm import MM_KERNELS

__all__ = ["BUILTIN_KERNELS"]

#: the references come with their ops, see `ao_core.ops`
BUILTIN_KERNELS = (*LINEAR_KERNELS, *MM_KERNELS, *EMULATED_MM_KERNELS)
