"""ao_hf may be imported before diffusers or after; without it a folder of ao fails to load."""

import os
import subprocess
import sys

import pytest

from ao_hf import AoConfig

LOAD = "from diffusers import SD3Transformer2DModel as M; M.from_pretrained({!r}); print('loaded')"


def run(code, *missing):
    """Run it in a process of its own, as if some libraries were not installed."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); "
    env = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-c", hidden + code], env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def quantized(dense, sd3, tmp_path):
    config = AoConfig("int8_weight_only")
    type(sd3.make()).from_pretrained(dense, quantization_config=config).save_pretrained(
        tmp_path / "q"
    )
    return str(tmp_path / "q")


@pytest.mark.slow
def test_after_diffusers_and_without_transformers(quantized):
    done = run(f"import diffusers, ao_hf; {LOAD.format(quantized)}", "transformers", "peft")
    assert done.stdout.endswith("loaded\n"), done.stderr


@pytest.mark.slow
def test_without_it_loading_fails(quantized):
    done = run(LOAD.format(quantized), "transformers", "peft")
    assert done.returncode != 0
    assert "Unknown quantization type, got ao" in done.stderr


def test_without_diffusers():
    done = run("import ao_hf.diffusers", "diffusers")
    assert 'pip install "ao-hf[diffusers]"' in done.stderr
