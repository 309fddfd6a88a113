"""Checks of attention over quantized keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import hadamard_step
from ao_core.ext.kernels import Attention
from ao_kernels.triton.attend.op import STAGES, Shape, launch_shape, settings
from ao_kernels.triton.attend.operand import Operand, operand
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, PDL, REGISTERS, SHARED, TYPES

__all__ = ["CHECKS"]

_MEMORY = 32768
#: what may begin anywhere: the kernel's `do_not_specialize_on_alignment`
_ANYWHERE = ("center_ptr", "start_ptr", "stop_ptr", "sinks_ptr", "counts_ptr")
_INT8, _FLOAT8 = Spec("int8", (1, WHOLE), "float16"), Spec("f8e4m3", (1, WHOLE), "float16")


def _uint4(block: tuple[int, int], dim: int) -> Spec:
    return Spec("uint4", block, "float16", "float", "packed", input=(hadamard_step(dim),))


@dataclass(frozen=True)
class _Attend:
    """A call as the kernel is compiled for it: heads as those of Llama-3-8B, or with other elements."""

    recipe: str
    rows: int = 4
    dim: int = 128
    dtype: torch.dtype = BF16
    arch: int = 90
    softcap: float = 0.0
    #: whether all that may be given is: padding, sinks
    everything: bool = False
    #: heads of keys in all rows of the batch: of many, tokens are in one split
    heads: int = 8

    @property
    def shape(self) -> Shape:
        """How it is launched."""
        return launch_shape(self.rows, self.heads, _MEMORY, 132)

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Those of the recipes of KV caches."""
        pairs = {
            "kv8": (_INT8, _INT8),
            "k8v4": (_INT8, _uint4((1, 64), self.dim)),
            "kv4": (_uint4((128, 1), self.dim), _uint4((1, WHOLE), self.dim)),
            "kv_fp8": (_FLOAT8, _FLOAT8),
        }
        key, value = (operand(spec, self.dim, _MEMORY) for spec in pairs[self.recipe])
        assert isinstance(key, Operand)
        assert isinstance(value, Operand)
        return key, value

    @property
    def name(self) -> str:
        dim = "" if self.dim == 128 else f" D {self.dim}"
        given = " softcap" * (self.softcap != 0) + " everything" * self.everything
        given += f" heads {self.heads}" * (self.heads != 8)
        return f"sm_{self.arch} attend {self.recipe} {ELEMENTS[self.dtype]} rows {self.rows}{dim}{given}"


def _build(case: _Attend) -> Build:
    """The kernel `attend`, as `op.attend` launches it: in splits where there are few rows."""
    from ao_kernels.triton.attend import kernel

    key, value = case.operands
    shape = case.shape
    split = shape.splits > 1
    q, scale, zero = TYPES[case.dtype], "*fp16", "*fp16"
    pointers = {
        "q_ptr": q, "key_ptr": "*i16", "key_scale_ptr": scale, "key_zero_ptr": zero,
        "value_ptr": "*i16", "value_scale_ptr": scale, "value_zero_ptr": zero,
        "tail_key_ptr": q, "tail_value_ptr": q, "center_ptr": "*fp32", "start_ptr": "*i64",
        "stop_ptr": "*i64", "sinks_ptr": "*fp32", "counts_ptr": "*i64", "out_ptr": "*fp32" if split else q,
        "state_ptr": "*fp32" if split else q,
    }  # fmt: skip
    absent = ["key_table_ptr", "value_table_ptr"]
    absent += [] if case.everything else ["start_ptr", "stop_ptr", "sinks_ptr"]
    for name, numbers in (("key_zero_ptr", key.numbers), ("value_zero_ptr", value.numbers)):
        absent += [] if numbers == "uint4" else [name]
    pointers = {name: kind for name, kind in pointers.items() if name not in absent}
    sizes = ("heads", "memory", "slots", "queries", "group", "window", "coded_splits")
    strides = tuple(
        f"stride_{x}{y}" for x, ys in (("q", "bht"), ("k", "bhr"), ("v", "bhr")) for y in ys
    )
    floats = dict.fromkeys(("scale", "softcap"), "fp32")
    attention = Attention(1.0, softcap=case.softcap)
    chosen = settings(shape, key, value, attention, ELEMENTS[case.dtype], split=split)
    return Build(
        kernel.attend,
        {**pointers, **dict.fromkeys((*sizes, *strides), "i32"), **floats},
        chosen | dict.fromkeys(absent) | {"PDL": case.arch >= 90},
        case.arch,
        shape.warps,
        STAGES,
        (*(name for name in pointers if name not in _ANYWHERE), *strides),
    )


def _check(budget: float, case: _Attend) -> Check:
    """For 128 bytes of codes. The scales of tokens, few numbers, change their layout in the loop."""
    key, value = case.operands
    if case.arch >= 100 and case.rows > 4:
        # tensor memory: another loop, for which no budget is known
        build = partial(_build, case)
        return Check(case.name, build, REGISTERS, SHARED[case.arch], conversions=5)
    size = sum(case.shape.block_n * 2 * each.dim // each.planes for each in (key, value))
    # beside shuffles, ptxas keeps a call for what runs before sm_90 in threads that have parted
    absent = ("I2F", "LDL", "STL", *(("CALL",) if case.arch >= 90 else ()))
    return Check(
        case.name,
        partial(_build, case),
        REGISTERS,
        SHARED[case.arch],
        conversions=5,
        work=size / 128,
        budget=budget,
        # not that of the tail, which has nothing to decode
        holding=("HFMA2", "HMUL2"),
        present=("LDGSTS", "LDSM|LDS", "HMMA|HGMMA|UTCHMMA"),
        anywhere=PDL,
        absent=absent,
    )


RECIPES = ("kv8", "k8v4", "kv4", "kv_fp8")
#: instructions of decoding, of 64 queries at a time, and of 32
_DECODE = dict(zip(RECIPES, (18.6, 32.5, 43.5, 19.6), strict=True))
CHECKS = (
    *(_check(_DECODE[recipe], _Attend(recipe)) for recipe in RECIPES),
    _check(85, _Attend("kv8", 2048)),
)
