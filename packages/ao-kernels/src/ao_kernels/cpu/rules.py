"""The kernel of `rule_step`: a program for all parameters, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ao_core import DType, Kernel, QTensor, Spec
from ao_core.ext import NO_SCALE, UnsupportedOp, registry
from ao_core.ext.numerics import quant_max_of
from ao_kernels.cpu.formats import format_of
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.optim import State, refuses_spec, state_of, unlike
from ao_kernels.optim import StepCall, check_contiguous, count_change

__all__ = ["RULE_KERNELS", "rule_step"]

#: dtypes of parameters, gradients and moments that are not quantized
_ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
#: their formats
_ELEMENT_FORMATS = ("fp32", "bf16", "fp16")
#: the operations of ao-optim's programs, in the order of `Operation` of csrc/cpu/optim/program.h
_OPERATIONS = (
    "scale", "shift", "add", "multiply", "divide", "over", "add_product", "add_ratio", "root", "sign",
    "magnitude", "at_least", "at_most", "constant", "above", "choose", "norm",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(_OPERATIONS)}
#: elements that share a scale, in flat moments of 4 bits
_NIBBLE_BLOCK = 128
#: what the op is told of how a moment is kept
_DENSE, _FLAT, _RANK1 = 0, 1, 2
#: how many moments and registers a program may have, and steps
_MOMENTS, _REGISTERS, _STEPS = 4, 16, 96
#: how many of the steps may be norms
_NORMS = 4


class Program(Protocol):
    """What the kernel looks at of a program of ao-optim."""

    @property
    def steps(self) -> Sequence[tuple[str, int, tuple[int, ...], float]]:
        """Operation, result, operands and number of each."""

    @property
    def outputs(self) -> Sequence[int]:
        """Registers of the parameter and the moments."""

    @property
    def registers(self) -> int:
        """How many there are."""


class Update(Protocol):
    """What the kernel looks at of an update of ao-optim."""

    @property
    def program(self) -> Program | str:
        """The program, or why there is none."""


class _Kept(NamedTuple):
    """How all tensors keep a moment: what the op is told."""

    kind: int
    parts: tuple[str, ...]
    format: State | None = None


def rule_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    lost: Sequence[Tensor],
    *,
    update: Update,
    seed: int | None,
) -> None:
    """One step of any rule in place: the op "rule_step" of ao-optim.

    The program is run in float32 for a block of 256 elements after the other, one operation at a time.
    Products and quotients in "add_product" and "add_ratio" are rounded, too; that in "add" is not where the
    processor can do so. Moments get the scales and codes that `quantize` gives for the new ones. Norms,
    and scales of rows and columns, take a pass before, which computes what they are of. `seed`: see
    csrc/cpu/optim/philox.h.

    Raises:
        UnsupportedOp: a tensor or the program is not of the kind that the kernel takes; nothing has changed.
    """
    if not params:
        return
    program = _usable(update.program)
    kept = [_kept_by(number, each) for number, each in enumerate(moments)]
    check_contiguous("rule_step of ao-kernels", params, grads)
    states = [
        getattr(moment, part) if part else moment
        for each, how in zip(moments, kept, strict=True)
        for part in how.parts
        for moment in each
    ]
    formats = [how.format for how in kept if how.format is not None]
    torch.ops.ao_kernels.rule_step(
        params,
        grads,
        lost,
        states,
        [how.kind for how in kept],
        [tensor for of in formats for tensor in of[:3]],
        [of.nan for of in formats],
        [of.quant_max for of in formats],
        [number for step in program.steps for number in _coded(*step)],
        [step[3] for step in program.steps],
        program.outputs,
        seed,
    )
    count_change(params)


def _usable(program: Program | str) -> Program:
    if isinstance(program, str):
        raise UnsupportedOp(f"update: rule_step of ao-kernels runs programs: {program}")
    if program.registers > _REGISTERS or len(program.steps) > _STEPS:
        raise UnsupportedOp(
            f"update: rule_step of ao-kernels has {_REGISTERS} registers for up to {_STEPS} steps, and the "
            f"program takes {program.registers} for {len(program.steps)}"
        )
    if (norms := sum(step[0] == "norm" for step in program.steps)) > _NORMS:
        raise UnsupportedOp(
            f"update: rule_step of ao-kernels takes up to {_NORMS} norms, not {norms}"
        )
    if unknown := sorted({step[0] for step in program.steps} - set(_CODES)):
        raise UnsupportedOp(f"update: rule_step of ao-kernels does not know {', '.join(unknown)}")
    return program


def _coded(operation: str, result: int, operands: tuple[int, ...], _: float) -> tuple[int, ...]:
    first, second, third = (*operands, 0, 0, 0)[:3]
    return _CODES[operation], result, first, second, third


def _kept_by(number: int, moments: Sequence[Tensor]) -> _Kept:
    first = moments[0]
    found: _Kept | str
    if not isinstance(first, QTensor):
        found = _dense(first.dtype, moments)
    else:
        found = unlike(moments) or _kept(first.spec)
    if isinstance(found, str):
        raise UnsupportedOp(f"moments[{number}]: rule_step of ao-kernels {found}")
    return found


def _dense(dtype: torch.dtype, moments: Sequence[Tensor]) -> _Kept | str:
    if any(isinstance(moment, QTensor) or moment.dtype != dtype for moment in moments):
        return "needs one format for all of them"
    return _Kept(_DENSE, ("",))


@lru_cache(maxsize=256)
def _kept(spec: Spec) -> _Kept | str:
    """How a format is kept, or a sentence that says why moments cannot have it."""
    if spec.scale_dtype == NO_SCALE and spec.dtype in _ELEMENT_FORMATS:
        return _Kept(_DENSE, ("",))
    dtype = registry.dtypes.get(spec.dtype)
    if dtype.bits == 8:
        found = refuses_spec(spec) or state_of(dtype)
        return found if isinstance(found, str) else _Kept(_FLAT, ("qdata", "scale"), found)
    if spec.scale_dtype != "float32" or spec.zero_point != "none":
        return f"needs float32 scales and no zero points, found {spec}"
    if spec.layout == "flat" and spec.block == (_NIBBLE_BLOCK,) and not spec.options:
        state = _nibbles(dtype, quant_max_of(dtype, spec.block))
        return state if isinstance(state, str) else _Kept(_FLAT, ("qdata", "scale"), state)
    if spec.layout == "rank1" and spec.options == (("scale_rule", "rank1"),):
        state = _nibbles(dtype, dtype.quant_max)
        return (
            state if isinstance(state, str) else _Kept(_RANK1, ("qdata", "rows", "columns"), state)
        )
    blocks = f"in blocks of {_NIBBLE_BLOCK} for 4 bits"
    return f"needs moments of the layouts flat, {blocks}, or rank1, found {spec}"


def _nibbles(dtype: DType, quant_max: float) -> State | str:
    if dtype.bits != 4 or dtype.kind == "codebook":
        return f"needs a format of 4 or 8 bits with values of its own, and {dtype.name} is none"
    found = format_of(dtype)
    if isinstance(found, str):
        return found
    return State(found.table, found.steps, found.order, found.nan_code, quant_max)


def _refuses(call: StepCall) -> str | None:
    if reason := unavailable() or call.obstacle:
        return reason
    for what, dtype in (("parameters", call.param_dtype), ("gradients", call.grad_dtype)):
        if dtype not in _ELEMENTS:
            return f"takes {what} of float32, bfloat16 and float16, not {dtype}"
    if len(call.specs) > _MOMENTS:
        return f"takes up to {_MOMENTS} moments, not {len(call.specs)}"
    return next((found for found in map(_kept, call.specs) if isinstance(found, str)), None)


def _describe(call: StepCall) -> str:
    return f"{isa()}, all parameters, block by block"


RULE_KERNELS = (
    Kernel(
        "cpu_rule_step", "rule_step", "*", "cpu", rule_step, 50, unavailable, _refuses, _describe
    ),
)
