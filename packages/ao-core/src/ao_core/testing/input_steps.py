"""Part of `KernelSuite`: input steps, whose oracle is the matrix S in float64; see `ao_core.steps`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_core.dispatch import adapted
from ao_core.numerics import hadamard_matrix, has_hadamard
from ao_core.records import Kernel, OpCall
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.steps import LOW_RANK, PERMUTE, ROW_STEPS, SCALE, Step, hadamard_step
from ao_core.tensor import QTensor
from ao_core.testing.base import gaussian

__all__ = ["KernelSteps", "every_step", "step_matrix", "step_values"]


def every_step(k: int, last: tuple[str, ...] = ()) -> tuple[Step, ...]:
    """A step of each kind that changes rows, for rows of k elements, those of the kinds `last` at the end."""
    blocks = [b for b in range(1, 65) if k % b == 0 and has_hadamard(b)]
    # those that are no power of two have matrices that are not symmetric
    block = max(blocks, key=lambda b: (b & (b - 1) != 0, b))
    each = {"permute": PERMUTE, "scale": SCALE, "hadamard": hadamard_step(block)}
    return tuple(each[kind] for kind in sorted(ROW_STEPS, key=lambda kind: kind in last))


def step_values(spec: Spec, shape: tuple[int, ...], seed: int = 31) -> dict[str, Any]:
    """What `quantize_tensor` is to be given for the input steps; each expert has its own.

    Scales are of either sign, and vary by a factor of 4: one that is ignored is seen in every product.
    """
    kinds, sizes = [step.kind for step in spec.input], (*shape[:-2], shape[-1])
    noise, found = gaussian(sizes, seed=seed), dict[str, Any]()
    if "permute" in kinds:
        found["in_perm"] = noise.argsort(-1)
    if "scale" in kinds:
        found["in_scale"] = noise.sign() * 4.0 ** (noise.argsort(-1) / max(shape[-1], 1) - 0.5)
        found["in_scale"] = torch.where(noise == 0, 1.0, found["in_scale"])
    if rank := next((step.block for step in spec.input if step.kind == LOW_RANK), 0):
        b = gaussian((*shape[:-1], rank), seed=seed + 1)
        a = gaussian((*shape[:-2], rank, shape[-1]), seed=seed + 2)
        found["low_rank"] = b, a / rank**0.5
    return found


def step_matrix(w: QTensor, expert: int | None = None) -> Tensor:
    """S (K, K) in float64, from the parts of a weight and the definition of each step."""
    k = w.stored_shape[-1]
    whole = torch.eye(k, dtype=torch.float64)
    for step in w.spec.input:
        if step.kind == "hadamard":
            block = hadamard_matrix(step.block).double() / step.block**0.5
            whole = torch.block_diag(*[block] * (k // step.block)) @ whole
            continue
        part = w.parts[{"permute": "in_perm", "scale": "in_scale"}[step.kind]].cpu()
        row = part.reshape(-1, k)[expert or 0]
        whole = whole[row.long()] if step.kind == "permute" else row.double()[:, None] * whole
    return whole.to(w.device)


def _with_paley(one: Any) -> tuple[int, ...]:
    """A shape of the case with rows for a Hadamard matrix that is not symmetric."""
    return (*one.shape[:-1], 96)


class KernelSteps:
    """Input steps are taken by the kernel if it declares them, else before it; never ignored."""

    kernel: str

    @property
    def record(self) -> Kernel:
        """The record under test."""
        raise NotImplementedError

    @property
    def trial(self) -> Any:
        """How the op of the kernel is tried."""
        raise NotImplementedError

    def test_input_steps(self, one: Any) -> None:
        """All steps together, and each that the kernel declares by itself: the product is the logical one.

        A kernel of another op than matmuls refuses what it does not declare.
        """
        for case in self._stepped_cases(one):
            declared = all(step.kind in self.record.fuses for step in case.specs[0].input)
            taken = declared or registry.ops.get(self.record.op).after_steps is not None
            for seed, (batch, call) in enumerate(self._stepped_calls(one, case), start=1):
                kernel = adapted(self.record, call)
                steps = ", ".join(str(step) for spec in call.specs for step in spec.input)
                assert (kernel is not None) == taken, (
                    f"kernel {self.kernel!r} of {call.op}: the input steps {steps} are "
                    f"{'refused' if taken else 'not refused, and not taken'}"
                )
                if kernel is None:
                    continue
                for args, expected in self.trial.samples(case, batch, seed):
                    try:
                        found = self.trial.run(kernel.fn, args)
                        self.trial.check(found, expected, case, self._bound(case))
                    except AssertionError as error:
                        raise AssertionError(
                            f"kernel {self.kernel!r} of {call.op} with the input steps {steps}, of which it "
                            f"declares {', '.join(self.record.fuses) or 'none'}: {error}"
                        ) from error

    def _stepped_cases(self, one: Any) -> Iterator[Any]:
        """The case after all steps, and after each that is declared; also for a block of another kind."""
        if not one.specs:  # all operands are dense
            return
        fuses, layout = self.record.fuses, registry.layouts.get(one.spec.layout)
        shapes = [one.shape]
        if "hadamard" in fuses and self.trial.fitting(
            layout, other := _with_paley(one), [one.spec]
        ):
            shapes.append(other)
        for shape in shapes:
            steps = every_step(shape[-1], fuses)
            for some in (steps, *((step,) for step in steps if step.kind in fuses)):
                yield replace(
                    one, shape=shape, specs=(replace(one.spec, input=some), *one.specs[1:])
                )

    def _stepped_calls(self, one: Any, case: Any) -> Iterator[tuple[Any, OpCall]]:
        """The first and the last batch that the kernel accepts without steps, if it can run here."""
        batches = self._batches(one)
        for batch in [*batches[:1], *batches[1:][-1:]]:  # they need not hash
            call = self.trial.call(self.record.op, case, batch)
            if call is not None and self.record.unavailable() is None:
                yield batch, call

    def _batches(self, case: Any) -> list[Any]:
        raise NotImplementedError

    def _bound(self, case: Any) -> float:
        raise NotImplementedError
