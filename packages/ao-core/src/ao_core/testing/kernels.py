"""`KernelSuite`: what a kernel must do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core.dispatch import candidates
from ao_core.errors import ConfigError
from ao_core.records import Kernel, OpCall
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor import QTensor
from ao_core.testing.base import Suite, as_bytes, available_devices, covering
from ao_core.testing.input_steps import KernelSteps
from ao_core.testing.trials import KernelCase, OpTrial

__all__ = ["KernelCase", "KernelSuite"]

#: relative error in norm that rounding in the activations' dtype explains
_RTOL = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


#: seconds that `refuses` may take for a call like one that it was asked for before
SLOWEST_ANSWER = 0.02


class KernelSuite(KernelSteps, Suite):
    """Tests of one kernel by the trials of its op, see `Op.trials` and `ao_core.testing.OpTrial`.

    Matmuls are compared with float64, conversions bit for bit with the reference.

    Attributes:
        kernel: its registered name.
        rtol: bound on the relative error in norm of matmuls; None: by the activations' dtype.
        specs, shapes, dtypes: formats and shapes of quantized tensors, and dtypes of dense ones, to
            try; the kernel must accept some of it. None: what the op is tried on by default.
        batches: for matmuls, leading dimensions of the activations; None: the default.
    """

    kernel: str
    rtol: float | None = None
    specs: Sequence[Spec] | None = None
    shapes: Sequence[tuple[int, ...]] | None = None
    dtypes: Sequence[torch.dtype] | None = None
    batches: Sequence[Any] | None = None

    @property
    def record(self) -> Kernel:
        """The record under test."""
        return registry.kernels.get(self.kernel)

    @property
    def trial(self) -> OpTrial:
        """How its op is called.

        Raises:
            ConfigError: the op has no trials.
        """
        trials = registry.ops.get(self.record.op).trials
        if trials is None:
            raise ConfigError(f"op {self.record.op!r} has no trials; give its `Op` some")
        found: OpTrial = trials()
        return found

    def cases(self) -> list[KernelCase]:
        """Every spec that fits the kernel's layout, in every shape and dtype, on every device."""
        record, trial = self.record, self.trial
        return trial.cases(
            record,
            available_devices() if record.device == "*" else [record.device],
            trial.specs if self.specs is None else self.specs,
            trial.shapes if self.shapes is None else self.shapes,
            trial.dtypes if self.dtypes is None else self.dtypes,
        )

    argument_names = ("cases", "case", "one")

    def arguments(self) -> dict[str, Sequence[Any]]:
        """Cases of which the kernel accepts at least one batch.

        `cases`: the list of all; `case`: every two of spec, shape, dtype and device together; `one`: each
        spec once, in shapes and dtypes that take turns.
        """
        found = [case for case in self.cases() if self._batches(case)]
        by_specs: dict[tuple[Spec, ...], list[KernelCase]] = {}
        for case in found:
            by_specs.setdefault(case.specs, []).append(case)
        return {
            "cases": [found],
            "case": covering(found, lambda case: (case.specs, case.shape, case.dtype, case.device)),
            "one": [each[turn % len(each)] for turn, each in enumerate(by_specs.values())],
        }

    # -- selection -------------------------------------------------------------------------------

    def test_accepts_something(self) -> None:
        """At least one of the cases is for this kernel."""
        answers: list[Any] = [self.record.refuses(call) for call in self._every_call()]
        odd = [a for a in answers if a is not None and not isinstance(a, str)]
        assert not odd, (
            f"kernel {self.kernel!r}: refuses answers {odd[0]!r}; None means yes, a sentence why not"
        )
        reasons = "; ".join(dict.fromkeys(a for a in answers[:3] if a is not None))
        assert None in answers, (
            f"kernel {self.kernel!r} accepts none of the cases ({reasons}); set `specs` and `shapes`"
        )

    def test_reasons_are_sentences(self) -> None:
        """`unavailable` and `refuses` answer None or say why not, without delay; they raise for no call."""
        answers: set[Any] = {self.record.unavailable()}
        for call in self._every_call():
            answers.add(self.record.refuses(call))
            answers.update(map(self.record.refuses, self.trial.odd_calls(call)))
        for answer in answers - {None}:
            assert isinstance(answer, str), f"{answer!r} is not a sentence; None means yes"
            assert len(answer.split()) >= 3, f"not a sentence: {answer!r}"
            assert "\n" not in answer
        for call in islice(self._every_call(), 3):
            taken = min(_seconds(self.record.refuses, call) for _ in range(5))
            assert taken <= SLOWEST_ANSWER, (
                f"kernel {self.kernel!r}: refuses takes {1e3 * taken:.0f} ms; each new shape waits for it"
            )

    def test_describes_itself_in_a_line(self) -> None:
        """`describe` answers every call that is accepted with a line, or an empty one."""
        for call in self._every_call():
            if self.record.refuses(call) is None:
                text = self.record.describe(call)
                assert isinstance(text, str)
                assert "\n" not in text

    def test_is_a_candidate(self, cases: list[KernelCase]) -> None:
        """The table of the layout and device lists it, with its own answer."""
        for case in cases:
            call = self._call(case, self._batches(case)[0])
            assert call is not None
            listed = {c.kernel.name: c.refusal for c in candidates(call)}
            assert self.kernel in listed, case
            if self.record.unavailable() is None:
                assert listed[self.kernel] is None, case

    # -- results ---------------------------------------------------------------------------------

    def test_results(self, case: KernelCase) -> None:
        """All that it accepts: shape, dtype, and values within the bound or bit for bit; no side effect."""
        for args, expected in self._calls(case):
            before = [leaf.clone() for leaf in _memory(args)]
            self._check(args, expected, case)
            unchanged = map(torch.equal, map(as_bytes, _memory(args)), map(as_bytes, before))
            assert all(unchanged), "the kernel changed its input"

    def test_is_deterministic(self, one: KernelCase) -> None:
        """The same call gives the same bits."""
        for args, _ in self._calls(one):
            results = [self.trial.run(self.record.fn, args) for _ in range(2)]
            assert self.trial.same(*results)

    def test_strided_inputs(self, one: KernelCase) -> None:
        """Dense arguments that are not contiguous give what contiguous ones give."""
        for args, expected in self._calls(one):
            for variant in self.trial.strided(args):
                self._check(variant, expected, one)

    def op_samples(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Custom ops of the kernel, each with arguments, for `torch.library.opcheck`; none by default."""
        return []

    def test_custom_ops(self) -> None:
        """Schema, fake kernel and autograd registration of the ops behind the kernel are right."""
        samples = list(self.op_samples())
        if isinstance(self.record.fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            case = self.arguments()["case"][0]
            samples.append((self.record.fn, next(self._calls(case))[0]))
        for op, arguments in samples:
            results = torch.library.opcheck(op, arguments)
            assert set(results.values()) == {"SUCCESS"}, results

    # -- how the op is called --------------------------------------------------------------------

    def _call(self, case: KernelCase, batch: Any) -> OpCall | None:
        return self.trial.call(self.record.op, case, batch)

    def _every_call(self) -> Iterator[OpCall]:
        batches = self.trial.batches if self.batches is None else self.batches
        for case in self.cases():
            for batch in batches:
                if (call := self._call(case, batch)) is not None:
                    yield call

    def _batches(self, case: KernelCase) -> list[Any]:
        """Those that the kernel accepts."""
        return [
            batch
            for batch in (self.trial.batches if self.batches is None else self.batches)
            if (call := self._call(case, batch)) is not None and self.record.refuses(call) is None
        ]

    def _calls(self, case: KernelCase) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Arguments of the kernel and the result to compare with, for each batch that it accepts."""
        if reason := self.record.unavailable():
            pytest.skip(f"{self.kernel} {reason}")
        for seed, batch in enumerate(self._batches(case), start=1):
            yield from self.trial.samples(case, batch, seed)

    def _check(self, args: tuple[Any, ...], expected: Any, case: KernelCase) -> None:
        """Call the kernel and check what it returns; whatever fails says for which arguments."""
        try:
            actual = self.trial.run(self.record.fn, args)
            self.trial.check(actual, expected, case, self._bound(case))
        except Exception as error:
            raise AssertionError(
                f"kernel {self.kernel!r} of {case}, {_given(args)}: {error}"
            ) from error

    def _bound(self, case: KernelCase) -> float:
        return _RTOL[case.dtype] if self.rtol is None else self.rtol


def _given(args: tuple[Any, ...]) -> str:
    """The dense operands of a call in words."""
    shown = []
    for each in args:
        if isinstance(each, Tensor) and not isinstance(each, QTensor):
            strides = "" if each.is_contiguous() else f" with strides {each.stride()}"
            shown.append(f"{tuple(each.shape)}{strides}")
    return f"dense operands {', '.join(shown) or 'none'}"


def _seconds(fn: Callable[[Any], object], call: OpCall) -> float:
    start = perf_counter()
    fn(call)
    return perf_counter() - start


def _memory(args: Iterable[Any]) -> list[Tensor]:
    """All plain tensors among the arguments of a kernel, also in lists and dictionaries."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, QTensor):
            found += [leaf for _, leaf in arg.leaves()]
        elif isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, dict):
            found += _memory(arg.values())
        elif isinstance(arg, (list, tuple)):
            found += _memory(arg)
    return found
