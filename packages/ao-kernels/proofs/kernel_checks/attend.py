"""Checks of attention over quantized keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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

#: tokens, heads of keys, and elements of a head: those of Llama-3-8B
_MEMORY, _HEADS, _DIM = 32768, 8, 128
#: what may begin anywhere: the kernel's `do_not_specialize_on_alignment`
_ANYWHERE = ("center_ptr", "start_ptr", "stop_ptr", "sinks_ptr", "counts_ptr")
_INT8, _FLOAT8 = Spec("int8", (1, WHOLE), "float16"), Spec("f8e4m3", (1, WHOLE), "float16")


def _uint4(block: tuple[int, int]) -> Spec:
    return Spec("uint4", block, "float16", "float", "packed", input=(hadamard_step(_DIM),))


#: those of the recipes of KV caches
_FORMATS = {
    "kv8": (_INT8, _INT8),
    "k8v4": (_INT8, _uint4((1, 64))),
    "kv4": (_uint4((128, 1)), _uint4((1, WHOLE))),
    "kv_fp8": (_FLOAT8, _FLOAT8),
}


@dataclass(frozen=True)
class _Attend:
    """A call as the kernel is compiled for it."""

    recipe: str
    rows: int = 4

    @property
    def shape(self) -> Shape:
        """How it is launched."""
        return launch_shape(self.rows, _HEADS, _MEMORY, 132)

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Keys and values."""
        key, value = (operand(spec, _DIM, _MEMORY) for spec in _FORMATS[self.recipe])
        assert isinstance(key, Operand)
        assert isinstance(value, Operand)
        return key, value


def _build(case: _Attend) -> Build:
    """The kernel `attend`, as `op.attend` launches it: in splits where there are few rows."""
    from ao_kernels.triton.attend import kernel

    key, value = case.operands
    shape = case.shape
    split = shape.splits > 1
    q, scale, zero = TYPES[BF16], "*fp16", "*fp16"
    pointers = {
        "q_ptr": q, "key_ptr": "*i16", "key_scale_ptr": scale, "key_zero_ptr": zero,
        "value_ptr": "*i16", "value_scale_ptr": scale, "value_zero_ptr": zero,
        "tail_key_ptr": q, "tail_value_ptr": q, "center_ptr": "*fp32", "start_ptr": "*i64",
        "stop_ptr": "*i64", "sinks_ptr": "*fp32", "counts_ptr": "*i64", "out_ptr": "*fp32" if split else q,
        "state_ptr": "*fp32" if split else q,
    }  # fmt: skip
    absent = ["key_table_ptr", "value_table_ptr", "start_ptr", "stop_ptr", "sinks_ptr"]
    for name, numbers in (("key_zero_ptr", key.numbers), ("value_zero_ptr", value.numbers)):
        absent += [] if numbers == "uint4" else [name]
    pointers = {name: kind for name, kind in pointers.items() if name not in absent}
    sizes = ("heads", "memory", "slots", "queries", "group", "window", "coded_splits")
    strides = tuple(
        f"stride_{x}{y}" for x, ys in (("q", "bht"), ("k", "bhr"), ("v", "bhr")) for y in ys
    )
    floats = dict.fromkeys(("scale", "softcap"), "fp32")
    chosen = settings(shape, key, value, Attention(1.0), ELEMENTS[BF16], split=split)
    return Build(
        kernel.attend,
        {**pointers, **dict.fromkeys((*sizes, *strides), "i32"), **floats},
        chosen | dict.fromkeys(absent) | {"PDL": True},
        90,
        shape.warps,
        STAGES,
        (*(name for name in pointers if name not in _ANYWHERE), *strides),
    )


def _check(budget: float, case: _Attend) -> Check:
    """For 128 bytes of codes. The scales of tokens, few numbers, change their layout in the loop."""
    key, value = case.operands
    size = sum(case.shape.block_n * 2 * each.dim // each.planes for each in (key, value))
    return Check(
        f"sm_90 attend {case.recipe} bf16 rows {case.rows}",
        partial(_build, case),
        REGISTERS,
        SHARED,
        conversions=5,
        work=size / 128,
        budget=budget,
        # not that of the tail, which has nothing to decode
        holding=("HFMA2", "HMUL2"),
        present=("LDGSTS", "LDSM|LDS", "HMMA|HGMMA"),
        anywhere=PDL,
        absent=("I2F", "LDL", "STL", "CALL"),
    )


RECIPES = ("kv8", "k8v4", "kv4", "kv_fp8")
#: instructions of decoding, of 64 queries at a time, and of 32
_DECODE = dict(zip(RECIPES, (18.6, 32.5, 43.5, 19.6), strict=True))
CHECKS = (
    *(_check(_DECODE[recipe], _Attend(recipe)) for recipe in RECIPES),
    _check(85, _Attend("kv8", 2048)),
)
