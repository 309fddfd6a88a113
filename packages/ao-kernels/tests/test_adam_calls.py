"""Calls of `adam_step`: memory, autograd, which are taken and which refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import QTensor, Spec, lut_dtype, quantize_tensor, register, reopen
from ao_core.ext import UnsupportedOp, registry
from ao_core.testing.base import same_bits
from ao_core.testing.warm import run_python
from ao_kernels.cpu.optim import adam_step

SPEC = Spec("f8e4m3", (256,), layout="flat")
OPTIONS: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "step": 1, "decoupled": True,
    "maximize": False, "seed": None,
}  # fmt: skip


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def moment(*shape: int, dtype: str = "f8e4m3") -> QTensor:
    return quantize_tensor(torch.zeros(shape), Spec(dtype, (256,), layout="flat"))


def arguments(*shape: int) -> dict[str, Any]:
    """Of a step for one parameter."""
    return {
        "params": [randn(*shape)], "grads": [randn(*shape) + 1], "exp_avgs": [moment(*shape)],
        "exp_avg_sqs": [moment(*shape)], **OPTIONS,
    }  # fmt: skip


def parts(given: dict[str, Any]) -> list[Tensor]:
    """All memory behind the lists of tensors."""
    tensors = [tensor for value in given.values() if isinstance(value, list) for tensor in value]
    return [
        part
        for tensor in tensors
        for part in (tensor.parts.values() if isinstance(tensor, QTensor) else [tensor])
    ]


def test_views_at_any_offset_and_nothing_beside_them() -> None:
    """Parameters and gradients that begin in the middle of other memory, which stays as it was."""
    given, plain = arguments(600), arguments(600)
    memory = torch.full((700,), 5.0)
    memory[33:633] = given["params"][0]
    given |= {"params": [memory[33:633]], "grads": [F.pad(given["grads"][0], (1, 0))[1:]]}
    adam_step(**given)
    adam_step(**plain)
    assert same_bits(memory[33:633], plain["params"][0])
    assert bool((memory[:33] == 5).all() and (memory[633:] == 5).all())


def test_a_graph_that_has_saved_parameters_notices_the_step() -> None:
    given = arguments(600)
    parameter = given["params"][0].requires_grad_()
    loss = parameter.square().sum()
    with torch.no_grad():
        adam_step(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        given = arguments(600)
        before = given["params"][0].clone()
        adam_step(**given)
        assert not same_bits(before, given["params"][0])


def test_no_tensors() -> None:
    adam_step([], [], [], [], **OPTIONS)


KERNEL = registry.kernels.get("cpu_adam_step")


@dataclass(frozen=True)
class Call:
    """What the kernel looks at of a call; the op is of ao-optim, which need not be installed."""

    specs: tuple[Spec, ...] = (SPEC, SPEC)
    param_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32


def test_who_serves() -> None:
    assert KERNEL.unavailable() is None
    assert KERNEL.refuses(Call()) is None
    assert KERNEL.describe(Call()).endswith("all parameters in one pass")
    for bad, text in (
        (Call(param_dtype=torch.float16), "parameters of float32 and bfloat16, not torch.float16"),
        (Call(grad_dtype=torch.float16), "gradients of float32 and bfloat16, not torch.float16"),
        (Call((Spec("f8e4m3", (128,), layout="flat"), SPEC)), "blocks of 256"),
        (Call((SPEC, Spec("f8e4m3", (128,), layout="flat"))), "blocks of 256"),
        (Call((Spec("f8e4m3", (256,), "bfloat16", layout="flat"),)), "float32 scales"),
        (Call((SPEC, Spec("nf4", (256,), layout="flat"))), "8 bits"),
    ):
        assert text in str(KERNEL.refuses(bad))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda: {**arguments(30, 20), "params": [torch.zeros(30, 20).t()]},
            "params.0.: .*contiguous",
        ),
        (lambda: {"exp_avg_sqs": [moment(600, dtype="nf4")]}, "exp_avg_sqs: .*8 bits"),
        (lambda: {"exp_avg_sqs": [randn(600)]}, "exp_avg_sqs: .*quantized"),
        (lambda: {"exp_avgs": [moment(30, 20).t()]}, "transposed"),
        (lambda: {"params": [torch.zeros(599)]}, "grads.0.: has shape"),
        (lambda: {"params": [torch.zeros(600).double()]}, "params: has dtype Double"),
        (lambda: {"params": [torch.zeros(600).bfloat16()]}, "grads.0.: has dtype Float"),
        (lambda: {"exp_avgs": [moment(600)] * 2}, "m: has 2 tensors"),
    ],
)
def test_refusals_change_nothing(change: Callable[[], dict[str, Any]], text: str) -> None:
    wrong = {**arguments(600), **change()}
    before = [part.clone() for part in parts(wrong)]
    with pytest.raises((UnsupportedOp, RuntimeError), match=text):
        adam_step(**wrong)
    assert all(same_bits(a, b) for a, b in zip(before, parts(wrong), strict=True))


def test_formats_that_are_too_fine() -> None:
    """Where more steps lie close together than cells can tell apart, the kernel says so."""
    if "too_fine" not in registry.dtypes:
        reopen()
        register(lut_dtype("too_fine", [1 + i / 1e5 for i in range(256)]))
    found = KERNEL.refuses(Call((Spec("too_fine", (256,), layout="flat"), SPEC)))
    assert "lie too near to each other" in str(found)


ALONE = """
import warnings
warnings.simplefilter("error")
from ao_core.ext.kernels import unused
from ao_core.ext import registry
assert "cpu_adam_step" in registry.kernels and "adam_step" not in registry.ops
print(unused(registry.kernels.get("cpu_adam_step")))
print(unused(registry.kernels.get("cpu_quantize_plain")))
"""


def test_without_the_package_of_the_op(tmp_path: Path) -> None:
    """The kernel is there and unused, and nobody is warned."""
    (tmp_path / "alone.py").write_text(ALONE)
    done = run_python(tmp_path / "alone.py", env={**os.environ, "AO_PLUGINS": "kernels"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "is for the op 'adam_step', which no installed package registers",
        "None",
    ]
