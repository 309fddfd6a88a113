"""The CPU kernel of ao-kernels for the op of ao-optim: the suite, and which calls it serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import Spec
from ao_core.ext.kernels import candidates, select
from ao_core.testing import KernelSuite
from ao_optim import AdamCall

SPEC = Spec("f8e4m3", (256,), layout="flat")
CALL = AdamCall(SPEC, SPEC, 700, torch.float32, torch.float32, "cpu")


class TestAdamStep(KernelSuite):
    kernel = "cpu_adam_step"


def test_it_serves() -> None:
    assert select(CALL).name == "cpu_adam_step"
    (found,) = (c for c in candidates(CALL) if c.kernel.name == "cpu_adam_step")
    assert found.description.endswith("all parameters in one pass")


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_either_moment_decides(moment: str) -> None:
    """A second moment that the kernel does not have goes to the reference, without an error."""
    bad = replace(CALL, **{moment: Spec("dynamic4", (128,), layout="flat")})
    assert select(bad).name == "reference_adam_step"
    (found,) = (c for c in candidates(bad) if c.kernel.name == "cpu_adam_step")
    assert found.refusal is not None
    assert "blocks of 256" in found.refusal
