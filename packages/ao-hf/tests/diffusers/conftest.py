"""Small models of diffusers with random weights, and their folders."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import diffusers
import pytest
import transformers

import ao_hf  # noqa: F401  # registers ao

diffusers.utils.logging.disable_progress_bar()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def trials():
    """The module that tries architectures."""
    spec = importlib.util.spec_from_file_location(
        "diffusers_architectures", Path(__file__).with_name("architectures.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def named(trials):
    """An architecture by its name."""
    return {architecture.name: architecture for architecture in trials.ARCHITECTURES}


@pytest.fixture
def sd3(named):
    return named["SD3Transformer2DModel"]


@pytest.fixture
def dense(sd3, tmp_path):
    """The folder of a dense model."""
    sd3.make().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def run(trials, sd3):
    """What a model of that architecture computes."""
    return lambda model: trials.outputs(model, sd3.inputs())


@pytest.fixture
def files():
    """The bytes of all files in a folder."""

    def found(folder: Path) -> dict[str, bytes]:
        every = sorted(file for file in folder.rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in every}

    return found
