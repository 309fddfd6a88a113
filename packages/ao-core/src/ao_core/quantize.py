"""`quantize_`: apply a configuration to the parameters of a model, in place, and report all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.arguments import check_device, checked_but
from ao_core.calibration.inputs import Data, Seen
from ao_core.calibration.needing import (
    QUANTIZED,
    check_data,
    check_useful,
    joined,
    needs_data,
    resolved,
)
from ao_core.calibration.ranks import telling
from ao_core.calibration.stepping import attached, stepped_weight
from ao_core.compute import ComputeWeight
from ao_core.compute.extras import extras_unsupported_reason, freezes
from ao_core.config import Config, ConfigLike, FqnToConfig, config_to_dict
from ao_core.dispatch import matmul_op, run, select
from ao_core.errors import QuantizationError, UnsupportedOp
from ao_core.installing import Undo, install, try_to_move
from ao_core.numerics import error_sums, sqnr, sqnr_of_sums
from ao_core.outcome import (
    converted_weights,
    tell,
    warn_of_emulation,
    warn_of_nothing,
    warn_of_stale,
)
from ao_core.preparing import prepare, prepared_report, put_in, stages, with_steps
from ao_core.progress import Progress, watched
from ao_core.records import Call, Skip, Target
from ao_core.registry import registry
from ao_core.remembering import remember
from ao_core.report import ParameterRecord, Report
from ao_core.targets import Decision, FilterFn, decide, kept_by_default
from ao_core.tensor import STOCHASTIC, QTensor, check_quantizable, dense_memory, repack
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.tensor.convolutions import matrix_of
from ao_core.tensor.sharding import is_sharded
from ao_core.weights import is_conv

__all__ = ["Converted", "apply_decisions", "convert", "quantize_", "sample_sqnr", "transformed"]

#: the parameter that replaces one, or None where it stays, and its record
Converted = tuple[nn.Parameter | None, ParameterRecord]

#: elements of a weight over which the report's SQNR is taken
_SQNR_ELEMENTS = 1 << 20


@checked_but("data")
def quantize_(
    model: nn.Module,
    config: ConfigLike | Sequence[ConfigLike],
    filter_fn: FilterFn | None = None,
    *,
    data: Data | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: Progress = None,
) -> Report:
    """Quantize the weights of a model in place.

    Before anything changes, one weight of each shape, dtype and configuration is converted, or all of them
    with `strict`. What raises by then leaves the model as it was. Then weights are converted and replaced one
    by one: memory holds the model and little more. Where one of these raises, each weight is whole, either
    quantized or not, and the next call goes on.

    Args:
        model: any module. Linear and convolution weights, the projections of MultiheadAttention and
            fused 3-D expert weights are quantized; embeddings and others where they are named. An output
            head, tied to an embedding or of its shape, keeps 8 bits where the format has fewer, unless it
            is named.
        config: a configuration, the name of a recipe, or a `FqnToConfig`; or a list of those, which are
            applied in order: all of them, or none where one raises.
        filter_fn: (module, its name) -> whether its weights are quantized, in place of the default.
        data: for configurations that need calibration data, batches: a list of inputs of the model, a tensor,
            a tuple of arguments or a mapping of them each. Such a configuration is all or nothing, so its new
            weights are held beside the old ones until the last is made, where it rewrites them in turn. Or
            statistics that were gathered before, `ao_core.ext.calibration.Seen`.
        device: move one parameter at a time there and quantize it there, so that the device never holds
            more than the quantized model and one layer; the rest follows.
        strict: raise where a weight that was asked for cannot be quantized. Every weight is converted twice:
            the first time it is tried in its place and thrown away, so that whatever a configuration, a
            weight or a module refuses leaves the model as it was. Memory holds the model and one weight
            more. The second time only what the machine does can fail, such as a device without memory.
        progress: True for a bar, or a function called with (done, total, name); with `strict` for each
            weight twice.

    Returns:
        A report with one record for each parameter, on what was done or why not.

    Raises:
        UnknownNameError: no such recipe.
        ConfigError: the configuration cannot work, one of its names matches nothing, it needs data and
            there is none, or there is data that nothing needs.
        QuantizationError: weights with NaN or inf, on the meta device or not floating point. With
            `strict`, also a weight that the format cannot hold.

    Warns:
        NothingConvertedWarning: every parameter stayed what it was.
        EmulationWarning: matmuls of training are emulated.
        StaleParameterWarning: something still holds parameters that had to be replaced.
    """
    configs = resolved(config)
    batches = check_data(configs, data)
    todo, undo = stages(configs), list[Undo]()
    options: dict[str, Any] = {"device": device, "strict": strict, "progress": progress}
    # a single configuration that quantizes goes on where it was interrupted
    options["undo"] = undo if len(todo) > 1 else None
    steps: dict[str, ChosenSteps] = {}
    decided = partial(decide, filter_fn=filter_fn)
    before, reports = list[Any](), list[Report]()
    try:
        for place, stage in enumerate(todo, 1):
            if stage.prepares:
                later = [other.config for other in todo[place:] if not other.prepares]
                assert batches is not None and not isinstance(batches, Seen)  # noqa: PT018
                with telling(batches):
                    now, notes = prepare(model, stage.config, later, decided, batches, steps)
                changed = put_in(model, now, undo)
                before.append(prepared_report(model, stage.config, changed, notes))
                continue
            each = stage.config
            decisions = with_steps(decided(model, each), steps)
            if batches is not None and needs_data(each):
                from ao_core.calibration.algorithms import apply_algorithms  # which imports this

                report = apply_algorithms(model, each, decisions, batches, **options)
            else:
                report = apply_decisions(model, each, decisions, **options)
            check_useful(each, report, reports)
            reports.append(report)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    report = joined(configs, before, reports)
    if any(_asks(each) for each in configs):
        warn_of_nothing(report.records)
    warn_of_emulation(converted_weights(model, report.records))
    remember(model, report, batches)
    tell(model, report)
    return report


def _asks(config: Config) -> bool:
    """Whether a configuration would change anything: one that keeps all it names would not."""
    return not isinstance(config, FqnToConfig) or any(value for _, value in config.entries)


def apply_decisions(
    model: nn.Module,
    config: Config,
    decisions: Sequence[Decision],
    *,
    ready: Mapping[str, Converted] | None = None,
    undo: list[Undo] | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: Progress = None,
) -> Report:
    """`quantize_` once it is decided what to do with each parameter; `config` is for the report.

    `ready` has what `convert` would be asked for, by name, where it is known already; `undo` is as for
    `install`.

    Raises:
        QuantizationError: a weight has NaN or inf; or, with `strict`, one cannot be quantized.
        ConfigError: `device` cannot be used.
    """
    check_device("device", device)
    ready = ready or {}
    for entry in decisions:
        is_done = isinstance(entry.tensor, QTensor)
        if entry.config is not None and entry.fqn not in ready and not is_done:
            transform = registry.transform_for(type(entry.config))
            if not entry.tensor.is_meta or transform.needs_values:
                check_quantizable(entry.tensor, entry.fqn)

    def made(entry: Decision) -> Converted:
        return ready.get(entry.fqn) or convert(entry, entry.tensor, device)

    order, kinds = _one_of_each_kind_first(decisions)
    rounds = [*order, *order] if strict else order
    steps = watched(rounds, [entry.fqn for entry in rounds], progress, "quantize")
    if strict:
        _try_all(model, islice(steps, len(order)), made)
        if device is not None:
            try_to_move(model)
        kinds = 0  # nothing is left to be found out
    records: dict[str, ParameterRecord] = {}
    changes: list[tuple[Decision, nn.Parameter]] = []
    stale: list[str] = []
    for entry in steps:
        new, records[entry.fqn] = made(entry)
        if new is not None:
            changes.append((entry, new))
        if len(records) >= kinds:
            stale += install(model, changes, None, undo)
            changes.clear()
    report = Report(config_to_dict(config), tuple(records[entry.fqn] for entry in decisions))
    warn_of_stale([*stale, *install(model, changes, device, undo)])
    return report


def _try_all(
    model: nn.Module, entries: Iterable[Decision], made: Callable[[Decision], Converted]
) -> None:
    """Make each new parameter, put it in its places and take it back; the model stays what it was.

    Raises:
        QuantizationError: weights cannot be quantized.
    """
    tried = [_try(model, entry, made) for entry in entries]
    skipped = [record for record in tried if record.status == "skipped"]
    if skipped:
        lines = "; ".join(f"{record.fqn}: {record.reason}" for record in skipped)
        raise QuantizationError(
            f"strict=True and {len(skipped)} weights cannot be quantized (nothing was changed): {lines}"
        )


def _try(
    model: nn.Module, entry: Decision, made: Callable[[Decision], Converted]
) -> ParameterRecord:
    """The record of one parameter; what was made for it is gone afterwards, before the next is."""
    new, record = made(entry)
    if new is not None:
        undo: list[Undo] = []
        install(model, [(entry, new)], None, undo)
        for step in reversed(undo):
            step()
    return record


def _one_of_each_kind_first(decisions: Sequence[Decision]) -> tuple[list[Decision], int]:
    """Plans in the order of conversion, and how many of them begin a kind: configuration, shape and dtype.

    What is wrong with a transform, or what it was given, shows when it converts the first of a kind. These
    are all made before any is put in place, the others one by one, so that a model needs no room for two.
    What stays comes before, since extra tensors of a weight go when it is replaced.
    """
    first: dict[tuple[object, ...], Decision] = {}
    for entry in decisions:
        kind = (repr(entry.config), entry.tensor.shape, entry.tensor.dtype)
        first.setdefault((entry.fqn,) if entry.config is None else kind, entry)
    chosen = set(map(id, first.values()))
    return [*first.values(), *(entry for entry in decisions if id(entry) not in chosen)], len(first)


def convert(
    entry: Decision,
    before: Tensor,
    device: torch.device | str | None = None,
    new: Tensor | Skip | None = None,
) -> Converted:
    """The parameter that replaces `before`, or None, and the record of it; changes nothing.

    `new` is what an algorithm made of it, in place of what the transform would.
    """
    start = time.perf_counter()
    if isinstance(before, QTensor):
        return None, _record(entry, before, "unchanged", f"{QUANTIZED} ({before.spec})", start)
    if entry.config is None:
        return None, _record(entry, before, "unchanged", entry.reason, start)
    memory = dense_memory(before.detach())
    dense = memory if device is None else memory.to(device)
    new = transformed(entry, dense) if new is None else new
    if isinstance(new, Skip):
        status = "unchanged" if new.kept else "skipped"
        return None, _record(entry, before, status, new.reason, start)
    if isinstance(new, ComputeWeight) and isinstance(before, ComputeWeight):
        if new.matmuls == before.matmuls:
            reason = "its matmuls are in low precision already"
            return None, _record(entry, before, "unchanged", reason, start)
        reason = (
            f"its matmuls are set by an earlier conversion already ({before.matmuls.text()}); to "
            "change the recipe, convert a new model and load this one's state dict"
        )
        return None, _record(entry, before, "skipped", reason, start)
    if isinstance(new, ComputeWeight):
        places = [(owner.module, owner.name) for owner in entry.owners]
        if refusal := extras_unsupported_reason(new, places):
            return None, _record(entry, before, "skipped", refusal, start)
    quality = sample_sqnr(dense, new)
    sparsity = new.sparsity if isinstance(new, QTensor) else None
    trains = before.requires_grad and not freezes(new)
    if isinstance(new, QTensor):
        # filters of one dimension have the rank of experts, but not their matmuls
        new = new if is_conv(dense, _role(entry)) else repack(new)
        trains = trains and STOCHASTIC in new.spec.options
    parameter = nn.Parameter(new, requires_grad=trains)
    return parameter, _record(
        entry, before, "changed", entry.reason, start, parameter, quality, sparsity
    )


def transformed(entry: Decision, dense: Tensor) -> Tensor | Skip:
    """What the transform of the plan's configuration makes of a dense tensor, or why it cannot."""
    assert entry.config is not None
    transform = registry.transform_for(type(entry.config))
    try:
        new = transform.apply(stepped_weight(entry, dense), entry.config, _role(entry))
        return new if isinstance(new, Skip) else attached(entry, new)
    except QuantizationError as error:
        return Skip(str(error))


