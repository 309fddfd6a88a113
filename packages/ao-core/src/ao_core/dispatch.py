"""Which kernel serves a call: tables keyed by (op, layout, device), with a reason for every refusal.

Signatures of the ops, `w` a `QTensor` of shape (N, K):

- ``linear(x, w, bias) -> y``: x (..., K), bias (N,) or None, y (..., N) in x's dtype
- ``embedding(ids, w) -> y``: integer ids (...), y (..., K) in w's dtype

with the weights of experts, `w` of shape (E, N, K):

- ``grouped_linear(x, w, offs) -> y``: either x (M, K) with rows sorted by expert, offs int32 (E,) the row
  after each expert's last, y (M, N) in x's dtype with zeros from row offs[-1] on; or x (E, M, K), offs
  None, y (E, M, N)

of dense operands, for `ComputeWeight`:

- ``mm(a, b, spec) -> y``: a (M, C), b (N, C), y = a @ b.T (M, N) with b cast as `spec` and a as `spec.act`;
  either may be cast already, a `QTensor` in the layout "plain", whose parts `encode_parts` gives as they are
- ``grouped_mm(a, b, offs, spec) -> y``: the same for the weights of experts, each cast by itself: a (M, C)
  with rows sorted by expert and b (E, N, C), y (M, N) with zeros from row offs[-1] on; a (N, M) and b
  (K, M), whose contracted dimension is the one of the rows, y (E, N, K); or a batch, a (E, M, C) and b
  (E, N, C), offs None, y (E, M, N)

and between dense values and `Parts`; every kernel of the first two gives the same bits:

- ``quantize(x, spec) -> parts``: any floating-point x with dimensions, finite or not; `spec` in a canonical
  layout; scales and zero points as `choose_qparams` finds them
- ``quantize_both(x, spec) -> parts, parts``: of a matrix x and of its transpose, each as `spec` says
- ``dequantize(parts, spec, shape, dtype) -> x``: x of the stored `shape` in `dtype`,
  (decode(code) - zero) * scale in float32, or what `Spec` says, rounded once
- ``fake_quantize(x, spec) -> x``: what `dequantize` gives of `quantize`'s parts, in the dtype of x
- ``error_sums(x, w, step) -> sums``: float64 (2,), the sums of x² and of (x - w.dequantize())² over every
  `step`-th row of dimension 0, for the report of `quantize_`

of activations that are computed and quantized at once, in the shape of the first operand; see
`ao_core.tensor.producers`:

- ``rms_norm_quantize(x, weight, eps, spec) -> parts``: x (…, K), weight (K,) or None
- ``silu_mul_quantize(gate, up, spec) -> parts``: gate and up (…, K)

of dense activations:

- ``hadamard(x, block, inverse) -> y``: x (…, K) of any float dtype, y of its shape and dtype, as
  `numerics.hadamard_transform` and its inverse have it; the spec of the `Call` is a dense one with the
  block (1, block), see `ao_core.tensor.rotation`

A `Call` of these has the shape of the dense values as both of its shapes, and their dtype as `x_dtype`.

Steps of optimizers work in place on lists of equal length, of one dtype and device:

- ``adam_step(params, grads, exp_avgs, exp_avg_sqs, *, lr, betas, eps, weight_decay, step, decoupled,
  maximize, seed) -> None``: dense params and grads of equal shapes, moments `QTensor`s or dense; `lr` a
  float; `step` counts from 1; `decoupled`: AdamW's decay; `seed`: None rounds to nearest, an integer
  rounds parameters stochastically, alike in every call with the same arguments

All moments of a kind are `QTensor`s of one format, or all are dense. The `Call` has the spec of the first
moments, that of "fp32" in the layout "plain" where they are dense, the number of all elements as both shapes
and the dtype of the parameters.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ao_core.arguments import checked
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.guarded import ask, blame, owner, words
from ao_core.neutral import neutral
from ao_core.records import Call, Kernel
from ao_core.registry import registry
from ao_core.spec import OPTIONS

__all__ = [
    "BANDS",
    "CONVERSIONS",
    "PIN",
    "Candidate",
    "candidates",
    "fingerprint",
    "kernels",
    "matmul_op",
    "name_kernel",
    "pinned_band",
    "run",
    "select",
]

#: name -> least priority of the band
BANDS = {"reference": -100, "torch": 0, "compiled": 50, "cuda": 100}

#: ops without which nothing works, those between dense values and parts: the reference serves them under
#: every pin where the pinned band does not
CONVERSIONS = (
    "quantize",
    "quantize_both",
    "rms_norm_quantize",
    "silu_mul_quantize",
    "hadamard",
    "dequantize",
    "fake_quantize",
    "error_sums",
)

#: the band that `kernels` pins in this thread, or task of asyncio; None: none
PIN: ContextVar[str | None] = ContextVar("ao_kernels", default=None)

#: kernels that were selected, by call, epoch and pin; emptied when it is full
_selected: dict[tuple[Call, int, str | None], Kernel] = {}
_MAX_SELECTED = 4096


@dataclass(frozen=True)
class Candidate:
    """A kernel that was considered, and None or the reason why it was refused."""

    kernel: Kernel
    provider: str
    refusal: str | None
    #: how it would serve the call; empty where it refuses or has nothing to add
    description: str = ""


@checked
@contextmanager
def kernels(band: str) -> Iterator[None]:
    """Within this context only kernels of one band ("reference", "torch", "compiled", "cuda") serve.

    But conversions between dense values and codes have the reference to fall back on.

    The pin belongs to the thread or the task of asyncio that enters the context. Tasks that are started
    inside inherit it, as they do any context variable; threads do not, those in which autograd runs the
    backward pass on CUDA among them. Compiled code keeps the kernels that it was compiled with: the pin
    counts when it is compiled, not when it is called.
    """
    _check_band(band, "band")
    outer = PIN.get()
    PIN.set(band)
    try:
        yield
    finally:
        PIN.set(outer)


def pinned_band() -> str | None:
    """The band that `kernels` pins here, or the variable AO_KERNELS for the process, if any."""
    return PIN.get() or _process_band()


@cache
def _process_band() -> str | None:
    """AO_KERNELS, as it is when the first kernel is selected."""
    band = os.environ.get("AO_KERNELS")
    if band:
        _check_band(band, "AO_KERNELS")
    return band or None


def _check_band(band: str, parameter: str) -> None:
    if band not in BANDS:
        raise ConfigError(
            f"{parameter}={band!r} is no band of kernels; use one of {', '.join(BANDS)}"
        )


def _band(kernel: Kernel) -> str:
    floors = (name for name, floor in BANDS.items() if kernel.priority >= floor)
    return max(floors, key=BANDS.__getitem__, default="reference")


def _unavailable(kernel: Kernel) -> str | None:
    """Why it cannot run on this machine, asked once until the tables are reopened."""
    return _asked_available(kernel, registry.reopened)


@cache
def _asked_available(kernel: Kernel, _reopened: int) -> str | None:
    # what it tries must not depend on where the first call is, such as below a FakeTensorMode
    with neutral():
        return ask(registry.kernels, kernel.name, "unavailable", timed=False)


def _refusal(kernel: Kernel, call: Call, pin: str | None) -> str | None:
    if pin is not None and _band(kernel) not in _allowed(call.op, pin):
        return f"the band is pinned to {pin!r}"
    return (
        _unavailable(kernel)
        or _unknown_option(kernel, call)
        or _unknown_rule(kernel, call)
        or ask(registry.kernels, kernel.name, "refuses", call)
    )


def _unknown_option(kernel: Kernel, call: Call) -> str | None:
    """Why a kernel must not serve a product whose format has an option that it has not heard of."""
    if (
        not call.spec.options or call.op in CONVERSIONS
    ):  # codes do not depend on how products are computed
        return None
    unknown = {name for name, _ in call.spec.options}.difference(OPTIONS, kernel.options)
    for layout in registry.layouts.values() if unknown else ():
        unknown.difference_update(layout.options)
    return f"does not know the option {min(unknown)!r} of the format" if unknown else None


def _unknown_rule(kernel: Kernel, call: Call) -> str | None:
    """Why a kernel must not scale activations for a product, where their scales follow something else.

    Where scales are chosen, by conversions or the reference, the rule is known.
    """
    act = call.spec.act
    if act is None or act.static or call.op in CONVERSIONS or kernel.priority < BANDS["torch"]:
        return None
    rule = act.option("scale_rule", "absmax")
    if rule == "absmax" or "scale_rule" in kernel.options:
        return None
    return f"scales activations by their largest magnitude, and not by scale_rule={rule!r}"


def _allowed(op: str, pin: str) -> tuple[str, ...]:
    return (pin, "reference") if op in CONVERSIONS else (pin,)


@lru_cache(maxsize=1024)
def _row(op: str, layout: str, device: str, epoch: int) -> tuple[Kernel, ...]:
    """The table's row: kernels of an op for a layout on a device, best first."""
    found = [
        kernel
        for kernel in registry.kernels.values()
        if kernel.op == op and kernel.layout in ("*", layout) and kernel.device in ("*", device)
    ]
    return tuple(sorted(found, key=lambda kernel: (-kernel.priority, kernel.name)))


