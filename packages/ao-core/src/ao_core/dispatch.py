"""Which kernel serves a call: tables keyed by (op, layout, device), with a reason for every refusal.

Signatures of the ops, `w` a `QTensor` of shape (N, K):

- ``linear(x, w, bias) -> y``: x (..., K), bias (N,) or None, y (..., N) in x's dtype
- ``embedding(ids, w) -> y``: integer ids (...), y (..., K) in w's dtype

and of dense operands, for `ComputeWeight`:

- ``mm(a, b, spec) -> y``: a (M, C), b (N, C), y = a @ b.T (M, N) with b cast as `spec` and a as `spec.act`
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache

from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.records import Call, Kernel
from ao_core.registry import registry

__all__ = ["BANDS", "Candidate", "candidates", "kernels", "pinned_band", "select"]

#: name -> least priority of the band
BANDS = {"reference": -100, "native": 0, "compiled": 50, "cuda": 100}

_pins: list[str] = []


@dataclass(frozen=True)
class Candidate:
    """A kernel that was considered, and None or the reason why it was refused."""

    kernel: Kernel
    provider: str
    refusal: str | None


@contextmanager
def kernels(band: str) -> Iterator[None]:
    """Within this context only kernels of one band ("reference", "native", "compiled", "cuda") serve."""
    _check_band(band, "band")
    _pins.append(band)
    registry.epoch += 1
    try:
        yield
    finally:
        _pins.pop()
        registry.epoch += 1


def pinned_band() -> str | None:
    """The band that `kernels` or the variable AO_KERNELS pins, if any."""
    if _pins:
        return _pins[-1]
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
    return max((floor, name) for name, floor in BANDS.items() if kernel.priority >= floor)[1]


@cache
def _unavailable(kernel: Kernel) -> str | None:
    return kernel.available()


def _refusal(kernel: Kernel, call: Call, pin: str | None) -> str | None:
    if pin is not None and _band(kernel) != pin:
        return f"the band is pinned to {pin!r}"
    return _unavailable(kernel) or kernel.accepts(call)


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


def select(call: Call) -> Kernel:
    """The kernel of highest priority that accepts the call. Freezes the tables (see `reopen`)."""
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


def candidates(call: Call) -> list[Candidate]:
    """Every kernel of the op for the layout and device, best first, with its refusal."""
    pin = pinned_band()
    return [
        Candidate(kernel, registry.kernels.provider(kernel.name), _refusal(kernel, call, pin))
        for kernel in _matching(call)
    ]
