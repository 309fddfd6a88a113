"""What docs/hf/architectures.md says of some architectures: fused experts, transposed weights, tied ones."""

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "architectures", Path(__file__).with_name("architectures.py")
)
trials = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = trials
_spec.loader.exec_module(trials)

QUICK = ("on the fly", "generate", "save → load", "save again", "ao quantize", "adapters")
BY_NAME = {architecture.name: architecture for architecture in trials.ARCHITECTURES}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT sets it itself
@pytest.mark.parametrize("name", ["Mixtral", "GPT-2", "T5"])
def test_quick_columns(name):
    found = trials.tried(BY_NAME[name], columns=QUICK)
    assert found == dict.fromkeys(QUICK, "yes")


@pytest.mark.slow
def test_slow_columns():
    columns = ("on the fly", "save → load", "new process", "compile")
    assert trials.tried(BY_NAME["Llama"], columns=columns) == dict.fromkeys(columns, "yes")
