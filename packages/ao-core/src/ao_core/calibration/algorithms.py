"""`quantize_` with data: what algorithms make of the weights of a model, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.calibration.gathering import collect
from ao_core.calibration.hessian import output_error
from ao_core.calibration.inputs import UNSEEN, Seen, unobservable
from ao_core.calibration.matrices import matrices, unmatrices
from ao_core.calibration.needing import algorithm_of
from ao_core.calibration.ranks import Ranks, ranks_of, shares, telling
from ao_core.calibration.samples import Sample, replaced
from ao_core.calibration.statistics import Statistic
from ao_core.calibration.stepping import attached, stepped_weight, unstepped_weight
from ao_core.calibration.visit import Inputs, inputs_of, visit
from ao_core.compute import ComputeWeight
from ao_core.config import Config, FqnToConfig
from ao_core.errors import AoError, ConfigError, QuantizationError
from ao_core.installing import Undo
from ao_core.progress import Progress
from ao_core.quantize import Converted, apply_decisions, convert, sample_sqnr, transformed
from ao_core.records import Algorithm, Skip, Solved
from ao_core.report import Report
from ao_core.targets import Decision
from ao_core.tensor import QTensor, check_quantizable

__all__ = ["Work", "apply_algorithms", "config_of", "solve", "unsolvable_reason"]

#: rows of a matrix whose errors stand for all
_ERROR_ROWS = 256


def config_of(decisions: Sequence[Decision]) -> FqnToConfig:
    """What is decided for each parameter as a configuration, by name."""
    return FqnToConfig({p.fqn: p.config for p in decisions if p.config is not None} or {"*": None})


@dataclass
class Work:
    """What is known of the weights so far, by name."""

    #: what they are converted to, where that is known before the model changes
    ready: dict[str, Converted] = field(default_factory=dict)
    #: what else their records say
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
    solved: dict[str, Solved] = field(default_factory=dict)
    #: configurations that take the place of those that were asked for
    decided: dict[str, Decision] = field(default_factory=dict)
    #: how the weights were visited, if one after the other
    driven: str = ""


def apply_algorithms(
    model: nn.Module,
    config: Config,
    decisions: Sequence[Decision],
    batches: Sequence[Sample] | Seen,
    *,
    undo: list[Undo] | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: Progress = None,
) -> Report:
    """`quantize_` of a configuration that needs data, once it is decided what to do with each parameter.

    First, one run over the data for algorithms that want inputs as the model makes them. Then weights that
    need no data are quantized, and the others are visited in order, each with inputs that the new weights
    before it make. Nothing changes in the model until all is found. Where statistics are given in place of
    batches, they are taken as they are.
    """
    with telling(batches):
        work = _found(model, decisions, batches, ranks_of(batches), progress)
    decided = [work.decided.get(entry.fqn, entry) for entry in decisions]
    moved = {fqn: _moved(done, device) for fqn, done in work.ready.items()}
    report = apply_decisions(
        model,
        config if work.driven else config_of(decided),
        decided,
        ready=moved,
        undo=undo,
        device=device,
        strict=strict,
        progress=progress,
    )
    records = [replace(each, **work.extras.get(each.fqn, {})) for each in report.records]
    return replace(report, records=tuple(records), calibration=work.driven)


def _found(
    model: nn.Module,
    decisions: Sequence[Decision],
    batches: Sequence[Sample] | Seen,
    ranks: Ranks | None,
    progress: Progress,
) -> Work:
    """What algorithms make of the weights; the model has its own again afterwards."""
    work = Work()
    solvers: dict[str, Algorithm] = {}
    entries: list[Decision] = []
    for entry in decisions:
        algorithm = algorithm_of(entry.config)
        if algorithm is None:
            continue
        if not isinstance(entry.tensor, (QTensor, ComputeWeight)):
            check_quantizable(entry.tensor, entry.fqn)
        if reason := unsolvable_reason(entry, algorithm):
            work.ready[entry.fqn] = convert(entry, entry.tensor, new=Skip(reason))
        elif not isinstance(entry.tensor, QTensor):
            solvers[entry.fqn] = algorithm
            entries.append(entry)

    def need(entry: Decision) -> Sequence[Statistic]:
        return solvers[entry.fqn].needs(entry.config)

    if isinstance(batches, Seen):
        for entry in entries:
            inputs = inputs_of(entry, batches.of(entry, need(entry)))
            solve(work, solvers, entry, inputs)
        entries, batches = [], []
    at_once = [entry for entry in entries if not solvers[entry.fqn].sequential]
    in_turn = [entry for entry in entries if solvers[entry.fqn].sequential]
    if at_once:
        groups = collect(model, batches, at_once, need, progress)
        seen = {entry.fqn: group.statistics for group in groups for entry in group.entries}
        each = [(entry, inputs_of(entry, seen.get(entry.fqn, ()))) for entry in at_once]
        _solve_shares(work, solvers, each, ranks)
    if in_turn:
        with ExitStack() as stack:
            _put_in_others(stack, work, decisions, in_turn)

            def before(group: Sequence[tuple[Decision, Inputs]]) -> None:
                _solve_shares(work, solvers, group, ranks)

            def rewrite(entry: Decision, inputs: Inputs) -> Tensor | None:
                return work.ready[entry.fqn][0]

            found = visit(model, batches, in_turn, need, rewrite, progress=progress, before=before)
        work.driven = f"{found.driver} ({found.reason})"
        for entry in in_turn:
            if reason := found.unseen.get(entry.fqn):
                work.ready[entry.fqn] = convert(entry, entry.tensor, new=Skip(reason))
    for algorithm in {solver.name: solver for solver in solvers.values()}.values():
        algorithm.after({n: s for n, s in work.solved.items() if solvers[n] is algorithm})
    return work


def _solve_shares(
    work: Work,
    solvers: dict[str, Algorithm],
    group: Sequence[tuple[Decision, Inputs]],
    ranks: Ranks | None,
) -> None:
    """Solve for some weights, each on one of the ranks."""
    if ranks is None:
        for entry, inputs in group:
            solve(work, solvers, entry, inputs)
        return

    def do(item: tuple[Decision, Inputs]) -> Any:
        entry, inputs = item
        own = Work()
        solve(own, solvers, entry, inputs)
        decided = own.decided.get(entry.fqn)
        return (
            own.ready.get(entry.fqn),
            own.extras.get(entry.fqn),
            own.solved.get(entry.fqn),
            None if decided is None else (decided.config, decided.reason),
        )

    for (entry, _), found in zip(group, shares(group, ranks, do), strict=True):
        ready, extras, solved, decided = found
        tables: tuple[tuple[dict[str, Any], Any], ...] = (
            (work.ready, ready), (work.extras, extras), (work.solved, solved),
        )  # fmt: skip
        for table, value in tables:
            if value is not None:
                table[entry.fqn] = value
        if decided is not None:
            work.decided[entry.fqn] = replace(entry, config=decided[0], reason=decided[1])


def unsolvable_reason(entry: Decision, algorithm: Algorithm) -> str | None:
    """Why a weight cannot be solved for; None where it can, or is quantized already."""
    tensor = entry.tensor
    if isinstance(tensor, QTensor):
        return None  # `convert` says so
    if isinstance(tensor, ComputeWeight):
        return "its matmuls are in low precision already"
    empty = torch.empty_like(tensor, device="meta")
    reason = algorithm.refuses(empty, entry.config, entry.owners[0])
    return reason or unobservable(entry)


def _put_in_others(
    stack: ExitStack, work: Work, decisions: Sequence[Decision], in_turn: Sequence[Decision]
) -> None:
    """Convert what is not visited, and put it into the model for the time of the visit."""
    visited = {entry.fqn for entry in in_turn}
    for plan in decisions:
        entry = work.decided.get(plan.fqn, plan)
        if entry.config is None or entry.fqn in visited:
            continue
        if entry.fqn not in work.ready:
            work.ready[entry.fqn] = convert(entry, entry.tensor)
        if (new := work.ready[entry.fqn][0]) is not None:
            stack.enter_context(replaced([(entry.owners, new)]))


def solve(work: Work, solvers: dict[str, Algorithm], entry: Decision, inputs: Inputs) -> None:
    """Let the algorithm of a weight find what is to become of it."""
    if not inputs.rows:
        work.ready[entry.fqn] = convert(entry, entry.tensor, new=Skip(UNSEEN))
        return
    dense = entry.tensor.detach()
    weight = matrices(stepped_weight(entry, dense), entry.owners[0])
    found = _answer(solvers[entry.fqn], entry, weight, inputs)
    if isinstance(found, Skip):
        work.ready[entry.fqn] = convert(entry, entry.tensor, new=found)
        return
    work.solved[entry.fqn] = found
    extras: dict[str, Any] = {"rows": inputs.rows, "damping": found.damping}
    extras["note"] = "; ".join(filter(None, (inputs.note, found.note)))
    other = replace(entry, config=found.config, reason=found.reason or entry.reason)
    if found.values is None and found.config is not None:
        work.decided[entry.fqn] = other
        if solvers[entry.fqn].sequential:
            work.ready[entry.fqn] = convert(other, entry.tensor)
    else:
        new: Tensor | Skip
        if found.values is None:
            new = dense
        elif isinstance(found.values, QTensor):
            new = attached(entry, found.values)
        else:
            new = unmatrices(found.values, dense.shape, entry.owners[0])
            new = unstepped_weight(entry, new).to(dense.dtype)
        if found.config is not None and not isinstance(new, QTensor):
            new = transformed(other, new)
        parameter, record = convert(entry, entry.tensor, new=new)
        if parameter is not None:
            record = replace(record, reason=other.reason, sqnr_db=sample_sqnr(dense, parameter))
            extras["error_vs_rtn"] = _error_vs_rtn(other, dense, parameter, inputs)
        work.ready[entry.fqn] = parameter, record
    work.extras[entry.fqn] = extras


def _answer(algorithm: Algorithm, entry: Decision, weight: Tensor, inputs: Inputs) -> Solved | Skip:
    """What the algorithm finds for a weight.

    Raises:
        AoError: it fails, or answers something else; names the weight.
    """
    try:
        found: object = algorithm.solve(weight, inputs.statistics, entry.config, entry.owners[0])
    except (ConfigError, QuantizationError) as error:
        raise type(error)(f"{entry.fqn}: {error}") from error
    except AoError:
        raise
    except Exception as error:
        raise QuantizationError(
            f"{entry.fqn}: the algorithm {algorithm.name!r} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, (Solved, Skip)):
        raise QuantizationError(
            f"{entry.fqn}: the algorithm {algorithm.name!r} answered a {type(found).__name__}, not Solved or "
            "Skip"
        )
    if isinstance(found, Solved) and found.values is not None:
        quantized = isinstance(found.values, QTensor)
        wanted = tuple(entry.tensor.shape if quantized else weight.shape)
        if tuple(found.values.shape) != wanted:
            raise QuantizationError(
                f"{entry.fqn}: what the algorithm {algorithm.name!r} found has the shape "
                f"{tuple(found.values.shape)}, not {wanted}"
            )
    return found


def _error_vs_rtn(entry: Decision, dense: Tensor, new: Tensor, inputs: Inputs) -> float | None:
    """The squared error of the outputs over that of rounding to nearest; None where it is not known."""
    if entry.config is None:
        return None
    nearest = transformed(entry, dense)
    if isinstance(nearest, Skip):
        return None
    errors = [_output_error(entry, dense, each, inputs) for each in (new, nearest)]
    if errors[0] is None or not errors[1]:
        return None
    return errors[0] / errors[1]


def _output_error(entry: Decision, dense: Tensor, new: Tensor, inputs: Inputs) -> float | None:
    """tr(Δ H Δᵀ) of some rows of all matrices, Δ being the change of the weight.

    With the diagonal of H if that is all that is known.
    """
    values = new.dequantize() if isinstance(new, QTensor) else new
    change = stepped_weight(entry, values.detach().to(dense.device) - dense)
    change = matrices(change, entry.owners[0])
    # rows that are spread evenly say as much of large weights as all, in a fraction of the time
    change = change[:, :: -(-change.shape[1] // _ERROR_ROWS)].double()
    total = 0.0
    for delta_NK, each in zip(change, inputs.statistics, strict=True):
        keys = each.values
        if "hessian" in keys:
            total += output_error(delta_NK, keys["hessian"])
        elif "squares" in keys:
            total += float((delta_NK.square() @ keys["squares"]).sum())
        else:
            return None
    return total


def _moved(done: Converted, device: torch.device | str | None) -> Converted:
    """A parameter where the model is going to be."""
    parameter, record = done
    if parameter is None or device is None:
        return done
    return nn.Parameter(parameter.detach().to(device), parameter.requires_grad), record
