"""The records that ao-kernels adds to the registry of ao-core."""

from __future__ import annotations

from collections.abc import Iterable

from ao_core import Kernel, Layout, hookimpl
from ao_kernels.cpu.attend import ATTEND_KERNELS as CPU_ATTEND_KERNELS
from ao_kernels.cpu.block_sparse import BLOCK_SPARSE_KERNELS, BLOCK_SPARSE_LAYOUTS
from ao_kernels.cpu.blocks import BLOCK_KERNELS as CPU_BLOCK_KERNELS
from ao_kernels.cpu.compact import COMPACT_KERNELS, COMPACT_LAYOUTS
from ao_kernels.cpu.decoder import DECODER_KERNELS
from ao_kernels.cpu.dense import DENSE_KERNELS
from ao_kernels.cpu.embedding import TILE_KERNELS
from ao_kernels.cpu.grouped import GROUPED_KERNELS
from ao_kernels.cpu.hadamard import HADAMARD_KERNELS as CPU_HADAMARD_KERNELS
from ao_kernels.cpu.library import isa, unavailable, usable_isas
from ao_kernels.cpu.linear import LINEAR_KERNELS
from ao_kernels.cpu.optim import OPTIM_KERNELS
from ao_kernels.cpu.quantize import CODE_KERNELS
from ao_kernels.cpu.rules import RULE_KERNELS
from ao_kernels.cpu.search import SEARCH_KERNELS
from ao_kernels.cpu.sums import SUMS_KERNELS
from ao_kernels.cpu.tail import TAIL_KERNELS
from ao_kernels.cpu.tile_mask import MASK_KERNELS
from ao_kernels.cpu.tiles import LAYOUTS
from ao_kernels.cpu.trellis import TRELLIS_KERNELS as CPU_TRELLIS_KERNELS
from ao_kernels.cpu.two_four import TWO_FOUR_KERNELS
from ao_kernels.cuda.records import CUDA_KERNELS
from ao_kernels.triton.adam.records import ADAM_KERNELS
from ao_kernels.triton.attend.records import ATTEND_KERNELS as TRITON_ATTEND_KERNELS
from ao_kernels.triton.bsr.layout import BSR_LAYOUTS
from ao_kernels.triton.bsr.records import BSR_KERNELS
from ao_kernels.triton.cast.records import CAST_KERNELS
from ao_kernels.triton.fake_quantize.records import BLOCK_KERNELS
from ao_kernels.triton.hadamard.records import HADAMARD_KERNELS as TRITON_HADAMARD_KERNELS
from ao_kernels.triton.rows.records import ROW_KERNELS
from ao_kernels.triton.scaled_mm.records import DYNAMIC_KERNELS, SCALED_LAYOUTS
from ao_kernels.triton.sparsify.records import SPARSIFY_KERNELS
from ao_kernels.triton.trellis.records import TRELLIS_KERNELS as TRITON_TRELLIS_KERNELS
from ao_kernels.triton.w4a8.records import DYNAMIC4_KERNELS, DYNAMIC4_LAYOUTS
from ao_kernels.triton.weight_only.records import LAYOUTS as TRITON_LAYOUTS
from ao_kernels.triton.weight_only.records import PLANE16_KERNELS


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)


@hookimpl
def ao_layouts() -> Iterable[Layout]:
    """Weights as the compiled matmuls read them."""
    triton = (*TRITON_LAYOUTS, *DYNAMIC4_LAYOUTS, *BSR_LAYOUTS, *SCALED_LAYOUTS)
    return (*LAYOUTS, *COMPACT_LAYOUTS, *BLOCK_SPARSE_LAYOUTS, *triton)


@hookimpl
def ao_kernels() -> Iterable[Kernel]:
    """The compiled kernels; `Kernel.unavailable` loads them, or says why they cannot run."""
    cpu = (*LINEAR_KERNELS, *GROUPED_KERNELS, *TILE_KERNELS, *CODE_KERNELS, *OPTIM_KERNELS)
    cpu = (
        *cpu,
        *RULE_KERNELS,
        *BLOCK_SPARSE_KERNELS,
        *TWO_FOUR_KERNELS,
        *COMPACT_KERNELS,
        *MASK_KERNELS,
        *CPU_HADAMARD_KERNELS,
        *CPU_ATTEND_KERNELS,
        *TAIL_KERNELS,
        *SUMS_KERNELS,
        *SEARCH_KERNELS,
        *CPU_BLOCK_KERNELS,
        *CPU_TRELLIS_KERNELS,
        *DECODER_KERNELS,
        *DENSE_KERNELS,
    )
    triton = (*PLANE16_KERNELS, *ADAM_KERNELS, *CAST_KERNELS, *ROW_KERNELS, *BLOCK_KERNELS)
    triton = (*triton, *DYNAMIC_KERNELS, *DYNAMIC4_KERNELS, *TRITON_HADAMARD_KERNELS)
    triton = (*triton, *TRITON_ATTEND_KERNELS, *TRITON_TRELLIS_KERNELS)
    return (*cpu, *CUDA_KERNELS, *triton, *SPARSIFY_KERNELS, *BSR_KERNELS)


@hookimpl
def ao_machine() -> Iterable[str]:
    """The instruction set of the C++ kernels; nothing where these cannot serve, which each of them says."""
    if unavailable() is not None:
        return ()
    others = ", ".join(name for name in usable_isas() if name != isa())
    return (f"C++ kernels of the instruction set {isa()}; AO_CPU_ISA can name {others}",)
