"""The CUDA kernels of `linear` for weights in planes; their priority is above that of those in Triton."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext.kernels import lacks_capability
from ao_core.ext.numerics import full_block
from ao_kernels.answers import asked
from ao_kernels.cpu import library
from ao_kernels.triton.shared.device import current_device
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.weight_only.layout import LAYOUTS

__all__ = ["CUDA_KERNELS", "FORMATS", "MOST_ROWS"]

#: number formats → what the op calls them: 4 bits, integers of 8, floats of 8
FORMATS = {"int4": 0, "uint4": 0, "int8": 1, "f8e4m3": 2}
#: rows of activations, for 4 bits and for 8. With 33 to 64 rows, `mma` takes 38.0 instructions for 128 bytes
#: of int4 weights, and Triton's `wgmma` 25.0; an H200 issues 27.6 while they arrive
MOST_ROWS = {4: 32, 8: 64}
#: dtypes of scales, with their bytes
SCALES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: groups along K, for 4 bits and for 8
GROUPS = {4: (32, 64, 128, 256), 8: (64, 128)}
#: an H100: SMs, bytes of shared memory of a CTA and of an SM, whether it is sm_90 or later
_H100 = (132, 227 * 1024, 228 * 1024, 1)
#: where a weight keeps its matmul, among the kernels that it remembers
_KEY = "ao_kernels.cuda.linear"


def _matmul(w: QTensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The matmul with one weight. Parts of a weight are written to, but never replaced."""
    op, parts, (n, k) = torch.ops.ao_kernels.cuda_linear.default, w.parts, w.stored_shape
    qdata, scale, zero_point = parts["qdata"], parts["scale"], parts.get("zero_point")
    group, numbers = full_block(w.spec.block, (n, k))[-1], FORMATS[w.spec.dtype]

    def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
        return op(x, qdata, scale, zero_point, bias, n, k, group, numbers)  # type: ignore[no-any-return]

    return matmul


def cuda_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """One launch. All that depends on the weight alone is found once, at its first matmul."""
    matmul = w._bound.get(_KEY)
    if matmul is None:
        matmul = w._bound[_KEY] = _matmul(w)
    return matmul(x, bias)


def unavailable() -> str | None:
    """None, or a sentence that says why the CUDA kernels cannot run here."""
    if reason := library.unavailable():
        return reason
    if reason := torch.ops.ao_kernels.cuda_unavailable():
        return str(reason)
    if torch.version.hip is not None:
        return "they are compiled for NVIDIA's devices"
    return lacks_capability((8, 0))


def _refuses(call: Call) -> str | None:
    """As `_unsuitable`; any call where a kernel was wrong about its known answers on this device."""
    if reason := _unsuitable(call):
        return reason
    if unavailable():  # as `Kernel.unavailable` says
        return None
    device = current_device()
    return asked("cuda", "linear", device, _made_from, partial(_answer, device))


def _answer(device: torch.device) -> str | None:
    from ao_kernels.cuda.known_answer import problem

    return problem(torch.ops.ao_kernels.cuda_linear.default, device)


@cache
def _made_from() -> tuple[str, ...]:
    """The library, which holds the kernels, and the test."""
    files = library.library_path(), Path(__file__).with_name("known_answer.py")
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _device() -> tuple[int, int, int, int]:
    """The current device; where there is none, an H100."""
    return _of_device(torch.cuda.current_device()) if torch.cuda.is_available() else _H100


@lru_cache
def _of_device(index: int) -> tuple[int, int, int, int]:
    facts = torch.cuda.get_device_properties(index)
    shared: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    of_sm = facts.shared_memory_per_multiprocessor
    return facts.multi_processor_count, shared, of_sm, int(facts.major >= 9)


def _plan(call: Call) -> tuple[int, ...]:
    """Rows of a tile, slabs of N and splits of K, stages, bytes of shared memory of a CTA."""
    library.load()
    spec, (n, k) = call.spec, call.weight_shape
    group, zero_point = (
        full_block(spec.block, (n, k))[-1],
        {"none": 0, "int": 1}.get(spec.zero_point, 4),
    )
    assert isinstance(spec.scale_dtype, str)
    return tuple(
        torch.ops.ao_kernels.cuda_plan(
            max(call.m, 1),
            n,
            k,
            group,
            FORMATS[spec.dtype],
            SCALES[spec.scale_dtype],
            zero_point,
            _device(),
        )
    )


def _unsuitable(call: Call) -> str | None:
    spec = call.spec
    if spec.dtype not in FORMATS:
        return f"is for {', '.join(FORMATS)}, not {spec.dtype}"
    if call.x_dtype not in ELEMENTS:
        return f"needs activations in bfloat16 or float16, found {call.x_dtype}"
    if call.m > (most := MOST_ROWS[8 if FORMATS[spec.dtype] else 4]):
        return f"is for up to {most} rows, found {call.m}"
    if reason := _unfit(spec, call.weight_shape):
        return reason
    needed, there = _plan(call)[-1], _device()[1]
    if needed > there:
        return (
            f"needs {needed} bytes of shared memory for {call.m} rows, and the device has {there}"
        )
    return None


def _unfit(spec: Spec, shape: tuple[int, ...]) -> str | None:
    """Why it has no kernel for scales and zero points like these."""
    group, groups = full_block(spec.block, shape)[-1], GROUPS[8 if FORMATS[spec.dtype] else 4]
    if not isinstance(spec.scale_dtype, str) or spec.scale_dtype not in SCALES:
        return f"takes scales in {', '.join(SCALES)}, not {spec.scale_dtype}"
    if group < shape[-1] and group not in groups:
        return f"takes groups of {', '.join(map(str, groups))} or rows, not of {group}"
    if group >= shape[-1] and spec.zero_point != "none":
        return "takes zero points in groups, not one for a row"
    return None


def _describe(call: Call) -> str:
    rows, slabs, splits, stages, _ = _plan(call)
    shared = f", split-K {splits} in clusters" if splits > 1 else ""
    return f"CUDA, tiles of {rows} rows and {32 * slabs} of N{shared}, {stages} stages, sums in float32"


CUDA_KERNELS = tuple(
    Kernel(
        f"cuda_{layout.name}_linear", "linear", layout.name, "cuda", cuda_linear, 100, unavailable,
        _refuses, _describe,
    )
    for layout in LAYOUTS
)  # fmt: skip
