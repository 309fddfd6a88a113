"""`import ao_core` brings nothing along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Each statement in a fork of one process that has imported torch, which takes seconds.
PROBE = """
import json, os, sys
import torch
before = set(sys.modules)
for statement in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(statement)
        print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, statement
"""
LAZY = "import ao_core"
RESOLVED = "import ao_core; [getattr(ao_core, name) for name in ao_core.__all__]"
STATEMENTS = (
    LAZY,
    "from ao_core import QTensor, Spec, quantize_tensor",
    "from ao_core import quantize_",
    "from ao_core.ext import calibration, cli, compute, kernels, numerics, quantizing, reports, saving",
    RESOLVED,
)
UNWANTED = (
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "triton",
    "ao_quant",
    "pluggy",
    "typer",
    "rich",
)


@pytest.fixture(scope="module")
def new_modules() -> dict[str, list[str]]:
    """What each statement imports beyond torch, and nothing is printed or warned of."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, *STATEMENTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()  # the probe's own, and no other output
    return dict(zip(STATEMENTS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("statement", STATEMENTS[:-1])
def test_loads_no_heavy_module_and_no_plugin(
    statement: str, new_modules: dict[str, list[str]]
) -> None:
    assert [name for name in new_modules[statement] if name.startswith(UNWANTED)] == []


def test_is_lazy(new_modules: dict[str, list[str]]) -> None:
    assert new_modules[LAZY] == [
        "ao_core",
        "ao_core.__about__",
        "ao_core.lazy",
        "ao_core.safe_globals",
    ]


def test_every_public_name_resolves(new_modules: dict[str, list[str]]) -> None:
    assert "ao_core.quantize" in new_modules[RESOLVED]


def test_unknown_name_is_an_attribute_error() -> None:
    import ao_core

    with pytest.raises(AttributeError, match="quantise"):
        _ = ao_core.quantise
    assert "quantize_" in dir(ao_core)
