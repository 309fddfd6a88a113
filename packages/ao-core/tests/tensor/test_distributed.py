"""Two gloo processes give what one gives, under FSDP2 and under tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from ao_core.testing.programs import run_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")

FORMATS = [
    "int8-row",
    "int8-tensor",
    "int4-group",
    "uint4-zero",
    "f8-row",
    "nf4-double",
    "mx",
    "int8-static",
    "int4-bf16-repacked",
    "compute",
]


@pytest.mark.slow
@pytest.mark.parametrize("names", [FORMATS, ["tensor-parallel"]], ids=["fsdp2", "tensor-parallel"])
def test_two_processes_agree_with_one(names: list[str], tmp_path: Path) -> None:
    output = run_ranks(WORKER, 2, tmp_path, *names)
    for name in names:
        assert f"{name}: ok" in output, output
