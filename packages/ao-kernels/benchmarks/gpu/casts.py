"""What casts activations: rows, also computed in the same pass; matrices with transposes; small blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Case, Contender, Line, Setup, built, compiled, distance, measured
from torch import Tensor
from two_operands import ROW, dtype_of

from ao_core import WHOLE, Spec
from ao_core.ext.kernels import encode_reference, fake_quantize_reference
from ao_kernels.triton.cast.op import cast_dual
from ao_kernels.triton.fake_quantize.records import fake_quantize
from ao_kernels.triton.rows.records import quantize, rms_norm_quantize, silu_mul_quantize

#: matrices whose rows are quantized, and matrices that are cast both ways
ROWS, MATRICES = ((16384, 4096), (16384, 14336), (16, 4096)), ((16384, 4096), (16384, 14336))
F8 = Spec("f8e4m3", ROW)
BLOCKS = {"block": (1, 128), "row": ROW, "tensor": (WHOLE, WHOLE)}
ROUNDED = {
    "mxfp8": Spec("f8e4m3", (1, 32), "e8m0"),
    "mxfp4": Spec("f4e2m1", (1, 32), "e8m0"),
    "nvfp4": Spec("f4e2m1", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE))),
}
#: the largest magnitude is found first, by one more read
READS = {"block": 1, "row": 2, "tensor": 2}


def cases(setup: Setup) -> list[Case]:
    """Rows, then matrices both ways, then blocks."""
    rows, matrices = (((8, 300),), ((100, 120),)) if setup.tiny else (ROWS, MATRICES)
    return [
        *(Case(f"rows of {shape}", partial(of_rows, setup, shape)) for shape in rows),
        *(Case(f"both ways of {shape}", partial(of_both, setup, shape)) for shape in matrices),
        *(Case(f"blocks of {shape}", partial(of_blocks, setup, shape)) for shape in rows[:2]),
    ]


def of_rows(setup: Setup, shape: tuple[int, int]) -> Iterator[Line]:
    """As they are, after RMSNorm, and after SiLU and a product."""
    x, up = (setup.randn(*shape, dtype=dtype_of(setup)) for _ in range(2))
    weight, k = torch.randn_like(x[0]), shape[1]
    about = {"kind": "rows", "shape": list(shape)}
    yield from beside(
        setup, {**about, "name": "as they are"}, (x,), 3,
        lambda x: codes(quantize(x, F8)), lambda x: codes(encode_reference(x, F8)),
    )  # fmt: skip
    yield from beside(
        setup, {**about, "name": "after RMSNorm"}, (x,), 3,
        lambda x: codes(rms_norm_quantize(x, weight, 1e-6, F8)),
        lambda x: codes(encode_reference(F.rms_norm(x, (k,), weight, 1e-6), F8)),
    )  # fmt: skip
    yield from beside(
        setup, {**about, "name": "after SiLU"}, (x, up), 5,
        lambda x, up: codes(silu_mul_quantize(x, up, F8)),
        lambda x, up: codes(encode_reference(F.silu(x) * up, F8)),
    )  # fmt: skip


def of_blocks(setup: Setup, shape: tuple[int, int]) -> Iterator[Line]:
    """Rounded to formats of small blocks; nested scales take one more read."""
    x = setup.randn(*shape, dtype=dtype_of(setup))
    for name, spec in ROUNDED.items():
        about = {"kind": "rounded", "shape": list(shape), "name": name}
        ours, reference = partial(_rounded, spec=spec), partial(_reference, spec=spec)
        yield from beside(setup, about, (x,), 6 if name == "nvfp4" else 4, ours, reference)


def _rounded(x: Tensor, spec: Spec) -> tuple[Tensor]:
    return (fake_quantize(x, spec),)


def _reference(x: Tensor, spec: Spec) -> tuple[Tensor]:
    return (fake_quantize_reference(x, spec),)


def codes(parts: Any) -> tuple[Tensor, ...]:
    """And scales."""
    return parts["qdata"], parts["scale"]


def of_both(setup: Setup, shape: tuple[int, int]) -> Iterator[Line]:
    """A matrix and its transpose in float8."""
    x = setup.randn(*shape, dtype=dtype_of(setup))
    for name, block in BLOCKS.items():
        about = {"kind": "both ways", "shape": list(shape), "name": name}
        ours = partial(cast_dual, numbers="f8e4m3", scales=name)
        reference = partial(both, spec=Spec("f8e4m3", block))
        yield from beside(setup, about, (x,), 2 + 2 * READS[name], ours, reference)


def both(x: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    """By plain torch."""
    return (*codes(encode_reference(x, spec)), *codes(encode_reference(x.t(), spec)))


def beside(
    setup: Setup,
    about: Line,
    inputs: tuple[Tensor, ...],
    width: int,
    ours: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
) -> Iterator[Line]:
    """Ours and the reference, compiled; an element is `width` bytes that must move."""
    x = inputs[0]
    copies = setup.copies(inputs, 2 * x.numel() * len(inputs))

    def error(_: Tensor, found: tuple[Tensor, ...]) -> float:
        pairs = zip(found, reference(*inputs), strict=True)
        return max(distance(a.float(), b.float()) for a, b in pairs)

    def contender(call: Callable[..., Any], error: Any = None) -> Contender:
        return Contender(copies, lambda _, each: call(*each), width * x.numel(), error=error)

    of_torch = compiled(reference) if x.is_cuda else reference
    makers = {"torch": partial(contender, of_torch), "ao": partial(contender, ours, error)}
    yield from measured(setup, built(makers), x, about)
