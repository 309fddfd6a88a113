"""Importing ao_hf imports no library; without it, a folder of ao fails to load, and with it it does not."""

import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from ao_hf import AoConfig

LOAD = (
    "from transformers import AutoModelForCausalLM as A; A.from_pretrained({!r}); print('loaded')"
)


def run(code):
    env = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def quantized(dense, tmp_path):
    config = AoConfig("int8_weight_only")
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.save_pretrained(tmp_path / "q")
    return str(tmp_path / "q")


def test_import_is_light():
    done = run(
        "import sys, ao_hf; heavy = {'torch', 'transformers', 'peft', 'ao_core.tensor', 'ao_hf.serving'};"
        "print(heavy & set(sys.modules))"
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.slow
def test_after_transformers(quantized):
    done = run(f"import transformers, ao_hf; {LOAD.format(quantized)}")
    assert done.stdout.endswith("loaded\n"), done.stderr


@pytest.mark.slow
def test_without_it_loading_fails(quantized):
    done = run(LOAD.format(quantized))
    assert done.returncode != 0
    assert "Unknown quantization type, got ao" in done.stderr
    assert "size mismatch - ckpt: torch.Size([0])" in done.stderr