def _matching(call: Call) -> tuple[Kernel, ...]:
    return _row(call.op, call.spec.layout, call.device, registry.epoch)


def fingerprint(device: str) -> str:
    """A digest of what the choice of kernels on a device depends on besides the calls, and of their code.

    Part of what compiled code is cached under on disk: without it, code from before another package
    or version was installed would go on calling the kernels of then. Kernels for other devices are not
    asked whether they can run, since that may start up the device.

    Args:
        device: type of the device, "cpu" or "cuda".
    """
    registry.freeze()
    return _digest(device, registry.epoch, pinned_band())


@lru_cache(maxsize=16)
def _digest(device: str, epoch: int, pin: str | None) -> str:
    lines = [
        repr((name, kernel.priority, _unavailable(kernel), _version(provider), _code(kernel)))
        for name, kernel in sorted(registry.kernels.items())
        if kernel.device in ("*", device)
        for provider in [registry.kernels.provider(name)]
    ]
    return hashlib.blake2b("\n".join([repr(pin), *lines]).encode(), digest_size=16).hexdigest()


def _version(provider: str) -> str:
    try:
        return version(provider)
    except PackageNotFoundError:  # registered in this process
        return ""


def _code(kernel: Kernel) -> bytes:
    """The function's own bytecode: what changes while it is being written, and no version does."""
    code = getattr(kernel.fn, "__code__", None)
    return b"" if code is None else code.co_code + repr(code.co_names).encode()


