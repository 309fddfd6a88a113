"""Weights that need data, solved for block by block and written as pieces as soon as they are done."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ao_core.calibration.algorithms import Work, at_once, solve, solve_block, unsolvable_reason
from ao_core.calibration.block import Block
from ao_core.calibration.inputs import unseen_reason
from ao_core.calibration.needing import algorithm_of
from ao_core.calibration.statistics import Statistic
from ao_core.calibration.visit import Inputs, visit
from ao_core.checkpoints.convert import Converted, kept_record, quantized_record
from ao_core.checkpoints.homes import Home, Step, crossing_reason
from ao_core.checkpoints.job import Calibration, Job
from ao_core.checkpoints.paging import Done, Paged
from ao_core.checkpoints.pieces import piece_path, write_piece
from ao_core.checkpoints.progress import Advance
from ao_core.errors import ConfigError
from ao_core.mapped import give_back
from ao_core.quantize import convert, transformed
from ao_core.records import Algorithm, Skip
from ao_core.targets import Decision
from ao_core.tensor import QTensor, check_quantizable
from ao_core.tensor.saving.leaves import flatten
from ao_core.weights import bias_name

__all__ = ["calibrated"]


def calibrated(
    job: Job,
    calibration: Calibration,
    pieces: Sequence[tuple[Step, ...]],
    there: Sequence[int],
    missing: Sequence[int],
    work: Path,
    advance: Advance,
) -> tuple[dict[str, Converted], str]:
    """Solve for what needs data, and write pieces that are done.

    Returns what is in no piece, and how weights were visited.

    Args:
        job: the job.
        calibration: of the job.
        pieces: all.
        there: numbers of those that an earlier run wrote. The model has what is in them, so that the rest
            becomes what it would have been.
        missing: numbers of those that are to be written.
        work: the folder of the pieces.
        advance: is told of weights that are solved for.

    Raises:
        ConfigError: blocks of the model cannot be run one by one, or algorithms do not go together.
        QuantizationError: a weight or its inputs have NaN or inf.
    """
    solving = _Solving(job, calibration, pieces, list(missing), work, advance)
    if not any(step.fqn in solving.wanted for number in missing for step in pieces[number]):
        return {}, ""
    solving.resume({step.fqn: piece_path(work, n) for n in there for step in pieces[n]})
    solving.run()
    return solving.results(), solving.paged.reason


class _Solving:
    """One visit of a checkpoint's model."""

    def __init__(
        self,
        job: Job,
        calibration: Calibration,
        pieces: Sequence[tuple[Step, ...]],
        missing: list[int],
        work: Path,
        advance: Advance,
    ) -> None:
        self._job, self._calibration, self._pieces = job, calibration, pieces
        self._missing, self._folder, self._advance = missing, work, advance
        self._work = Work()
        self._work.places = {
            (id(o.module), o.name): each for each in calibration.decisions for o in each.owners
        }
        self._solvers: dict[str, Algorithm] = {}
        self._entries: list[Decision] = []
        #: by the name of a tensor in the files, its decision and what it has of the parameter
        self.wanted: dict[str, tuple[Decision, Step]] = {}
        for entry in calibration.visited:
            algorithm, home = algorithm_of(entry.config), calibration.homes[entry.fqn]
            assert algorithm is not None
            wanted = [part for part in home.parts if part.wanted]
            if not wanted:
                continue
            self.wanted |= {part.fqn: (entry, part) for part in wanted}
            self._solvers[entry.fqn] = algorithm
            if reason := unsolvable_reason(entry, algorithm) or _crossing(entry, algorithm, home):
                self._work.ready[entry.fqn] = convert(entry, entry.tensor, new=Skip(reason))
            else:
                self._entries.append(entry)
        #: by the name of the tensor in the files, biases that weights may change, each with its weight
        self._biases: dict[str, tuple[Decision, Decision]] = {}
        for entry in self._entries:
            target = entry.owners[0]
            bias = self._work.places.get((id(target.module), bias_name(target) or ""))
            if bias is not None:
                self._biases[calibration.homes[bias.fqn].name] = bias, entry
        kinds = {self._solvers[entry.fqn].sequential for entry in self._entries}
        if len(kinds) > 1:
            names = sorted({solver.name for solver in self._solvers.values()})
            raise ConfigError(
                f"config: {' and '.join(names)} see different inputs, of the model as it is and as it "
                "becomes; quantize with one of them, and the result with the other"
            )
        self.paged = Paged(
            calibration, job.checkpoint, self._work.ready, {}, kinds != {False}, self._flush
        )

    def resume(self, there: Mapping[str, Path]) -> None:
        """Take the tensors that an earlier run wrote.

        A weight of which that did not write all parts, or not the bias, is solved for again, and what it
        wrote of it stays: it is the same.
        """
        homes = self._calibration.homes
        together = {e.fqn: {part.fqn for part in homes[e.fqn].parts} for e in self._entries}
        for name, (_, weight) in self._biases.items():
            together[weight.fqn].add(name)
        again: set[str] = set()
        for names in together.values():
            if not names <= there.keys():
                again |= names
        self.paged.there.update({name: there[name] for name in there.keys() - again})

    def run(self) -> None:
        """Visit all weights, in order."""
        homes = self._calibration.homes
        done = {e.fqn: e for e in self._entries if homes[e.fqn].is_in(self.paged.there)}

        def need(entry: Decision) -> Sequence[Statistic]:
            return self._solvers[entry.fqn].needs(entry.config)

        def rewrite(entry: Decision, inputs: Inputs) -> Tensor | None:
            self._advance(homes[entry.fqn].name, 0)
            check_quantizable(entry.tensor, entry.fqn)
            give_back()  # what runs over the data freed: solving needs the most memory
            solve(self._work, self._solvers, entry, inputs)
            return self._solved(entry)

        def rewrite_block(
            block: Block, weights: Sequence[tuple[Decision, Inputs]]
        ) -> Mapping[str, Tensor | None]:
            for entry, _ in weights:
                self._advance(homes[entry.fqn].name, 0)
                check_quantizable(entry.tensor, entry.fqn)
            solve_block(self._work, self._solvers, block, weights)
            return {entry.fqn: self._solved(entry) for entry, _ in weights}

        found = visit(
            self._calibration.model,
            self._calibration.batches,
            self._entries,
            need,
            rewrite,
            done=Done(done),
            at_once=at_once(self._solvers, rewrite_block),
            driver="blocks",
            weights=self.paged,
        )
        for entry in self._entries:
            if entry.fqn in found.unseen and entry.fqn not in done:
                new = convert(entry, entry.tensor, new=Skip(unseen_reason(entry)))
                self._work.ready.setdefault(entry.fqn, new)
        for solver in {each.name: each for each in self._solvers.values()}.values():
            named = {n: s for n, s in self._work.solved.items() if self._solvers[n] is solver}
            solver.after(named)

    def _solved(self, entry: Decision) -> Tensor | None:
        """What the model gets in place of a weight that was solved for."""
        if entry.fqn in self._work.solved:  # whose values are in `ready`
            found = self._work.solved[entry.fqn]
            self._work.solved[entry.fqn] = replace(found, values=None, bias=None)
        if entry.fqn not in self._work.ready:
            decided = self._work.decided[entry.fqn]
            self._work.ready[entry.fqn] = convert(decided, entry.tensor)
        return self._work.ready[entry.fqn][0]

    def results(self) -> dict[str, Converted]:
        """By the name of a tensor in the files, what became of it and is in no piece."""
        weights = {
            name: _result(self._job, part, self._work, entry)
            for name, (entry, part) in self.wanted.items()
            if entry.fqn in self._work.ready
        }
        return weights | self._shifted(self._biases)

    def _shifted(self, names: Collection[str]) -> dict[str, Converted]:
        """The biases among these tensors that were changed."""
        found: dict[str, Converted] = {}
        for name in names:
            bias = self._biases[name][0] if name in self._biases else None
            if bias is None or bias.fqn not in self._work.ready:
                continue
            step = self._calibration.homes[bias.fqn].parts[0]
            parameter, record = self._work.ready[bias.fqn]
            assert parameter is not None
            extras = {**self._work.extras.get(bias.fqn, {}), "status": record.status}
            report = replace(kept_record(step), reason=record.reason, **extras)
            found[name] = Converted({name: parameter.detach()}, None, report)
        return found

    def _is_solved(self, entry: Decision) -> bool:
        return entry.fqn in self._work.ready or self._calibration.homes[entry.fqn].is_in(
            self.paged.there
        )

    def _flush(self) -> None:
        """Write the pieces of which all that needs data is done."""
        for number in list(self._missing):
            steps = self._pieces[number]
            found = [self.wanted[step.fqn] for step in steps if step.fqn in self.wanted]
            biases = [self._biases[step.fqn] for step in steps if step.fqn in self._biases]
            weights = [weight for _, weight in biases] + [entry for entry, _ in found]
            if not found or not all(map(self._is_solved, weights)):
                continue
            path, homes = piece_path(self._folder, number), self._calibration.homes
            made = {part.fqn: _result(self._job, part, self._work, entry) for entry, part in found}
            made |= self._shifted([step.fqn for step in steps])
            write_piece(self._job, steps, path, self._advance, made, self.paged.reason)
            self.paged.there.update((step.fqn, path) for step in steps)
            self._missing.remove(number)
            # the other parts of a parameter may be in a piece that is not written yet
            for entry, _ in found:
                if homes[entry.fqn].is_in(self.paged.there):
                    self._work.ready.pop(entry.fqn, None)
            for bias, _ in biases:
                self._work.ready.pop(bias.fqn, None)


