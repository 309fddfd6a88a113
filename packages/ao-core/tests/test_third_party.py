"""A third party's plugin for real: built as a wheel, installed in an environment of its own, used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[1]
EXAMPLE = PACKAGE.parents[1] / "examples" / "third_party_dtype"

USE = """
import json, sys, warnings
warnings.simplefilter("error", UserWarning)
import torch
from torch import nn
import ao_core
from ao_core import Spec, load_model, quantize_tensor, save_model
from ao_core.registry import registry

folder = sys.argv[1]
assert "log4" in registry.dtypes, registry.notes()
q = quantize_tensor(torch.randn(48, 64), Spec("log4", (1, 32), scale_dtype="bfloat16", layout="packed"))
layer = nn.Linear(64, 48)
layer.weight = nn.Parameter(q, requires_grad=False)
x = torch.randn(3, 64)
expected = layer(x)

save_model(layer, folder)
fresh = nn.Linear(64, 48)
load_model(fresh, folder)

compiled = torch.compile(layer, fullgraph=True)
with torch.no_grad():
    error = float((compiled(x) - expected).abs().max())
print(json.dumps({
    "provider": registry.dtypes.provider("log4"),
    "core": ao_core.__file__,
    "bytes": q.stored_bytes,
    "loaded": torch.equal(fresh(x), expected),
    "compiled": error,
}))
"""

READ = """
import sys
from torch import nn
from ao_core import load_model
from ao_core.errors import AoError
layer = nn.Linear(64, 48)
before = layer.weight.clone()
try:
    load_model(layer, sys.argv[1])
except AoError as error:
    assert (layer.weight == before).all()
    print(error)
"""

# All in forks of one process that has imported torch: prints what each program printed.
RUN = """
import json, sys
from ao_core.testing.warm import run_python
print(json.dumps([run_python(*command, check=True).stdout for command in json.loads(sys.argv[1])]))
"""


class Environment:
    """A virtual environment with the packages of this one, except those of ao."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv")
        bin_folder = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.executable = bin_folder / "python"
        (site,) = (folder / "venv").rglob("site-packages")
        for parent in sys.path:
            if Path(parent).name in ("site-packages", "dist-packages"):
                self._link(Path(parent), site)

    def _link(self, parent: Path, site: Path) -> None:
        """Link what is installed: torch is too large to be installed again."""
        for entry in parent.iterdir():
            ours = entry.name.startswith(("ao_", "__editable__"))
            if not ours and entry.suffix != ".pth" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)

    def python(self, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python without any inherited search path."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "AO_", "PYTEST"))}
        command = [str(self.executable), *map(str, args)]
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=600
        )
        assert not check or done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if not EXAMPLE.exists():
        pytest.skip("the example is not part of the source distribution")
    folder = tmp_path_factory.mktemp("third_party")
    environment = Environment(folder)
    # copies, so that building their wheels leaves nothing in their folders
    copies = [folder / source.name for source in (PACKAGE, EXAMPLE)]
    left_out = shutil.ignore_patterns("__pycache__", "tests", "dist", "build")
    for source, copy in zip((PACKAGE, EXAMPLE), copies, strict=True):
        shutil.copytree(source, copy, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "--python", environment.executable, "install", "-q"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", *copies]
    done = subprocess.run([*map(str, pip), *map(str, options)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(EXAMPLE / "tests", folder / "tests")
    return environment


@pytest.fixture(scope="module")
def printed(environment):
    """What programs print there: the format's use, the tables, and reading without the plugin."""
    folder = str(environment.folder / "model")
    commands = [
        ["-c", USE, folder],
        ["-m", "ao_core.cli", "formats", "--json"],
        ["-c", "import os; os.environ['AO_PLUGINS'] = ''\n" + READ, folder],
    ]
    return json.loads(environment.python("-c", RUN, json.dumps(commands)).stdout)


@pytest.fixture(scope="module")
def used(printed):
    """What the plugin's format does there."""
    return json.loads(printed[0].splitlines()[-1])


def test_it_is_the_wheel_that_runs(environment, used):
    assert Path(used["core"]).is_relative_to(environment.folder)
    assert used["provider"] == "ao-log4"


def test_packs_saves_and_compiles(used):
    assert used["bytes"] == 48 * 32 + 48 * 2 * 2  # two codes per byte, one bfloat16 scale in 32
    assert used["loaded"] is True
    assert used["compiled"] < 1e-5


def test_passes_the_suites_that_ao_ships(environment):
    done = environment.python(
        "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests", "--ao-provider=ao-log4"
    )
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    assert "ao-log4::dtype[log4]::test_rounds_to_nearest[cpu] PASSED" in done.stdout


def test_shows_in_ao_formats(printed):
    listed = json.loads(printed[1])
    assert any(
        "log4" in json.dumps(entry) and "ao-log4" in json.dumps(entry)
        for table in listed.values()
        for entry in table
    )


def test_without_the_plugin_the_checkpoint_names_it(printed):
    assert "ao-log4" in printed[2]