def matmul_op(weight_shape: tuple[int, ...]) -> str | None:
    """The op of products with a weight of so many dimensions; None where it is dequantized for them."""
    return {2: "linear", 3: "grouped_linear"}.get(len(weight_shape))


def select(call: Call) -> Kernel:
    """The kernel of highest priority that accepts the call. Freezes the tables (see `reopen`).

    Found once for a call, an epoch of the tables and a pin; predicates are asked, and write their
    sentences, only then.

    Raises:
        UnsupportedOp: all refuse; with their reasons.
    """
    try:
        kernel = _selected.get((call, registry.epoch, PIN.get()))
    except TypeError:  # a shape that is traced may hold symbols, which do not hash
        return _select(call)
    if kernel is None:
        registry.freeze()  # may load plugins, which starts an epoch
        key = (call, registry.epoch, PIN.get())
        kernel = _select(call)
        if len(_selected) >= _MAX_SELECTED:
            _selected.clear()
        _selected[key] = kernel
    return kernel


def _select(call: Call) -> Kernel:
    registry.freeze()
    pin = pinned_band()
    for kernel in _matching(call):
        if _refusal(kernel, call, pin) is None:
            return kernel
    reasons = "; ".join(f"{c.kernel.name}: {c.refusal}" for c in candidates(call))
    raise UnsupportedOp(
        f"no kernel serves {call.op} of layout {call.spec.layout!r} on {call.device}. "
        f"Refused: {reasons or 'none is registered'}"
    )


def run(call: Call, *args: Any, **kwargs: Any) -> Any:
    """What the kernel that `select` finds for a call returns for these arguments.

    Its errors go on to the caller, with a note of the kernel and the distribution that it came from.
    """
    kernel = select(call)
    try:
        return kernel.fn(*args, **kwargs)
    except Exception as error:
        name_kernel(error, kernel)
        raise


def name_kernel(error: BaseException, kernel: Kernel) -> None:
    """Add to an error out of a kernel which it was, and whose."""
    blame(error, f"raised by {owner(registry.kernels, kernel.name)}, for {kernel.op}")


def candidates(call: Call) -> list[Candidate]:
    """Every kernel of the op for the layout and device, best first, with its refusal."""
    pin = pinned_band()
    found = []
    for kernel in _matching(call):
        refusal = _refusal(kernel, call, pin)
        description = ""
        if refusal is None:
            description = words(registry.kernels, kernel.name, "describe", call)
        provider = registry.kernels.provider(kernel.name)
        found.append(Candidate(kernel, provider, refusal, description))
    return found