def _crossing(entry: Decision, algorithm: Algorithm, home: Home) -> str | None:
    """Why what an algorithm makes of a parameter cannot be stored as the tensors of the files."""
    becomes = algorithm.becomes(entry.config)
    if len(home.parts) == 1 or becomes is None:
        return None
    whole = torch.empty(home.shape, dtype=home.dtype, device="meta")
    made = transformed(replace(entry, config=becomes), whole)
    if not isinstance(made, QTensor):
        return None
    return next(filter(None, (crossing_reason(part, made) for part in home.parts)), None)


def _result(job: Job, step: Step, work: Work, entry: Decision) -> Converted:
    """What is written of a weight, or of a part of it."""
    parameter, record = work.ready[entry.fqn]
    extras = work.extras.get(entry.fqn, {})
    if parameter is None:
        report = replace(kept_record(step, Skip(record.reason)), **extras)
        return Converted({step.fqn: job.checkpoint.read(step.entry.fqn)}, None, report)
    new = parameter.detach()
    if not isinstance(new, QTensor):
        raise ConfigError(
            f"{type(entry.config).__name__} makes a {type(new).__name__}, whose memory is what it was: there "
            "is nothing to write"
        )
    own = step.of(new)
    assert isinstance(own, QTensor)
    leaves, stored = flatten(step.fqn, own)
    made = quantized_record(step, own.canonical(), record.sqnr_db, record.seconds)
    return Converted(leaves, stored, replace(made, reason=record.reason or made.reason, **extras))
