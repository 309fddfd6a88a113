from __future__ import annotations

import os
import subprocess
import sys

import pytest

from check_imports import contracts

MODULES = ["ao_core", "ao_one", "ao_two"]
PARTS = ["errors", "ext", "numerics", "records", "registry", "spec", "tensor"]


@pytest.fixture
def check(tmp_path):
    """`check({"ao_core/tensor.py": "import x"})` → (exit status, output) for tiny packages."""

    def run(sources):
        files = {f"{module}/__init__.py": "" for module in MODULES}
        files |= {f"ao_core/{part}.py": "" for part in [*PARTS, "hookspecs"]}
        for place, text in (files | sources).items():
            path = tmp_path / place
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        config = tmp_path / "contracts.ini"
        config.write_text(contracts(MODULES, PARTS))
        program = (
            "import sys; from importlinter.cli import lint_imports;"
            f"sys.exit(lint_imports(config_filename={str(config)!r}, no_cache=True, no_logo=True))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
            check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def test_what_the_design_allows_passes(check):
    status, output = check(
        {
            "ao_one/__init__.py": "import ao_core\nimport ao_core.ext",
            "ao_core/ext.py": "import ao_core.tensor",
            "ao_core/tensor.py": "import ao_core.registry",
            "ao_core/spec.py": "import ao_core.errors",
            "ao_core/records.py": (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ao_core.tensor"
            ),
        }
    )
    assert status == 0, output
    assert "0 broken" in output


@pytest.mark.parametrize(
    ("place", "text", "contract"),
    [
        ("ao_one/__init__.py", "import ao_two", "siblings never import siblings"),
        ("ao_core/tensor.py", "import ao_one", "siblings never import siblings"),
        ("ao_core/numerics.py", "import ao_core.registry", "layers inside ao_core"),
        ("ao_core/registry.py", "def f():\n    import ao_core.tensor", "layers inside ao_core"),
        ("ao_core/tensor.py", "import numpy", "numpy: imported in ao_core by testing"),
        ("ao_core/numerics.py", "def f():\n    import typer", "typer: imported in ao_core by cli"),
        ("ao_core/novelty.py", "", "layers inside ao_core"),
        ("ao_one/__init__.py", "import ao_core.tensor", "nothing of ao_core but ext"),
    ],
)
def test_what_the_design_forbids_is_found(check, place, text, contract):
    status, output = check({place: text})
    assert status != 0
    assert f"{contract}" in next(line for line in output.splitlines() if line.endswith("BROKEN"))
    assert "1 broken" in output
