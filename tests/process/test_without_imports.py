"""What a program can do that imports ao_core alone, or lacks one of ao's packages."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ao_core import quantize_, resolve_config
from ao_core.ext import UnknownNameError, registry
from ao_core.known import known_names, whose
from ao_core.testing.warm import run_python

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from write_known_names import registered

LOAD = """
import sys
IMPORTS
before = set(sys.modules)
state = torch.load(sys.argv[1], weights_only=True)
assert not any(type(finder).__name__ == "_AfterTorch" for finder in sys.meta_path)
print(len(state))
"""


def _quantized() -> dict[str, dict[str, torch.Tensor]]:
    """State dicts of a layer in each recipe that needs no data."""
    found = {}
    for name in registry.recipes.names():
        layer = nn.Sequential(nn.Linear(256, 64))
        quantize_(layer, name)
        found[name] = layer.state_dict()
    return found


def _stepped() -> dict[str, dict[str, object]]:
    """State dicts of each optimizer after a step."""
    found = {}
    for name in registry.optimizers.names():
        layer = nn.Linear(256, 256, bias=False)
        optimizer = registry.optimizers.get(name)(layer.parameters(), lr=1e-3)  # type: ignore[call-arg]
        layer(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        found[name] = optimizer.state_dict()
    return found


@pytest.mark.parametrize("make", [_quantized, _stepped])
@pytest.mark.parametrize(
    "imports", ["import ao_core; import torch", "import torch; import ao_core"]
)
@pytest.mark.filterwarnings("ignore")
def test_importing_ao_core_is_enough_to_load(
    make: Callable[[], dict[str, object]], imports: str, tmp_path: Path
) -> None:
    saved = make()
    assert saved
    torch.save(saved, tmp_path / "saved.pt")
    program = LOAD.replace("IMPORTS", imports)
    done = run_python("-c", program, tmp_path / "saved.pt", check=True)
    assert done.stdout == f"{len(saved)}\n"


def test_ao_core_waits_for_torch(tmp_path: Path) -> None:
    """In an interpreter without torch, which programs of the tests above have already."""
    import subprocess

    torch.save({}, tmp_path / "saved.pt")
    layer = nn.Linear(64, 32)
    quantize_(layer, "int8_weight_only")
    torch.save(layer.state_dict(), tmp_path / "saved.pt")
    program = "import sys, ao_core\nassert 'torch' not in sys.modules\nimport torch\n" + LOAD
    command = [sys.executable, "-c", program.replace("IMPORTS", ""), str(tmp_path / "saved.pt")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "2\n"


def test_known_names_are_those_of_the_packages() -> None:
    """Run `python scripts/write_known_names.py` where this fails."""
    assert known_names() == registered()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(dist: str) -> str:
        if dist == "ao-quant":
            raise importlib.metadata.PackageNotFoundError(dist)
        return real(dist)

    assert whose("int4_weight_only") == []  # it is here
    monkeypatch.setattr("ao_core.known.version", version)
    (sentence,) = whose("int4_weight_only")
    assert sentence.endswith("pip install ao-quant.")
    with pytest.raises(UnknownNameError) as caught:
        resolve_config("int4_weight_onli")
    assert "pip install" not in str(caught.value)


def test_the_error_of_a_recipe_says_which_package_to_install() -> None:
    program = (
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "def version(dist):\n"
        "    if dist == 'ao-quant': raise metadata.PackageNotFoundError(dist)\n"
        "    return real(dist)\n"
        "metadata.version = version\n"
        "from torch import nn\nfrom ao_core import quantize_\n"
        "try:\n    quantize_(nn.Linear(64, 32), 'int4_weight_only')\n"
        "except LookupError as error:\n    print(error)\n"
    )
    done = run_python("-c", program, env={**os.environ, "AO_PLUGINS": "optim"}, check=True)
    assert "unknown recipe 'int4_weight_only'" in done.stdout
    assert "It comes with ao-quant, which is not installed: pip install ao-quant." in done.stdout
