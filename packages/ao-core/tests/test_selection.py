"""What selection costs: predicates are asked once per kind of call, and `explain` writes sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ao_core
from ao_core import WHOLE, Call, Kernel, QTensor, Spec, quantize_tensor
from ao_core.dispatch import select
from ao_core.layouts import Parts
from ao_core.layouts.int4_cpu import Int4Cpu
from ao_core.registry import registry
from ao_core.tensor import repack
from ao_core.testing.base import gaussian
from ao_core.testing.registered import registered

SPEC = Spec("int8", (1, WHOLE))


class Watched:
    """Kernels for matmuls and for `dequantize` that refuse, and how often each was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.kernels = tuple(
            Kernel(f"watched_{op}", op, "plain", "cpu", self._fail, 40, refuses=self._refuse)
            for op in ("linear", "dequantize")
        )

    def _refuse(self, call: Call) -> str:
        self.asked[call.op] += 1
        return f"refuses {call.spec}"

    def _fail(self, *args: object) -> Tensor:
        raise AssertionError("it refuses every call")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched()
    written = Spec.__str__

    def counted(spec: Spec) -> str:
        made.asked["sentences"] += 1
        return written(spec)

    with registered(*made.kernels):
        monkeypatch.setattr(Spec, "__str__", counted)
        yield made


@pytest.fixture
def weight(watched: Watched) -> QTensor:
    w = quantize_tensor(gaussian((8, 16)), SPEC)
    watched.asked.clear()
    return w


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_one_question_for_a_kind_of_call(watched: Watched, weight: QTensor, mode) -> None:
    x = gaussian((3, 16)).requires_grad_(mode is torch.enable_grad)
    with mode():
        F.linear(x, weight)
        first = Counter(watched.asked)
        assert first["linear"] == 1
        for _ in range(20):
            F.linear(x, weight)
        assert watched.asked == first
        other = quantize_tensor(gaussian((8, 16), seed=1), SPEC)
        watched.asked.clear()
        F.linear(x, other)  # another layer of the same kind
        assert watched.asked["linear"] == watched.asked["sentences"] == 0


def test_the_backward_pass_asks_once_too(watched: Watched, weight: QTensor) -> None:
    x = gaussian((3, 16)).requires_grad_()
    weight.dequantize()
    F.linear(x, weight).sum().backward()
    watched.asked.clear()
    for _ in range(20):
        F.linear(x, weight).sum().backward()
    assert not +watched.asked


def test_only_explain_writes_again(watched: Watched, weight: QTensor) -> None:
    call = Call("linear", SPEC, (8, 16), (3, 16), torch.float32, "cpu")
    select(call)
    watched.asked.clear()
    select(call)
    assert not +watched.asked
    for times in (1, 2):
        text = str(ao_core.explain(weight, rows=(3,)))
        assert "watched_linear (in-process, priority 40): refuses int8" in text
        assert watched.asked["linear"] == times
    select(call)
    assert watched.asked["linear"] == 2


def test_layouts_are_asked_once_for_weights_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """`repack` ranks the layouts by kernel once for a kind of weight, an epoch and a pin."""
    asked: Counter[str] = Counter()

    def refuses(self: Int4Cpu, *args: object) -> str | None:
        asked["layout"] += 1
        return refused(self, *args)

    refused = Int4Cpu.refuses
    monkeypatch.setattr(Int4Cpu, "refuses", refuses)
    spec = Spec("uint4", (1, 32), "bfloat16", zero_point="int", layout="packed")
    ao_core.reopen()
    weights = [quantize_tensor(gaussian((32, 64), seed=seed), spec) for seed in range(3)]
    kinds = [repack(w, torch.bfloat16).spec.layout for w in weights]
    assert asked["layout"] == 1
    assert kinds == kinds[:1] * 3
    assert kinds[0] != "packed"
    with ao_core.kernels("reference"):
        assert repack(weights[0], torch.bfloat16).spec.layout == "packed"
    assert asked["layout"] == 2
    ao_core.reopen()
    repack(weights[0], torch.bfloat16)
    assert asked["layout"] == 3


def test_pins_and_epochs_ask_anew(watched: Watched, weight: QTensor) -> None:
    x = gaussian((3, 16))
    F.linear(x, weight)
    with ao_core.kernels("reference"):
        F.linear(x, weight)
        assert watched.asked["linear"] == 1  # of another band: not asked
    with ao_core.kernels("torch"):
        F.linear(x, weight)
        F.linear(x, weight)
        assert watched.asked["linear"] == 2
    F.linear(x, weight)
    assert watched.asked["linear"] == 2
    ao_core.reopen()
    F.linear(x, weight)
    F.linear(x, weight)
    assert watched.asked["linear"] == 3


def _ones(parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def test_the_backward_pass_follows_pins_and_new_kernels() -> None:
    """The kernel that dequantizes is remembered with the weight; another pin or epoch finds another."""
    w, x = quantize_tensor(gaussian((8, 16)), SPEC), gaussian((3, 16)).requires_grad_()

    def gradient(band: str | None = None) -> Tensor:
        out = F.linear(x, w).sum()
        if band is None:
            return torch.autograd.grad(out, x)[0]
        with ao_core.kernels(band):
            return torch.autograd.grad(out, x)[0]

    true, ones = w.dequantize().sum(0).expand(3, 16), torch.full((3, 16), 8.0)
    torch.testing.assert_close(gradient(), true)
    with registered(Kernel("ones", "dequantize", "plain", "cpu", _ones, 40)):
        assert torch.equal(gradient(), ones)
        torch.testing.assert_close(gradient("reference"), true)
        assert torch.equal(gradient("torch"), ones)
        assert torch.equal(gradient(), ones)
    torch.testing.assert_close(gradient(), true)
    assert registry.kernels.local("ones") is None


def test_errors_of_the_backward_pass_name_the_kernel() -> None:
    def broken(parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise ValueError("out of luck")

    w, x = quantize_tensor(gaussian((8, 16)), SPEC), gaussian((3, 16)).requires_grad_()
    with registered(Kernel("broken", "dequantize", "plain", "cpu", broken, 40)):
        out = F.linear(x, w).sum()
        with pytest.raises(ValueError, match="out of luck") as caught:
            out.backward()
    notes = getattr(caught.value, "__notes__", caught.value.args)
    assert "kernel 'broken' of in-process, for dequantize" in str(notes)
