"""Several processes calibrate one model: each runs some of the batches and solves for some of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ao_core.ext import ConfigError
from ao_core.ext.calibration import over_ranks
from ao_core.testing.programs import run_ranks


def test_two_processes_give_the_codes_of_one(tmp_path: Path) -> None:
    assert "calibrated: ok" in run_ranks(Path(__file__).with_name("ranks_worker.py"), 2, tmp_path)


def test_there_must_be_a_process_group() -> None:
    with pytest.raises(ConfigError, match="has no process group; call init_process_group"):
        over_ranks([torch.zeros(1, 2)])
