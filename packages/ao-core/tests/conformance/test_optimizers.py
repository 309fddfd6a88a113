"""torch's own AdamW passes the suite for optimizers: the suite asks for no more than the contract."""

from __future__ import annotations

import torch

from ao_core.testing import OptimizerSuite


class TestAdamW(OptimizerSuite):
    optimizer = torch.optim.AdamW
