"""`pytest --ao-provider`: what is collected, and what a wrong name says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from importlib_metadata import entry_points


def run_pytest(folder, *args):
    """Run pytest in a process of its own; the plugin is loaded by its entry point or by name."""
    installed = entry_points(group="pytest11", name="ao")
    plugin = [] if installed else ["-p", "ao_core.testing.plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, "-q", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_runs_every_kind_of_record_in_parallel_and_beside_other_tests(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_beside():\n    assert True\n")
    chosen = (
        "test_nan and nf4 or packed and something_fits or reference_linear and describes"
        " or weight_only and test_json or test_beside"
    )
    done = run_pytest(
        tmp_path, "--ao-provider", "AO_core", "-n", "2", "-rA", "-k", chosen, "test_own.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED AO_core::dtype[nf4]::test_nan[cpu]" in done.stdout
    for kind in ("layout[packed]", "kernel[reference_linear]", "transform[weight_only]"):
        assert f"PASSED AO_core::{kind}::" in done.stdout, kind
    assert "PASSED test_own.py::test_beside" in done.stdout


@pytest.mark.slow
def test_unknown_provider(tmp_path):
    done = run_pytest(tmp_path, "--ao-provider", "ao-nonesuch")
    assert done.returncode != 0
    assert "--ao-provider=ao-nonesuch" in done.stdout + done.stderr
    assert "Providers: ao-core" in done.stdout + done.stderr


def test_plugin_imports_no_torch():
    code = (
        "import sys; import ao_core.testing.plugin; "
        "assert 'torch' not in sys.modules and 'ao_core.testing.base' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
