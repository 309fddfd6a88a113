"""A plugin that does everything wrong, really installed: named for each, and without effect on others."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import ao_core
from ao_core.testing.warm import run_python

SOURCE = """
import random
import time

import torch

from ao_core import Kernel, hookimpl
from ao_core.layouts import Plain

begin = time.thread_time()
torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
random.seed(7)
while time.thread_time() < 0.2 + begin:
    pass


def raising(*args):
    return {}["x"]


def slow(call):
    time.sleep(0.05)
    return "is not in the mood"


def zeros(x, w, bias):
    return torch.zeros(*x.shape[:-1], w.shape[0])


class Raising(Plain):
    name = "raising"
    canonical = False
    canonical_name = "plain"
    auto_devices = ("cpu",)
    refuses = raising


def kernel(name, layout, priority, **answers):
    return Kernel(name, "linear", layout, "cpu", zeros, priority, **answers)


@hookimpl
def ao_api():
    return (0, 1)


@hookimpl
def ao_layouts():
    return [Raising()]


@hookimpl
def ao_kernels():
    return [
        kernel("raises", "plain", 190, refuses=raising),
        kernel("answers_false", "plain", 190, refuses=lambda call: False),
        kernel("exits", "plain", 190, refuses=exit),
        kernel("slow", "plain", 190, refuses=slow),
        kernel("unavailable", "plain", 190, unavailable=raising),
        kernel("highest", "raising", 1000),
        kernel("everything", "*", 190),
        kernel("of_raising", "raising", 190),
    ]


@hookimpl
def ao_cli(app):
    @app.command()
    def plugins():
        print("mine")
    @app.command()
    def own():
        print("my own")
"""

#: an innocent user's program: its outputs, the state of the process, and what is known of the plugin
PROGRAM = """
import json, random, sys, warnings
import torch
from torch import nn
import ao_core.plugins
ao_core.plugins.SLOW = 0.15
from ao_core import WeightOnlyConfig, kernels, quantize_
torch.manual_seed(0)
random.seed(0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    layer = nn.Linear(64, 48)
    quantize_(layer, WeightOnlyConfig("int8"))
    outputs = [layer(torch.ones(rows, 64)).sum().item() for rows in range(1, 6)]
    outputs += [torch.rand(1).item(), random.random(), str(torch.get_default_dtype())]
from ao_core.plugins import problems
texts = [str(problem) for problem in problems()]
print(json.dumps({"outputs": outputs, "problems": texts, "warnings": len(caught)}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """`site(*plugins)`: the environment of a process in which only these plugins are used."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "ao_stranger.py").write_text(SOURCE)
    (info := folder / "ao_stranger-1.2.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ao-stranger\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[ao.plugins]\nstranger = ao_stranger\n")
    source = Path(ao_core.__file__).parents[1]
    path = os.pathsep.join([str(folder), str(source), *filter(None, sys.path)])
    return lambda *plugins: {**os.environ, "PYTHONPATH": path, "AO_PLUGINS": ",".join(plugins)}


@pytest.fixture(scope="module")
def seen(site):
    """What the program prints with the plugin, and without it."""
    runs = [run_python("-c", PROGRAM, env=site(*names), check=True) for names in (["stranger"], [])]
    return [json.loads(run.stdout.splitlines()[-1]) for run in runs]


def test_nobody_else_notices(seen):
    with_plugin, without = seen
    assert with_plugin["outputs"] == without["outputs"]
    assert without["problems"] == []


@pytest.mark.parametrize(
    "text",
    [
        "refuses of kernel 'raises'.*KeyError: 'x'",
        "refuses of kernel 'answers_false'.*returned False, not None or a sentence",
        "refuses of kernel 'exits'.*SystemExit",
        "refuses of kernel 'slow'.*takes .* ms",
        "unavailable of kernel 'unavailable'.*KeyError",
        "refuses of layout 'raising'.*KeyError",
        "kernel 'highest' has priority 1000; the bands go from -100 to 199, so it counts as 199",
        r"kernel 'everything' is for linear of every layout \('\*'\)",
        "changed torch's default dtype.*set back",
        "took .* s to load",
    ],
)
def test_each_is_named_with_the_plugin(seen, text):
    (found,) = [p for p in seen[0]["problems"] if re.search(text, p)]
    assert found.startswith("Plugin ao-stranger 1.2 ")


def test_one_warning_each(seen):
    assert seen[0]["warnings"] == len(seen[0]["problems"])


@pytest.mark.slow
def test_a_command_that_is_taken(site):
    """The built-in one stays, and its help; the plugin's others work."""
    for arguments, expected in ((["--help"], "own"), (["own"], "my own")):
        done = run_python("-m", "ao_core.cli", *arguments, env=site("stranger"))
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert "mine" not in done.stdout
        assert "command 'plugins' is provided by ao-core already and claimed by ao-stranger" in (
            " ".join(done.stderr.split())
        )
    done = run_python("-m", "ao_core.cli", "plugins", env=site("stranger"))
    assert done.returncode == 0, done.stderr
    assert "ao-stranger" in done.stdout
    assert "claimed by ao-stranger" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_suite_fails_for_its_problems(site, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from ao_core.testing import PluginSuite\n\n"
        "class TestIt(PluginSuite):\n    provider = 'ao-stranger'\n"
    )
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "no_problem"]
    done = run_python(*command, env=site("stranger"), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "TestIt::test_no_problem" in done.stdout
    assert "kernel 'everything' is for linear of every layout" in " ".join(done.stdout.split())
