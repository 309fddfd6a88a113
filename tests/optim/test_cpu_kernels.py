"""The CPU kernels of ao-kernels for the ops of ao-optim: the suite, and which calls they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import Spec
from ao_core.ext.kernels import candidates, select
from ao_core.testing import KernelSuite
from ao_optim import StepCall

SPEC = Spec("f8e4m3", (256,), layout="flat")
CALL = StepCall("adam_step", (SPEC, SPEC), 700, torch.float32, torch.float32, "cpu")


class TestAdamStep(KernelSuite):
    kernel = "cpu_adam_step"


class TestLionStep(KernelSuite):
    kernel = "cpu_lion_step"


def test_they_serve() -> None:
    lion = replace(CALL, op="lion_step", specs=(SPEC,))
    assert select(lion).name == "cpu_lion_step"
    assert select(CALL).name == "cpu_adam_step"
    (found,) = (c for c in candidates(CALL) if c.kernel.name == "cpu_adam_step")
    assert found.description.endswith("all parameters in one pass")


@pytest.mark.parametrize("moment", [0, 1])
def test_either_moment_decides(moment: int) -> None:
    """A second moment that the kernel does not have goes to the reference, without an error."""
    specs = [SPEC, SPEC]
    specs[moment] = Spec("dynamic4", (128,), layout="flat")
    bad = replace(CALL, specs=tuple(specs))
    assert select(bad).name == "reference_adam_step"
    (found,) = (c for c in candidates(bad) if c.kernel.name == "cpu_adam_step")
    assert found.refusal is not None
    assert "blocks of 256" in found.refusal
