"""Who is told when a model was converted: users, of what went wrong or will be slow, and other libraries."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType

from torch import Tensor, nn

from ao_core.compute import ComputeWeight
from ao_core.compute.matmuls import rule_name
from ao_core.dispatch import select
from ao_core.records import Call
from ao_core.report import ParameterRecord, Report
from ao_core.tensor.sharding import local_shard

__all__ = [
    "EmulationWarning",
    "NothingConvertedWarning",
    "StaleParameterWarning",
    "converted_weights",
    "is_emulated",
    "tell",
    "warn_caller",
    "warn_if_emulated",
    "warn_of_emulation",
    "warn_of_nothing",
    "warn_of_stale",
    "when_quantized",
]

#: in the reason of a parameter that an earlier conversion took; "skipped" where that was another recipe
_ALREADY = " already"
#: tokens for which the kernels of training are asked for
_ROWS = 4096


#: what is called with each model that `quantize_` has changed
_told: list[Callable[[nn.Module, Report | None], object]] = []


def when_quantized(function: Callable[[nn.Module, Report | None], object]) -> None:
    """Call `function(model, report)` after each `quantize_`: for libraries that keep notes on a model.

    The report is None after `dequantize_`, and where only what is trained has changed, as in
    `train_scales_`. The function must leave alone models that it does not know, and not raise.
    """
    if function not in _told:
        _told.append(function)


def tell(model: nn.Module, report: Report | None = None) -> None:
    """Call what `when_quantized` was given, where parameters were changed, or what is trained."""
    if report is None or report.with_status("changed"):
        for function in _told:
            function(model, report)


class EmulationWarning(UserWarning):
    """Matmuls are emulated: their values are right, but they take longer than in high precision."""


class NothingConvertedWarning(UserWarning):
    """A conversion changed no parameter."""


class StaleParameterWarning(UserWarning):
    """Something, such as an optimizer, still holds parameters that the model no longer has."""


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn, at the line of the program that called into ao."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package.startswith("ao_") or package in ("contextlib", "functools", "torch")


def is_emulated(w: ComputeWeight) -> bool:
    """Whether a matmul of this weight falls to the reference."""
    op = "mm" if w.dim() == 2 else "grouped_mm"
    shape, x_shape = tuple(w.shape), (_ROWS, w.shape[-1])
    specs = [spec for spec in w.matmuls if spec is not None and not rule_name(spec)]
    calls = [Call(op, spec, shape, x_shape, w.dtype, w.device.type) for spec in specs]
    return any(select(call).priority < 0 for call in calls)


def warn_of_emulation(weights: Sequence[ComputeWeight]) -> None:
    """Say once how many of these weights have emulated matmuls, if any; on the meta device nobody knows."""
    warn_if_emulated(
        [w for w in weights if not w.is_meta and is_emulated(w)],
        "low-precision matmuls are emulated",
        "Hardware float8 needs an NVIDIA GPU of compute capability 8.9 or later, bfloat16 weights and scales "
        "per tensor or row; ao_core.explain(model) names the kernels.",
    )


def warn_if_emulated(weights: Sequence[Tensor], what: str, needs: str) -> None:
    """One `EmulationWarning` for weights whose matmuls are emulated; none where there are no such.

    Args:
        weights: those without a kernel on their device.
        what: the beginning of the sentence, e.g. "matmuls are emulated".
        needs: a sentence on what would have a kernel.
    """
    if not weights:
        return
    devices = Counter(w.device.type for w in weights)
    where = ", ".join(f"{count} on {device}" for device, count in devices.items())
    warn_caller(
        f"{what} for {len(weights)} weights ({where}): the numbers are right, but training is slower than "
        f"with dense ones in bfloat16. {needs}",
        EmulationWarning,
    )


def converted_weights(model: nn.Module, records: Sequence[ParameterRecord]) -> list[ComputeWeight]:
    """The `ComputeWeight`s that a conversion made, by its records."""
    done = {record.fqn for record in records if record.status == "changed"}
    named = {name: local_shard(p) for name, p in model.named_parameters() if name in done}
    return [w for w in named.values() if isinstance(w, ComputeWeight)]


def warn_of_nothing(records: Sequence[ParameterRecord]) -> None:
    """Say why every parameter stayed what it was, where none was converted."""
    done = [r for r in records if r.status == "changed" or _ALREADY in r.reason]
    weights = [r for r in records if len(r.shape) > 1] or list(records)
    if not weights or any(r.status != "skipped" for r in done):
        return
    # one line for a kind of reason, with the first parameter that has it
    kinds: dict[str, list[ParameterRecord]] = {}
    for record in weights:
        kinds.setdefault(record.reason.partition(":")[0], []).append(record)
    lines = []
    for alike in sorted(kinds.values(), key=len, reverse=True)[:3]:
        more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
        lines.append(f"{alike[0].fqn}{more}: {alike[0].reason}")
    warn_caller(
        f"nothing was converted of {len(records)} parameters; {'; '.join(lines)}",
        NothingConvertedWarning,
    )


def warn_of_stale(names: Sequence[str]) -> None:
    """Say that these parameters were replaced while something else goes on holding the old ones."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warn_caller(
            f"{names[0]}{more} had to be replaced, and something still holds the old parameter: an "
            "optimizer that does would train what the model no longer has. Make optimizers, and compile, "
            "after the conversion.",
            StaleParameterWarning,
        )
