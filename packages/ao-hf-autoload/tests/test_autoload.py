"""In a new process: torch calls the entry point, transformers knows ao, and no failure reaches torch."""

import os
import subprocess
import sys

import pytest

ENTRY = "[torch.backends]\nao_hf_autoload = ao_hf_autoload:register\n"


@pytest.fixture
def run(tmp_path):
    """Runs code where this distribution is installed, as if it were not already."""
    info = tmp_path / "ao_hf_autoload-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ao-hf-autoload\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)

    def run(code, **env):
        path = os.pathsep.join([str(tmp_path), *sys.path])
        env = os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"} | env
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.slow
def test_transformers_knows_ao_without_an_import(run):
    code = (
        "import sys, torch\n"
        "assert 'ao_hf' in sys.modules\n"
        "assert not {'ao_core.tensor', 'transformers'} & set(sys.modules)\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "assert AUTO_QUANTIZER_MAPPING['ao'].__name__ == 'AoHfQuantizer'\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["raise RuntimeError('broken')", "raise SystemExit(3)"])
@pytest.mark.parametrize("warnings", ["default", "error"])
def test_no_failure_reaches_torch(run, tmp_path, broken, warnings):
    (tmp_path / "ao_hf.py").write_text(broken)
    done = run("import torch; print(torch.ones(2).sum())", PYTHONWARNINGS=warnings)
    assert done.stdout == "tensor(2.)\n", done.stderr
    assert warnings == "error" or "ao_hf cannot be imported" in done.stderr
