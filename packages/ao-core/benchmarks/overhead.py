"""The contenders of the overhead benchmarks: one linear layer at batch 1, dense and quantized."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import WHOLE, Call, Kernel, QTensor, Spec, kernels, quantize_tensor, register
from ao_core.dispatch import pinned_band, select
from ao_core.layouts import Parts
from ao_core.tensor import repack

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, Samples, interleaved, longer, paired, percentile

#: name -> format, for a layer of any size
FORMATS = {
    "int8": Spec("int8", (1, WHOLE)),
    "int4": Spec("uint4", (1, 32), "bfloat16", zero_point="int", layout="packed"),
    "int8 dynamic": Spec("int8", (1, WHOLE), act=Spec("int8", (1, WHOLE))),
}
SIZES = ((64, 64), (256, 256))
DENSE = "nn.Linear"
#: a quantized layer whose kernel is the dense matmul: what is left is our own Python
DISPATCH = "dispatch"
_DISPATCHED = Spec("int8", (1, WHOLE), options=(("dense_matmul", True),))

#: an input that needs a gradient, as below the adapters of LoRA: the forward pass, and both
GRAD, BACKWARD = "grad", "grad, backward"
#: name of a mode -> the context in which calls are timed; a pin is looked at in every call
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    GRAD: torch.enable_grad,
    BACKWARD: torch.enable_grad,
    "pinned": partial(kernels, "reference"),
}

_BARE = ", bare kernel"
Calls = dict[str, Callable[[], object]]
#: further contenders for a layer and an input
More = Callable[[nn.Linear, Tensor], Calls]


def measure(rounds: int, repeats: int, more: More = lambda layer, x: {}) -> list[Row]:
    """Overhead of all contenders for all sizes, dtypes and modes, on one thread."""
    torch.set_num_threads(1)
    rows = []
    for out_features, in_features in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            layer = nn.Linear(in_features, out_features, dtype=dtype).requires_grad_(False)
            x = torch.randn(1, in_features, dtype=dtype)
            for mode, entered in MODES.items():
                x.requires_grad_(mode in (GRAD, BACKWARD))
                with entered():
                    calls = {**contenders(layer, x), **more(layer, x)}
                    if mode == BACKWARD:
                        calls = with_backward(calls)
                    samples = interleaved(calls, rounds=rounds, repeats=repeats)
                where = f"{out_features}×{in_features}"
                about = {
                    "layer": where,
                    "dtype": str(dtype).partition(".")[2],
                    "mode": mode,
                }
                rows += [about | row(samples, name) for name in samples]
    return rows


def row(samples: Samples, name: str) -> Row:
    """One contender beside the dense layer, and beside its own kernel where that was timed."""
    ratio = paired(samples, DENSE, name)  # how many times as long it takes
    kernel = kernel_of(name)
    over_kernel = longer(samples, name, kernel) * 1e6 if kernel in samples else ""
    return {
        "contender": name,
        "µs": median(samples[name]) * 1e6,
        "p10": percentile(samples[name], 10) * 1e6,
        "over nn.Linear, µs": longer(samples, name, DENSE) * 1e6,
        "× nn.Linear": ratio.median,
        "95 %": ratio.interval(),
        "over its kernel, µs": over_kernel,
    }


def kernel_of(name: str) -> str:
    """The name of the contender that is the bare kernel function of another."""
    return name + _BARE


def contenders(layer: nn.Linear, x: Tensor) -> Calls:
    """The dense layer; the dispatch alone, unless pinned; of each format the layer and its bare kernel."""
    calls: Calls = {DENSE: partial(layer, x)}
    if pinned_band() is None:
        _serve_dense(layer)
        calls[DISPATCH] = partial(quantized(layer, _DISPATCHED), x)
    for name, spec in FORMATS.items():
        copy = quantized(layer, spec)
        weight = copy.weight
        assert isinstance(weight, QTensor)
        call = Call("linear", weight.spec, tuple(weight.shape), tuple(x.shape), x.dtype, "cpu")
        calls[name] = partial(copy, x)
        calls[kernel_of(name)] = partial(select(call).fn, x.detach(), weight, copy.bias)
    return calls


def with_backward(calls: Calls) -> Calls:
    """Each layer with the gradient of its input; bare kernels have none."""

    def both(call: Callable[[], Any], grad: Tensor) -> None:
        call().backward(grad)

    layers = {name: call for name, call in calls.items() if not name.endswith(_BARE)}
    grad = torch.ones_like(cast("Tensor", layers[DENSE]()))
    return {name: partial(both, call, grad) for name, call in layers.items()}


def quantized(layer: nn.Linear, spec: Spec) -> nn.Linear:
    """A layer with the weight of another in the format `spec`, arranged for this machine."""
    copy = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype, device="meta")
    copy.weight = nn.Parameter(repack(quantize_tensor(layer.weight, spec)), requires_grad=False)
    copy.bias = layer.bias
    return copy


#: the weight that `_dense_matmul` multiplies by
_served: list[Tensor] = []


def _serve_dense(layer: nn.Linear) -> None:
    _served[:] = [layer.weight]


def _dense_matmul(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, _served[0], bias)


def _dense_weight(parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _served[0]


def _refuses(call: Call) -> str | None:
    return None if call.spec == _DISPATCHED else "is for the benchmark of the dispatch only"


register(
    Kernel(
        "dense_matmul", "linear", "plain", "cpu", _dense_matmul, 1000,
        refuses=_refuses, options=("dense_matmul",),
    )
)  # fmt: skip
register(
    Kernel("dense_weight", "dequantize", "plain", "cpu", _dense_weight, 1000, refuses=_refuses)
)

TEXT = f"""\
Eager call of one linear layer at batch 1, small enough for its arithmetic not to matter, on one thread.
`{DISPATCH}` is a quantized weight whose kernels are the dense matmul and the dense weight: what it takes
beyond `nn.Linear` is what ao adds to any call. *over its kernel*: beyond calling the format's kernel function
directly.
Mode `{GRAD}`: the input needs a gradient, and the forward pass is timed; `{BACKWARD}`: both passes, where the
backward pass of a quantized layer dequantizes its weight; `pinned`: all kernels are
those of the reference.
Differences and ratios are medians over alternate rounds, ratios with an interval that holds the true one with
a probability of 95 %."""
