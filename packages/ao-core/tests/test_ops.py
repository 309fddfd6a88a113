"""Ops as records: one with two quantized operands, kernels without an op, and those of ao-core."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import ao_core
from ao_core import WHOLE, Kernel, Op, QTensor, Spec, quantize_tensor
from ao_core.dispatch import candidates, run, select
from ao_core.errors import UnsupportedOp
from ao_core.ops import BUILTIN_OPS
from ao_core.registry import registry
from ao_core.testing import KernelSuite, OpTrial
from ao_core.testing.base import gaussian
from ao_core.testing.base import run as run_test
from ao_core.testing.registered import registered

INT8 = Spec("int8", (1, WHOLE))
INT4 = Spec("int4", (1, 32), "bfloat16", layout="packed")


@dataclass(frozen=True)
class PairCall:
    """Keys and values in two formats, as a quantized cache has them."""

    keys: Spec
    values: Spec
    rows: int
    dtype: torch.dtype
    device: str = "cpu"
    op: str = "attend_toy"

    @property
    def layout(self) -> str:
        return self.keys.layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        return self.keys, self.values


def attend(q: Tensor, keys: QTensor, values: QTensor) -> Tensor:
    scores = q @ keys.dequantize(q.dtype).t()
    return scores.softmax(-1) @ values.dequantize(q.dtype)


class AttendTrial(OpTrial):
    specs = ((INT8, INT4), (INT4, INT8), (INT8, INT8))
    shapes = ((9, 32), (1, 33))
    batches = (0, 1, 5)

    def operands(self, kernel, shape, specs):
        return [pair for pair in specs if kernel.layout in ("*", pair[0].layout)]

    def call(self, op, case, batch):
        return PairCall(*case.specs, batch, case.dtype, case.device, op)

    def samples(self, case, batch, seed):
        keys, values = (
            quantize_tensor(gaussian(case.shape, seed=place, device=case.device), spec)
            for place, spec in enumerate(case.specs)
        )
        q = gaussian((batch, case.shape[1]), seed=seed, device=case.device).to(case.dtype)
        scores = torch.einsum("mk,nk->mn", q.double(), keys.dequantize(torch.float32).double())
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        yield (q, keys, values), weights @ values.dequantize(torch.float32).double()


ATTEND = Op("attend_toy", PairCall, attend, "softmax(q @ keys.T) @ values.", AttendTrial)
FAST = Kernel(
    "fast_attend", "attend_toy", "plain", "cpu", attend, 0,
    refuses=lambda call: None if call.values == INT8 else f"needs int8 values, found {call.values}",
)  # fmt: skip
CALL = PairCall(INT8, INT8, 4, torch.float32)


class TestReference(KernelSuite):
    records = (ATTEND,)
    kernel = "reference_attend_toy"
    rtol = 3e-2  # of weights in 16 bits


class TestFast(KernelSuite):
    records = (ATTEND, FAST)
    kernel = "fast_attend"
    rtol = 3e-2


@pytest.fixture
def ops() -> Iterator[None]:
    with registered(ATTEND, FAST):
        yield


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, keys, values: attend(q, values, keys),
        lambda q, keys, values: attend(q, keys, values)[:, :32],
        lambda q, keys, values: attend(q, keys, values).float(),
        lambda q, keys, values: attend(q, keys, values).t().contiguous().t(),
    ],
    ids=["swapped", "tail lost", "dtype", "strides"],
)
def test_its_trial_catches_wrong_kernels(fn) -> None:
    class Wrong(KernelSuite):
        records = (ATTEND, replace(FAST, fn=fn))
        kernel = "fast_attend"
        rtol = 3e-2

    with registered(*Wrong.records), pytest.raises(AssertionError):
        run_test(Wrong, "test_results")


def test_both_formats_decide(ops: None) -> None:
    assert select(CALL).name == "fast_attend"
    other = replace(CALL, values=INT4)
    assert select(other).name == "reference_attend_toy"
    assert [c.refusal for c in candidates(other)] == [f"needs int8 values, found {INT4}", None]


def test_options_of_every_format_must_be_known(ops: None) -> None:
    odd = replace(INT8, options=(("rotated", True),))
    for call in (replace(CALL, keys=odd), replace(CALL, values=odd)):
        assert {c.refusal for c in candidates(call)} == {
            "does not know the option 'rotated' of the format"
        }
    knowing = replace(FAST, name="knowing", options=("rotated",), refuses=lambda call: None)
    with registered(ATTEND, FAST, knowing):
        assert select(replace(CALL, values=odd)).name == "knowing"


def test_scale_rules_of_every_format_must_be_known(ops: None) -> None:
    act = Spec("int8", (1, WHOLE), options=(("scale_rule", "sym"),))
    call = replace(CALL, keys=replace(INT8, act=act))
    (fast, reference) = candidates(call)
    assert "not by scale_rule='sym'" in str(fast.refusal)
    assert reference.refusal is None


def test_it_runs_and_errors_name_the_kernel(ops: None) -> None:
    q, keys = gaussian((4, 32)), quantize_tensor(gaussian((9, 32), seed=1), INT8)
    assert torch.equal(run(CALL, q, keys, keys), attend(q, keys, keys))
    with pytest.raises(RuntimeError) as caught:
        run(CALL, q[:, :31], keys, keys)
    notes = getattr(caught.value, "__notes__", caught.value.args)
    assert "kernel 'fast_attend' of in-process, for attend_toy" in str(notes)


def test_a_conversion_has_the_reference_under_every_pin() -> None:
    for is_conversion in (False, True):
        with registered(replace(ATTEND, is_conversion=is_conversion)), ao_core.kernels("cuda"):
            if is_conversion:
                assert select(CALL).name == "reference_attend_toy"
            else:
                with pytest.raises(UnsupportedOp, match="band is pinned to 'cuda'"):
                    select(CALL)


def test_a_kernel_without_its_op_is_unused() -> None:
    with warnings.catch_warnings(), registered(FAST):
        warnings.simplefilter("error")
        (found,) = candidates(CALL)
        assert found.refusal == "is for the op 'attend_toy', which no installed package registers"
        with pytest.raises(UnsupportedOp, match="no installed package registers the op; .* linear"):
            select(CALL)


@pytest.mark.parametrize("op", BUILTIN_OPS, ids=lambda op: op.name)
def test_records_are_complete(op: Op) -> None:
    assert op.doc.splitlines()[0].endswith((".", ":"))
    assert op.signature.startswith(f"{op.name}(")
    assert "'" not in op.signature
    assert op.trials is not None
    assert isinstance(op.trials(), OpTrial)
    reference = registry.kernels.get(f"reference_{op.name}")
    assert (reference.fn, registry.kernels.provider(reference.name)) == (op.reference, "ao-core")


def test_signature() -> None:
    assert ATTEND.signature == "attend_toy(q: Tensor, keys: QTensor, values: QTensor) -> Tensor"


def test_conversions() -> None:
    """Ops between dense values and codes, and no matmul."""
    assert {op.name for op in BUILTIN_OPS if not op.is_conversion} == {
        "linear", "dense_linear", "embedding", "grouped_linear", "mm", "grouped_mm", "attend",
        "write_tail", "qkv", "mlp", "decoder",
    }  # fmt: skip


def test_ops_import_no_test_code() -> None:
    code = """
import sys, ao_core.registry
ops = ao_core.registry.registry.ops
assert len(ops.names()) >= 12
assert "ao_core.testing" not in sys.modules and "pytest" not in sys.modules
assert ops.get("linear").trials() is not None and "ao_core.testing" in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)
