"""`quantize_` with data: what algorithms make of the weights of a model, and the report of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.calibration.answers import checked_answer, guarded
from ao_core.calibration.block import Block, BlockWeight
from ao_core.calibration.errors import error_vs_rtn
from ao_core.calibration.gathering import Need, collect
from ao_core.calibration.inputs import Seen, unobservable, unseen_reason
from ao_core.calibration.matrices import matrices, unmatrices
from ao_core.calibration.needing import algorithm_of
from ao_core.calibration.ranks import Ranks, ranks_of, shares, telling
from ao_core.calibration.samples import Sample, replaced
from ao_core.calibration.statistics import Statistic
from ao_core.calibration.stepping import attached, stepped_weight, unstepped_weight
from ao_core.calibration.visit import AtOnce, Inputs, inputs_of, visit
from ao_core.compute import ComputeWeight
from ao_core.config import Config, FqnToConfig
from ao_core.errors import ConfigError
from ao_core.installing import Undo
from ao_core.progress import Progress
from ao_core.quantize import Converted, apply_decisions, convert, sample_sqnr, transformed
from ao_core.records import Algorithm, Skip, Solved
from ao_core.report import Report
from ao_core.targets import Decision
from ao_core.tensor import QTensor, check_quantizable
from ao_core.weights import bias_name

__all__ = [
    "Work",
    "apply_algorithms",
    "at_once",
    "config_of",
    "solve",
    "solve_block",
    "unsolvable_reason",
]


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
    #: what is in the model for the time of the visit
    stack: ExitStack = field(default_factory=ExitStack)
    #: every parameter, by its modules and its names there
    places: dict[tuple[int, str], Decision] = field(default_factory=dict)


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
        work = _found(model, decisions, batches, progress)
    decided = [work.decided.get(entry.fqn, entry) for entry in decisions]
    # what was skipped may wait for data still, and would again
    skipped = {fqn for fqn, (_, record) in work.ready.items() if record.status == "skipped"}
    moved = {fqn: _moved(done, device) for fqn, done in work.ready.items()}
    report = apply_decisions(
        model,
        config if work.driven else config_of([e for e in decided if e.fqn not in skipped]),
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
    progress: Progress,
) -> Work:
    """What algorithms make of the weights; the model has its own again afterwards."""
    work = Work()
    work.places = {(id(o.module), o.name): each for each in decisions for o in each.owners}
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

    in_turn: list[Decision] = []
    with work.stack:
        if isinstance(batches, Seen):
            for entry in entries:
                solve(work, solvers, entry, inputs_of(entry, batches.of(entry, need(entry))))
        else:
            as_it_is = [entry for entry in entries if not solvers[entry.fqn].sequential]
            in_turn = [entry for entry in entries if solvers[entry.fqn].sequential]
            groups = collect(model, batches, as_it_is, need, progress) if as_it_is else []
            seen = {entry.fqn: group.statistics for group in groups for entry in group.entries}
            each = [(entry, inputs_of(entry, seen.get(entry.fqn, ()))) for entry in as_it_is]
            _solve_shares(work, solvers, each, ranks_of(batches))
        if in_turn:
            assert not isinstance(batches, Seen)
            _put_in_others(work, decisions, in_turn)
            work.driven = _visit(work, solvers, model, batches, in_turn, need, progress)
    for algorithm in {solver.name: solver for solver in solvers.values()}.values():
        algorithm.after({n: s for n, s in work.solved.items() if solvers[n] is algorithm})
    return work


def _visit(
    work: Work,
    solvers: dict[str, Algorithm],
    model: nn.Module,
    batches: Sequence[Sample],
    entries: Sequence[Decision],
    need: Need,
    progress: Progress,
) -> str:
    """Solve for weights in turn, or block by block; how the data was run."""
    ranks = ranks_of(batches)

    def before(group: Sequence[tuple[Decision, Inputs]]) -> None:
        _solve_shares(work, solvers, group, ranks)

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor | None:
        return work.ready[entry.fqn][0]

    def rewrite_block(
        block: Block, weights: Sequence[tuple[Decision, Inputs]]
    ) -> Mapping[str, Tensor | None]:
        solve_block(work, solvers, block, weights)
        return {entry.fqn: work.ready[entry.fqn][0] for entry, _ in weights}

    together = at_once(solvers, rewrite_block)
    found = visit(
        model, batches, entries, need, rewrite, at_once=together, progress=progress, before=before
    )
    for entry in entries:
        if reason := found.unseen.get(entry.fqn):
            work.ready[entry.fqn] = convert(entry, entry.tensor, new=Skip(reason))
    return f"{found.driver} ({found.reason})"


def at_once(
    solvers: Mapping[str, Algorithm],
    rewrite: Callable[[Block, Sequence[tuple[Decision, Inputs]]], Mapping[str, Tensor | None]],
) -> AtOnce:
    """The weights, by the algorithms of them, that are solved for block by block."""
    return AtOnce(lambda each: solvers[each.fqn].solve_block is not None, rewrite)


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
        solved, decided = own.solved.get(entry.fqn), own.decided.get(entry.fqn)
        if solved is not None and solved.bias is not None:
            raise ConfigError(f"data=OverRanks: {entry.fqn}: biases are corrected by one process")
        return (
            own.ready.get(entry.fqn),
            own.extras.get(entry.fqn),
            solved,
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


def _put_in_others(work: Work, decisions: Sequence[Decision], in_turn: Sequence[Decision]) -> None:
    """Convert what is not visited, and put it into the model for the time of the visit."""
    visited = {entry.fqn for entry in in_turn}
    for plan in decisions:
        entry = work.decided.get(plan.fqn, plan)
        if entry.config is None or entry.fqn in visited:
            continue
        if entry.fqn not in work.ready:
            work.ready[entry.fqn] = convert(entry, entry.tensor)
        if (new := work.ready[entry.fqn][0]) is not None:
            work.stack.enter_context(replaced([(entry.owners, new)]))


def solve(work: Work, solvers: dict[str, Algorithm], entry: Decision, inputs: Inputs) -> None:
    """Let the algorithm of a weight find what is to become of it."""
    if not inputs.rows:
        work.ready[entry.fqn] = convert(entry, entry.tensor, new=Skip(unseen_reason(entry)))
        return
    solver, target = solvers[entry.fqn], entry.owners[0]
    weight = matrices(stepped_weight(entry, entry.tensor.detach()), target)
    found = guarded(
        solver,
        entry.fqn,
        lambda: solver.solve(weight, inputs.statistics, entry.config, target),
    )
    _take(work, solver, entry, inputs, checked_answer(solver, entry, found))


def solve_block(
    work: Work,
    solvers: dict[str, Algorithm],
    block: Block,
    weights: Sequence[tuple[Decision, Inputs]],
) -> None:
    """The same for weights of one block, those of each algorithm at once."""
    for solver in {solvers[entry.fqn].name: solvers[entry.fqn] for entry, _ in weights}.values():
        own = [(entry, inputs) for entry, inputs in weights if solvers[entry.fqn] is solver]
        asked = [_block_weight(entry, inputs) for entry, inputs in own]
        solve = solver.solve_block
        assert solve is not None
        found = guarded(solver, block.name, partial(solve, block, asked))
        for entry, inputs in own:
            answer = found.get(entry.fqn) if isinstance(found, Mapping) else found
            _take(work, solver, entry, inputs, checked_answer(solver, entry, answer))


def _block_weight(entry: Decision, inputs: Inputs) -> BlockWeight:
    assert entry.config is not None
    target = entry.owners[0]
    values = matrices(stepped_weight(entry, entry.tensor.detach()), target)
    return BlockWeight(entry.fqn, values, inputs.statistics, entry.config, target)


def _take(
    work: Work, solver: Algorithm, entry: Decision, inputs: Inputs, found: Solved | Skip
) -> None:
    """Note what was found for a weight, and what becomes of it."""
    dense = entry.tensor.detach()
    if isinstance(found, Skip):
        work.ready[entry.fqn] = convert(entry, entry.tensor, new=found)
        return
    work.solved[entry.fqn] = found
    extras: dict[str, Any] = {"rows": inputs.rows, "damping": found.damping}
    extras["note"] = "; ".join(filter(None, (inputs.note, found.note)))
    if found.bias is not None and (reason := _shift(work, entry, inputs, found)):
        extras["note"] = "; ".join(filter(None, (extras["note"], reason)))
    if found.loss is not None:
        extras["loss_before"], extras["loss_after"] = found.loss
    other = replace(entry, config=found.config, reason=found.reason or entry.reason)
    if found.values is None and (found.config is not None or found.reason):
        work.decided[entry.fqn] = other
        if solver.sequential:
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
            extras["error_vs_rtn"] = error_vs_rtn(other, dense, parameter, inputs)
        work.ready[entry.fqn] = parameter, record
    work.extras[entry.fqn] = extras


def _shift(work: Work, entry: Decision, inputs: Inputs, found: Solved) -> str | None:
    """Add to the bias of a weight's layer, for the time of the visit and then for good, or say why not."""
    assert found.bias is not None
    if (name := bias_name(target := entry.owners[0])) is None:
        return "it has no bias"
    bias = work.places[id(target.module), name]
    if len(bias.owners) > 1 or len(entry.owners) > 1:
        return "its bias stays: it, or the weight, is shared by several modules"
    before = bias.tensor
    new = (before.detach().double() + found.bias.reshape(before.shape).to(before.device)).to(
        before.dtype
    )
    reason = f"corrected by the mean error of the outputs of {entry.fqn}"
    done = replace(bias, config=entry.config, reason=reason)
    work.ready[bias.fqn] = convert(done, before, new=new)
    work.extras[bias.fqn] = {"rows": inputs.rows}
    work.stack.enter_context(replaced([(bias.owners, new)]))
    return None


def _moved(done: Converted, device: torch.device | str | None) -> Converted:
    """A parameter where the model is going to be."""
    parameter, record = done
    if parameter is None or device is None:
        return done
    return nn.Parameter(parameter.detach().to(device), parameter.requires_grad), record
