"""Every method of `torch.Tensor` on the tensors of ao: as on dense ones, or an error that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import WHOLE, ComputeWeight, Spec, quantize_, quantize_tensor
from ao_core.errors import UnsupportedOp

_PROGRAM = Path(__file__).with_name("every_method.py")
#: errors that say what is wrong: of ao, or those that torch itself raises for such arguments
_CLEAR = (
    "UnsupportedOp",
    "StorageError",
    "QuantizationError",
    "ConfigError",
    "IndexError",
    "TypeError",
    "ValueError",
)
#: by torch, of every subclass of a tensor
_OF_TORCH = {"map2_": "not supported for tensor subclasses"}


def _outcomes(kind: str, folder: Path) -> list[tuple[str, str, str]]:
    """(call, outcome, why) of every call, in a process that may die."""
    printed = folder / "printed"  # a pipe of so many short lines takes longer than the calls
    with printed.open("w", encoding="utf-8") as to:
        done = subprocess.run(
            [sys.executable, str(_PROGRAM), kind],
            stdout=to,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    lines = printed.read_text(encoding="utf-8").splitlines()
    assert done.returncode == 0, (lines[-1:], done.returncode, done.stderr[-2000:])
    return [(call, *json.loads(came)) for call, came in zip(lines[::2], lines[1::2], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quantized", "compute", "dense, quantized", "dense, compute"])
def test_methods_work_or_say_why_not(kind: str, tmp_path: Path) -> None:
    outcomes = _outcomes(kind, tmp_path)
    assert sum(outcome == "same" for _, outcome, _ in outcomes) > 300
    bad = [line for line in outcomes if line[1] in ("wrong", "taken")]
    for call, outcome, why in outcomes:
        known = _OF_TORCH.get(call.partition("(")[0])
        clear = why.startswith(_CLEAR) or (known is not None and known in why)
        if outcome == "refused" and not clear:
            bad.append((call, outcome, why))
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("recipe", ["weight_only", "rowwise_training"])
@pytest.mark.usefixtures("rowwise_training")
def test_torch_jit_trace_is_refused(recipe: str) -> None:
    """`torch.jit.save` of what it records would end the process."""
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_(model, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(UnsupportedOp, match=r"torch\.export"):
            torch.jit.trace(model, torch.zeros(1, 8))
    assert model(torch.zeros(1, 8)).shape == (1, 8)


@pytest.mark.parametrize("inference", [False, True])
def test_dimensions_are_checked(inference: bool) -> None:
    """As torch checks those of dense tensors; they must not wrap around."""
    weight = quantize_tensor(torch.randn(6, 8), Spec("int8", (1, WHOLE)))
    with torch.inference_mode(inference):
        for refused in (
            lambda: weight.transpose(2, 3),
            lambda: weight.permute(0, 0),
            lambda: weight.permute(0),
            lambda: weight.select(2, 0),
            lambda: weight.unbind(2),
            lambda: weight.narrow(2, 0, 1),
            lambda: weight.narrow(0, 7, 1),
            lambda: weight.narrow(0, 3, 4),
            lambda: weight.split(-1),
            lambda: weight.split([1, 2]),
            lambda: weight.index_select(2, torch.tensor([0])),
            lambda: torch.cat([weight, weight], 2),
        ):
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                refused()
        assert weight.narrow(0, -2, 2).shape == (2, 8)
        assert [len(piece) for piece in weight.split(4)] == [4, 2]


def test_integers_are_not_multiplied_with_weights_that_are_cast() -> None:
    spec = Spec("int8", (1, WHOLE), act=Spec("int8", (1, WHOLE)))
    weight, x = (
        ComputeWeight(torch.randn(6, 6), spec, spec, spec),
        torch.ones(2, 6, dtype=torch.int64),
    )
    for matmul in (lambda: F.linear(x, weight), lambda: x @ weight, lambda: x @ weight.t()):
        with pytest.raises(UnsupportedOp, match="floating-point"):
            matmul()


@pytest.mark.parametrize("number", [0.5, 0, 3])
def test_a_number_is_copied(number: float) -> None:
    weight = quantize_tensor(torch.randn(6, 8), Spec("int8", (1, WHOLE)))
    weight.copy_(number)
    torch.testing.assert_close(
        weight.dequantize(), torch.full((6, 8), float(number)), rtol=0.01, atol=0
    )
    weight.copy_(torch.zeros(6, 8, dtype=torch.int64))
    assert not weight.dequantize().any()


def test_what_is_joined_has_memory_of_its_own() -> None:
    """Also what the pieces share, such as one scale for all."""
    weight = quantize_tensor(torch.randn(6, 8), Spec("int8", (WHOLE, WHOLE)))
    before = weight.dequantize()
    torch.cat([weight[3:], weight[:3]]).copy_(torch.ones(6, 8))
    assert torch.equal(weight.dequantize(), before)
