"""Known-answer tests: a kernel serves calls of a kind after it was right about a small one on this device.

Layouts of registers are those of one version of Triton, and assembly is that of one device. Before the first
call of a kind, the kernel computes a small problem whose answer the op's reference gives. A wrong answer is a
refusal, which `explain` shows; a right one is kept on disk, see `ao_kernels.answers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.kernels import neutral
from ao_core.ext.numerics import pack_bits
from ao_kernels.answers import asked
from ao_kernels.cpu.codes import codes_of
from ao_kernels.triton.shared.device import current_device

__all__ = ["MATMUL", "Sample", "answer", "concrete", "every_code", "noise", "proven"]

#: numbers of tokens for which matmuls have tiles of their own
_TOKENS = (1, 32, 64, 128)
_SOURCES = Path(__file__).parents[1]


class Sample(NamedTuple):
    """A small call."""

    #: all that the kernel is compiled for
    facts: tuple[object, ...]
    #: makes the arguments of the op, on the CPU
    arguments: Callable[[], tuple[Any, ...]]
    #: by what share of an element, and of all in root mean square, a result may differ from the reference's
    slack: float = 0.0
    #: the op changes its arguments, and returns nothing
    in_place: bool = False
    #: further arguments of the op, by name
    options: Mapping[str, Any] = {}
    #: computes it, where that is not the kernel's own function: as that would a larger call
    fn: Callable[..., Any] | None = None


#: of matmuls, whose activations and results have 8 bits of mantissa: a code that is one step off is more
MATMUL = 2.0**-7


def proven(
    op: str,
    fn: Callable[..., Any],
    refuses: Callable[[Any], str | None],
    sample: Callable[[Any], Sample],
) -> Callable[[Any], str | None]:
    """`Kernel.refuses` of a kernel that refuses calls of a kind until its answer to a sample was right."""

    def refused(call: Any) -> str | None:
        if reason := refuses(call):
            return reason
        if not torch.cuda.is_available():  # as `Kernel.unavailable` says
            return None
        device = current_device()
        for each in concrete(call):
            if reason := _asked(op, fn, sample(each), device):
                return reason
        return None

    return refused


def concrete(call: Any) -> list[Any]:
    """The call; where sizes are symbols, as in a trace, calls of few and of many tokens.

    No symbol is compared with anything, so none becomes a number.
    """
    shapes = {
        field.name: shape
        for field in (fields(call) if is_dataclass(call) else ())
        if isinstance(shape := getattr(call, field.name), tuple)
        and any(isinstance(size, torch.SymInt) for size in shape)
    }
    if not shapes:
        return [call]
    return [
        replace(call, **{name: _with_tokens(shape, tokens) for name, shape in shapes.items()})
        for tokens in _TOKENS
    ]


def _with_tokens(shape: tuple[Any, ...], tokens: int) -> tuple[int, ...]:
    """Numbers in place of symbols: so many for the last one, and 1 for others."""
    symbols = [i for i, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    return tuple(
        size if i not in symbols else tokens if i == symbols[-1] else 1
        for i, size in enumerate(shape)
    )


def answer(op: str, fn: Callable[..., Any], sample: Sample, device: torch.device) -> str | None:
    """None where the kernel gives on a device what the op's reference does, or what it gave instead."""
    with neutral(), torch.no_grad():
        arguments = sample.arguments()
        there = _mapped(arguments, lambda x: x.to(device, copy=True))
        if sample.slack:
            arguments = _mapped(arguments, _wide)
        try:
            found = (sample.fn or fn)(*there, **sample.options)
            results = [x.cpu() for x in _tensors(there if sample.in_place else found)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of Triton, its compiler, or the driver
            first = str(error).strip().partition("\n")[0]
            return f"cannot run on this device: {type(error).__name__}: {first}"
        expected = registry.ops.get(op).reference(*arguments, **sample.options)
        wanted = _tensors(arguments if sample.in_place else expected)
    for x, y in zip(results, wanted, strict=True):
        if reason := _difference(x, y, sample.slack):
            return f"gives wrong numbers on this device: {reason}"
    return None


def every_code(spec: Spec, shape: tuple[int, ...]) -> QTensor:
    """A weight on the CPU in the layout of `spec`; every code of the format that is a finite number occurs.

    Layouts whose canonical form has more than codes hold normal numbers.
    """
    layout = registry.layouts.get(spec.layout)
    canonical = spec.in_layout(spec.layout if layout.canonical else layout.canonical_name)
    given: dict[str, Any] = {}
    if spec.act is not None and spec.act.static:
        given = {"act_scale": 0.03}
        if spec.act.zero_point != "none":
            given["act_zero_point"] = 77
    w = quantize_tensor(noise(shape), canonical, **given)
    if canonical.layout not in ("packed", "plain") or w.format.kind == "dense":
        return to_layout(w, spec.layout)
    codes = codes_of(w.format)
    finite = [
        code ^ codes.flip
        for code, value in enumerate(codes.values[: w.format.codes])
        if abs(value) < float("inf")
    ]
    drawn = torch.randint(len(finite), shape, generator=_generator())
    chosen = torch.tensor(finite, dtype=torch.uint8)[drawn]
    qdata = w.parts["qdata"]
    if canonical.layout == "packed":
        chosen = pack_bits(chosen, codes.bits)
    parts = {**w.parts, "qdata": chosen.view(qdata.dtype).view(qdata.shape)}
    return to_layout(QTensor(parts, w.spec, tuple(w.shape), w.dtype), spec.layout)


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the CPU, the same ones each time."""
    return torch.randn(shape, generator=_generator()).to(dtype)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _asked(op: str, fn: Callable[..., Any], sample: Sample, device: torch.device) -> str | None:
    kind = f"{op} {fn.__module__}.{fn.__qualname__} {sample.facts}"
    return asked("triton", kind, device, _made_from, lambda: answer(op, fn, sample, device))


@cache
def _made_from() -> tuple[str, ...]:
    """Triton, and the sources that kernels are made from."""
    import triton

    sources = sorted(_SOURCES.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return str(triton.__version__), digest


def _mapped(arguments: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """With each tensor changed, also those in lists and parts."""

    def mapped(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        if isinstance(x, list):
            return [mapped(each) for each in x]
        if isinstance(x, dict):
            return {name: mapped(each) for name, each in x.items()}
        return x

    return tuple(map(mapped, arguments))


def _wide(x: Tensor) -> Tensor:
    """Dense numbers in float32."""
    dense = not isinstance(x, QTensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if dense else x


def _tensors(results: Any) -> list[Tensor]:
    """All tensors of a result, those that are quantized as what they stand for."""
    if isinstance(results, QTensor):
        return [results.dequantize(torch.float32)]
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, dict):
        return [x for name in sorted(results) for x in _tensors(results[name])]
    if isinstance(results, (tuple, list)):
        return [x for each in results for x in _tensors(each)]
    return []


def _difference(found: Tensor, expected: Tensor, slack: float) -> str | None:
    """Where, and by how much, a result is not what it must be."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    x, y = found.float().double(), expected.float().double()
    allowed = slack * (y.abs() + y.square().mean().sqrt())
    wrong = ~((x - y).abs() <= allowed) & ~(x.isnan() & y.isnan())
    if not wrong.any():
        return None
    place = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()}, the first {float(x[tuple(place)]):.6g} at {place}, expected "
        f"{float(y[tuple(place)]):.6g}"
    )
