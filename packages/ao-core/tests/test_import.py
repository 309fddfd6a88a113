"""`import ao_core` brings nothing along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
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


def _new_modules(statement: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    (line,) = run.stdout.splitlines()  # the probe's own line, and no other output
    return list(json.loads(line))


@pytest.mark.parametrize(
    "statement",
    [
        "import ao_core",
        "from ao_core import QTensor, Spec, quantize_tensor",
        "from ao_core import quantize_",
    ],
)
def test_loads_no_heavy_module_and_no_plugin(statement: str) -> None:
    new = _new_modules(statement)
    assert [name for name in new if name.startswith(UNWANTED)] == []


def test_is_lazy() -> None:
    assert _new_modules("import ao_core") == ["ao_core", "ao_core.__about__"]


def test_every_public_name_resolves() -> None:
    statement = "import ao_core; [getattr(ao_core, name) for name in ao_core.__all__]"
    assert "ao_core.quantize" in _new_modules(statement)


def test_unknown_name_is_an_attribute_error() -> None:
    import ao_core

    with pytest.raises(AttributeError, match="quantise"):
        _ = ao_core.quantise
    assert "quantize_" in dir(ao_core)