def _role(entry: Decision) -> Target:
    """The owner whose role a tied tensor is quantized for: one that multiplies by it, if any."""
    users = (o for o in entry.owners if kept_by_default(o, entry.tensor) is None)
    return next(users, entry.owners[0])


def sample_sqnr(dense: Tensor, new: Tensor) -> float | None:
    """SQNR in dB of a quantized weight, over whole rows evenly spread where the weight is large."""
    if not isinstance(new, QTensor):
        return None
    if new.is_permuted or is_sharded(dense):
        return float(sqnr(dense, new.dequantize()))
    step = max(-(-dense.numel() // _SQNR_ELEMENTS), 1)
    return float(sqnr_of_sums(_error_sums(dense, new, step)))


def _error_sums(dense: Tensor, new: QTensor, step: int) -> Tensor:
    """The sums over every `step`-th row; of experts, over those of each, which differ in quality."""
    if dense.dim() == 3 and step > 1:
        try:
            experts: list[tuple[Tensor, Any]] = list(zip(dense.unbind(), new.unbind(), strict=True))
        except UnsupportedOp:  # their codes are stored together
            return error_sums(dense, new.dequantize())
        return torch.stack([_error_sums(one, other, step) for one, other in experts]).sum(0)
    shape, device = tuple(dense.shape), new.device.type
    call = Call("error_sums", new.spec, new.stored_shape, shape, dense.dtype, device)
    sums: Tensor = run(call, dense, new, step)
    return sums


def _record(
    entry: Decision,
    before: Tensor,
    status: str,
    reason: str,
    start: float,
    new: Tensor | None = None,
    quality: float | None = None,
    sparsity: float | None = None,
) -> ParameterRecord:
    after = before if new is None else new
    return ParameterRecord(
        fqn=entry.fqn,
        status=status,
        reason=reason,
        shape=tuple(before.shape),
        bytes_before=_bytes(before),
        bytes_after=_bytes(after),
        spec=_format_text(after),
        kernel=_kernel_name(after, _role(entry)),
        sqnr_db=quality,
        seconds=time.perf_counter() - start,
        tied=tuple(owner.fqn for owner in entry.owners[1:]),
        sparsity=sparsity,
    )


def _format_text(tensor: Tensor) -> str:
    """The format of a quantized tensor, or what the matmuls of a `ComputeWeight` compute in."""
    if isinstance(tensor, ComputeWeight):
        return tensor.matmuls.text()
    return str(tensor.spec) if isinstance(tensor, QTensor) else ""


def _bytes(tensor: Tensor) -> int:
    if isinstance(tensor, QTensor):
        return tensor.stored_bytes
    return tensor.numel() * tensor.element_size()


def _kernel_name(tensor: Tensor, target: Target) -> str:
    """The kernel that serves a matmul with one row of activations."""
    if not isinstance(tensor, QTensor):
        return ""
    spec, shape = tensor.spec, tensor.stored_shape
    if is_conv(tensor, target):
        spec, shape = matrix_of(spec, shape, getattr(target.module, "groups", 0)) or (spec, ())
    if (op := matmul_op(shape)) is None:
        return ""
    return select(Call(op, spec, shape, (1, shape[-1]), tensor.dtype, tensor.device.type)).name
