"""The script for the first hour on a GPU, on a machine without one: its steps, and what is kept of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ao_core.ext import registry

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
SCRIPT = FOLDER / "first_hour.py"


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("first_hour")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("known")


def test_dry_run(tmp_path: Path) -> None:
    """The steps in their order, with commands that `run_all.py` understands, and nothing is written."""
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path / "out")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    titles = [line.partition(",")[0] for line in said.splitlines() if not line.startswith(" ")]
    assert titles == [
        "known answers", "compute-sanitizer memcheck", "compute-sanitizer racecheck", "captures",
        "benchmarks",
    ]  # fmt: skip
    assert "{" not in said
    assert not list(tmp_path.iterdir())


def test_steps_fit_in_a_quarter_of_an_hour(hour: Any, tmp_path: Path) -> None:
    assert sum(step.seconds for step in hour.steps(tmp_path, ())) <= hour.SECONDS <= 15 * 60


def test_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 3
    assert done.stderr.startswith("nothing is run: torch ")
    assert not list(tmp_path.iterdir())


def test_results_are_written_after_each_step(hour: Any, tmp_path: Path) -> None:
    """Also of steps that fail, take too long, or are not there; the next ones are run."""
    file = tmp_path / "first-hour.json"
    part = {"parts": {"known": {"lines": [], "failed": [{"case": "int4", "reason": "off"}]}}}
    write = f"open(r'{tmp_path}/one/gpu-1.json', 'w').write({json.dumps(part)!r})"
    see = f"print(len(__import__('json').load(open(r'{file}'))['steps']), 'steps before')"
    (tmp_path / "one").mkdir()

    def step(name: str, code: str, seconds: float = 30.0, **more: Any) -> Any:
        return hour.Step(name, seconds, ((sys.executable, "-c", code),), **more)

    steps = [
        step("right", "print('fine')"),
        step("wrong answer", write, results=tmp_path / "one"),
        step("wrong memory", "print('===== ERROR SUMMARY: 2 errors')"),
        step("hangs", "import time; time.sleep(600)", 1.0, most=2.0),
        step("not here", "", absent="the tool is not on this machine"),
        step("too long", "", 1e4, optional=True),
        step("crashes", see + "; raise SystemExit(7)"),
    ]
    began = time.monotonic()
    hour.run_steps(steps, tmp_path, 100.0, "abc")
    assert time.monotonic() - began < 90
    report = json.loads(file.read_text("utf-8"))
    assert report["commit"] == "abc"
    found = {each["step"]: each for each in report["steps"]}
    assert {name: each["status"] for name, each in found.items()} == {
        "right": "passed", "wrong answer": "failed", "wrong memory": "failed", "hangs": "timed out",
        "not here": "left out", "too long": "left out", "crashes": "failed",
    }  # fmt: skip
    assert found["right"]["end_of_output"] == "fine\n"
    assert found["wrong answer"]["failed"] == [{"case": "int4", "reason": "off"}]
    assert found["wrong memory"]["failed"][0]["reason"] == "ERROR SUMMARY: 2 errors"
    assert found["not here"]["reason"] == "the tool is not on this machine"
    assert found["crashes"]["exits"] == [7]
    assert found["crashes"]["end_of_output"] == "6 steps before\n"


def test_every_kernel_for_gpus_is_asked(known: Any) -> None:
    """Each call has one that takes it, and none is without a call."""
    waiting = {
        name for name, k in registry.kernels.items() if k.device == "cuda" and k.priority >= 50
    }
    waiting = {name for name in waiting if registry.kernels.get(name).op in registry.ops}
    for name, call in known.calls().items():
        taking = {
            kernel.name
            for kernel in registry.kernels.values()
            if (kernel.op, kernel.device) == (call.op, "cuda")
            and kernel.layout in ("*", call.layout)
            and kernel.refuses(call) is None
        }
        assert taking, name
        waiting -= taking
    assert not waiting


def test_formats_are_those_that_planes_hold(known: Any) -> None:
    for name, spec in known.weights().items():
        dtype = registry.dtypes.get(spec.dtype)
        assert registry.layouts.get(spec.layout).refuses(spec, (4096, 4096), dtype) is None, name
    held = {spec.dtype for spec in known.weights().values()}
    assert {f"{sign}{bits}" for bits in range(1, 9) for sign in ("int", "uint")} < held


@pytest.mark.slow
def test_checks_go_through_without_a_gpu() -> None:
    """The parts of the steps, with what they can do here."""
    command = [sys.executable, str(FOLDER / "run_all.py"), "--device=cpu", "--tiny", "--share=0/8"]
    done = subprocess.run(
        [*command, "--parts=known,captures"], check=True, capture_output=True, text=True
    )
    known, captures = done.stdout.splitlines()
    assert int(known.split()[1]) > 20
    assert captures == "captures: 1 lines"
