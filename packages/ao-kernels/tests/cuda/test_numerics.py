"""The CUDA matmul, run on the CPU from its own source under sanitizers, beside float64."""

from __future__ import annotations

import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext import to_layout
from ao_kernels.cuda import known_answer

pytestmark = pytest.mark.slow

BF16, FP16 = torch.bfloat16, torch.float16
#: M, N, K and whether the device has clusters: tiles that are full or not, all kernels
SIZES = (
    (1, 200, 1024, True), (3, 70, 576, False), (7, 40, 2048, True),
    (13, 300, 512, True), (20, 129, 1088, False), (50, 257, 768, True),
)  # fmt: skip
#: of a result that is rounded to the dtype, relative to the norm
BOUNDS = {BF16: (1e-3, 3e-3), FP16: (1e-4, 4e-4)}


def weight(name, group, n, k, dtype, scale="bfloat16", zero_point="none"):
    layout = "packed" if "4" in name and name != "f8e4m3" else "plain"
    spec = Spec(name, (1, group), scale, zero_point=zero_point, layout=layout)
    w = quantize_tensor(torch.randn(n, k, dtype=dtype), spec)
    return to_layout(w, "plane16" if layout == "packed" else "plane16_bytes")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("name", "group", "scale", "zero_point"),
    [
        ("int4", 128, "bfloat16", "none"),
        ("int4", -1, "float32", "none"),
        ("int4", 32, "float16", "none"),
        ("uint4", 64, "bfloat16", "int"),
        ("uint4", 64, "bfloat16", "float"),
        ("uint4", 32, "float32", "float"),
        ("int8", -1, "float32", "none"),
        ("int8", 64, "float16", "none"),
        ("f8e4m3", 128, "bfloat16", "none"),
    ],
)  # fmt: skip
def test_matmul(emulation, exe, name, group, scale, zero_point, dtype):
    """Weights in the layout, ragged sizes, with bias and without, on devices with clusters and without."""
    calls, expected = [], []
    for m, n, k, hopper in SIZES:
        w = weight(name, group, n, k, dtype, scale, zero_point)
        x = torch.randn(m, k, dtype=dtype)
        bias = torch.randn(n, dtype=dtype) if m % 2 else None
        calls.append((emulation.of_weight(x, w, bias)._replace(shuffle=m), hopper))
        expected.append(
            x.double() @ w.dequantize().double().T + (0 if bias is None else bias.double())
        )
    low, high = BOUNDS[dtype]
    # dense values are rounded to the dtype of the weight: compare with those of the parts instead
    for hopper in (True, False):
        ran = emulation.run(exe, [call for call, on in calls if on is hopper], hopper=hopper)
        for found, right in zip(
            ran,
            (e for e, (_, on) in zip(expected, calls, strict=True) if on is hopper),
            strict=True,
        ):
            error = float((found.out.double() - right).norm() / right.norm())
            assert low < error < high, (found[1:], error)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["int4", "int8", "f8e4m3"])
def test_every_code_is_exact(emulation, exe, name, dtype):
    """Unit vectors as activations: results are the numbers of codes times their scales, rounded once."""
    case = next(case for case in known_answer.CASES if case.name.startswith(f"{name} in rows"))
    arguments = known_answer.cases(case, dtype, 1, torch.device("cpu"))
    _, qdata, scale, _, _, n, k, *_ = arguments
    rows = []
    for first in range(0, 256, 64):  # 256 of K hold all codes, in some of 160 rows
        x = torch.zeros(64, k, dtype=dtype)
        x[torch.arange(64), first + torch.arange(64)] = 1
        rows.append(emulation.Call(x, qdata, scale, None, None, *arguments[5:]))
    found = torch.cat([ran.out for ran in emulation.run(exe, rows)])
    unit = (torch.eye(k, dtype=dtype)[:256], qdata, scale, None, None, *arguments[5:])
    right = known_answer.reference(case, unit)
    assert torch.equal(found, right.to(dtype))
    # two codes of floats are NaN, two are zeros
    count = {"int4": 16, "int8": 256, "f8e4m3": 253}[name]
    assert len(right.div(scale.double().flatten()[:n]).unique()) == count


def test_known_answers(emulation, exe):
    """Every kernel passes the test that it must pass on a device; a wrong one gets a sentence."""
    wanted = [
        (case, dtype, rows)
        for case in known_answer.CASES for dtype in (BF16, FP16) for rows in case.rows
    ]  # fmt: skip
    arguments = [known_answer.cases(*each, torch.device("cpu")) for each in wanted]
    ran = iter(emulation.run(exe, [emulation.Call(*each) for each in arguments]))
    assert known_answer.problem(lambda *_: next(ran).out, torch.device("cpu")) is None
    text = known_answer.problem(lambda x, *_: torch.zeros(len(x), 160), torch.device("cpu"))
    assert (
        text
        == "their known-answer test failed: int4 in groups of 128, 1 rows in bfloat16: off by 1 of the result"
    )


def test_equal_inputs_give_equal_bits(emulation, exe):
    """Whichever warp comes first: sums have a fixed order, in a CTA and in a cluster."""
    w = weight("int4", 128, 64, 4096, BF16)
    x = torch.randn(20, 4096, dtype=BF16)
    calls = [emulation.of_weight(x, w)._replace(shuffle=shuffle) for shuffle in range(4)]
    first, *others = emulation.run(exe, calls)
    assert first.splits > 1
    assert all(torch.equal(first.out, other.out) for other in others)


def test_rows_apart_and_values_that_are_not_finite(emulation, exe):
    """Rows of a larger matrix; NaN and infinity reach their own row of the result only."""
    w = weight("int4", 128, 128, 512, BF16)
    x = torch.randn(3, 1024, dtype=BF16)[:, :512]
    (plain,) = emulation.run(exe, [emulation.of_weight(x, w)])
    x[1, 5], x[1, 511] = float("inf"), float("nan")
    (found,) = emulation.run(exe, [emulation.of_weight(x, w)])
    assert found.out[1].isnan().all()
    assert torch.equal(found.out[::2], plain.out[::2])
