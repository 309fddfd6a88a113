"""Which kernel serves a call: tables keyed by (op, layout, device), with a reason for every refusal.

The record of an op says what it computes, see `ao_core.records.Op`; the ops of ao-core are in `ao_core.ops`.
Selection looks only at the attributes of a call that `ao_core.records.OpCall` declares. The others are for
the kernels.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from ao_core.arguments import checked
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.guarded import ask, blame, owner, words
from ao_core.neutral import neutral
from ao_core.records import Call, Kernel, Op, OpCall
from ao_core.registry import registry
from ao_core.spec import OPTIONS

__all__ = [
    "BANDS",
    "PIN",
    "Candidate",
    "adapted",
    "candidates",
    "fingerprint",
    "kernels",
    "matmul_op",
    "name_kernel",
    "once_per_call",
    "pinned_band",
    "run",
    "select",
    "unused",
]

#: name -> least priority of the band
BANDS = {"reference": -100, "torch": 0, "compiled": 50, "cuda": 100}

#: the band that `kernels` pins in this thread, or task of asyncio; None: none
PIN: ContextVar[str | None] = ContextVar("ao_kernels", default=None)

C = TypeVar("C", bound=OpCall)
T = TypeVar("T")

#: calls that a function of `once_per_call` remembers
_MAX_FOUND = 4096


@dataclass(frozen=True)
class Candidate:
    """A kernel that was considered, and None or the reason why it was refused."""

    kernel: Kernel
    #: the distribution that it comes from
    provider: str
    #: why it does not serve the call; None: it does
    refusal: str | None
    #: how it would serve the call; empty where it refuses or has nothing to add
    description: str = ""
    #: input steps that are taken in plain torch before it, and those that it takes itself
    before: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()


@checked
@contextmanager
def kernels(band: str) -> Iterator[None]:
    """Within this context only kernels of one band ("reference", "torch", "compiled", "cuda") serve.

    Conversions between dense values and codes may still fall back to the reference.

    The pin belongs to the thread or asyncio task that enters the context. Tasks that start inside inherit
    it, like any context variable. Threads do not inherit it, including those in which autograd runs the
    backward pass on CUDA. Compiled code keeps its kernels: the pin counts when the code is compiled, not
    when it is called.
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
            f"{parameter}={band!r} is not a band of kernels; use one of {', '.join(BANDS)}"
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


def _refusal(kernel: Kernel, call: OpCall, pin: str | None) -> str | None:
    op = registry.ops.local(call.op)
    if op is None:
        return unused(kernel)
    if pin is not None and _band(kernel) not in _allowed(op, pin):
        return f"the band is pinned to {pin!r}"
    return (
        _unavailable(kernel)
        or _unknown_step(kernel, call)
        or _unknown_option(kernel, op, call)
        or _unknown_rule(kernel, op, call)
        or ask(registry.kernels, kernel.name, "refuses", call)
    )


def _unknown_step(kernel: Kernel, call: OpCall) -> str | None:
    """Why a kernel must not serve a call with an input step that it does not take."""
    steps = (step for spec in call.specs for step in spec.input)
    unknown = next((step for step in steps if step.kind not in kernel.fuses), None)
    return None if unknown is None else f"does not take the input step {str(unknown)!r}"


def _asked(kernel: Kernel, call: OpCall, pin: str | None) -> tuple[str | None, int, OpCall]:
    """A kernel's refusal, how many input steps are taken before it, and its call then.

    It is asked with as many of the steps as it may take itself; where it refuses, with one step less.
    """
    refusal = _refusal(kernel, call, pin)
    if refusal is None or not isinstance(call, Call) or not call.spec.input:
        return refusal, 0, call
    op = registry.ops.local(call.op)
    if op is None or op.after_steps is None:
        return refusal, 0, call
    steps = call.spec.input
    for count in range(1, len(steps) + 1):
        rest = replace(call, spec=replace(call.spec, input=steps[count:]))
        refusal = _refusal(kernel, rest, pin)
        if refusal is None:
            return None, count, rest
    return refusal, 0, call


def _after_steps(kernel: Kernel, op: str, count: int) -> Kernel:
    """The kernel, with so many input steps taken before it."""
    if not count:
        return kernel
    after_steps = registry.ops.get(op).after_steps
    assert after_steps is not None
    return replace(kernel, fn=after_steps(kernel.fn, count))


def adapted(kernel: Kernel, call: OpCall) -> Kernel | None:
    """A kernel as `select` returns it for a call if it is the one; None if it refuses."""
    refusal, count, _ = _asked(kernel, call, None)
    return _after_steps(kernel, call.op, count) if refusal is None else None


def unused(kernel: Kernel) -> str | None:
    """Why a kernel serves no call at all: its op is not registered, e.g. one of another package."""
    if kernel.op in registry.ops:
        return None
    return f"is for the op {kernel.op!r}, which no installed package registers"


