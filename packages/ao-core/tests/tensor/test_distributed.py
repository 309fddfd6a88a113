"""Two gloo processes give what one gives, under FSDP2 and under tensor parallelism."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    "int4-bf16-native",
    "compute",
]


@pytest.mark.slow
@pytest.mark.parametrize("names", [FORMATS, ["tensor-parallel"]], ids=["fsdp2", "tensor-parallel"])
def test_two_processes_agree_with_one(names: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), *names],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    for worker in workers:
        assert worker.returncode == 0, "\n".join(outputs)
    for name in names:
        assert f"{name}: ok" in outputs[0], outputs[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