def _unknown_option(kernel: Kernel, op: Op, call: OpCall) -> str | None:
    """Why a kernel must not serve a matmul whose format has an option that it has not heard of."""
    if op.is_conversion:  # codes do not depend on how matmuls are computed
        return None
    unknown = {name for spec in call.specs for name, _ in spec.options}
    unknown = unknown.difference(OPTIONS, kernel.options)
    for layout in registry.layouts.values() if unknown else ():
        unknown.difference_update(layout.options)
    return f"does not know the option {min(unknown)!r} of the format" if unknown else None


def _unknown_rule(kernel: Kernel, op: Op, call: OpCall) -> str | None:
    """Why a kernel must not scale activations for a matmul, where their scales follow something else.

    Where scales are chosen, by conversions or the reference, the rule is known.
    """
    if op.is_conversion or kernel.priority < BANDS["torch"] or "scale_rule" in kernel.options:
        return None
    for spec in call.specs:
        if spec.act is None or spec.act.static:
            continue
        if (rule := spec.act.option("scale_rule", "absmax")) != "absmax":
            return f"scales activations by their largest magnitude, and not by scale_rule={rule!r}"
    return None


def _allowed(op: Op, pin: str) -> tuple[str, ...]:
    return (pin, "reference") if op.is_conversion else (pin,)


@lru_cache(maxsize=1024)
def _row(op: str, layout: str, device: str, epoch: int) -> tuple[Kernel, ...]:
    """The table's row: kernels of an op for a layout on a device, best first."""
    found = [
        kernel
        for kernel in registry.kernels.values()
        if kernel.op == op and kernel.layout in ("*", layout) and kernel.device in ("*", device)
    ]
    return tuple(sorted(found, key=lambda kernel: (-kernel.priority, kernel.name)))


def _matching(call: OpCall) -> tuple[Kernel, ...]:
    return _row(call.op, call.layout, call.device, registry.epoch)


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
    """Its steps and the function's own bytecode: what changes while it is written, and no version does."""
    code = getattr(kernel.fn, "__code__", None)
    names = repr(kernel.fuses).encode()
    return names if code is None else names + code.co_code + repr(code.co_names).encode()


def matmul_op(weight_shape: tuple[int, ...]) -> str | None:
    """The matmul op for a weight of this shape; None if the weight is dequantized for matmuls."""
    return {2: "linear", 3: "grouped_linear"}.get(len(weight_shape))


def once_per_call(find: Callable[[C], T]) -> Callable[[C], T]:
    """A function of calls that is evaluated once for a call, an epoch of the tables and a pin.

    It must depend on nothing else, and return something. The tables are frozen when it is evaluated.
    What was found is forgotten when there are too many calls.
    """
    found: dict[tuple[C, int, str | None], T] = {}

    @wraps(find)
    def remembered(call: C) -> T:
        try:
            result = found.get((call, registry.epoch, PIN.get()))
        except TypeError:  # a shape that is traced may hold symbols, which do not hash
            registry.freeze()
            return find(call)
        if result is None:
            registry.freeze()  # may load plugins, which starts an epoch
            key = (call, registry.epoch, PIN.get())
            result = find(call)
            if len(found) >= _MAX_FOUND:
                found.clear()
            found[key] = result
        return result

    return remembered


@once_per_call
def select(call: OpCall) -> Kernel:
    """The kernel of highest priority that accepts the call. Freezes the tables (see `reopen`).

    The result is cached by call, epoch of the tables and pin. Predicates run, and write their sentences,
    only when it is not cached.

    Raises:
        UnsupportedOp: all refuse; with their reasons.
    """
    pin = pinned_band()
    for kernel in _matching(call):
        refusal, count, _ = _asked(kernel, call, pin)
        if refusal is None:
            return _after_steps(kernel, call.op, count)
    reasons = "; ".join(f"{c.kernel.name}: {c.refusal}" for c in candidates(call))
    if call.op not in registry.ops:
        reasons = f"no installed package registers the op; registered are {', '.join(registry.ops.names())}"
    raise UnsupportedOp(
        f"no kernel serves {call.op} of layout {call.layout!r} on {call.device}. "
        f"Refused: {reasons or 'none is registered'}"
    )


def run(call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that `select` finds for a call, with these arguments.

    Errors of the kernel reach the caller, with a note that names the kernel and its distribution.
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


def candidates(call: OpCall) -> list[Candidate]:
    """Every kernel of the op for the layout and device, best first, with its refusal."""
    pin = pinned_band()
    return [_candidate(kernel, call, pin) for kernel in _matching(call)]


def _candidate(kernel: Kernel, call: OpCall, pin: str | None) -> Candidate:
    provider = registry.kernels.provider(kernel.name)
    refusal, count, asked = _asked(kernel, call, pin)
    if refusal is not None:
        return Candidate(kernel, provider, refusal)
    description = words(registry.kernels, kernel.name, "describe", asked)
    steps = tuple(str(step) for spec in call.specs for step in spec.input)
    return Candidate(kernel, provider, None, description, steps[:count], steps[count:])
