"""`ao plugins` and `ao formats`."""

from __future__ import annotations

import json

import pytest
from torch import nn

import ao_core
from ao_core import Kernel
from ao_core import plugins as loader
from ao_core.registry import registry
from ao_core.stacks import methods
from ao_core.testing.registered import registered


def test_formats_lists_everything_registered(ao):
    result = ao("formats")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for name in (*registry.dtypes.names(), *registry.layouts.names(), *registry.recipes.names()):
        assert any(line.startswith(f"{name} ") for line in lines), name
    (line,) = (line for line in lines if line.startswith("f8e4m3 "))
    assert line.split()[1:7] == ["8", "float", "-448", "…", "448", "ao-core"]


def test_formats_as_json(ao):
    data = json.loads(ao("formats", "--json").stdout)
    assert [d["name"] for d in data["dtypes"]] == registry.dtypes.names()
    nf4 = next(d for d in data["dtypes"] if d["name"] == "nf4")
    assert (nf4["bits"], nf4["kind"], nf4["min"], nf4["max"]) == (4, "lut", -1, 1)
    assert [d["name"] for d in data["layouts"]] == registry.layouts.names()
    recipes = {d["name"]: d for d in data["recipes"]}
    assert len(recipes) == len(data["recipes"])
    assert recipes["small4/row"]["summary"] == "one scale per row"
    assert [d["name"] for d in data["methods"]] == [
        name
        for table in (registry.algorithms, registry.model_transforms)
        for name in methods()
        if name in table
    ]
    # a configuration without a recipe of its own is one all the same
    assert recipes["small4"]["provider"] == "in-process"
    assert recipes["small4"]["summary"] == "Weights in 4 bits, for these tests."


def test_plugins_lists_built_ins_and_problems(ao, monkeypatch):
    problem = loader.PluginProblem("bad", "ao-bad", "0.3", "import", ImportError("No module\nfoo"))
    info = loader.PluginInfo("good", "ao-good", "1.0", "ao_good", {"dtypes": ["int3x"]})
    monkeypatch.setattr(loader, "plugins", lambda: [info])
    monkeypatch.setattr(loader, "problems", lambda: [problem])
    monkeypatch.setattr(registry.loader, "machine", lambda: {"ao-good": ["runs on good chips"]})
    result = ao("plugins")
    assert result.exit_code == 0
    assert f"ao-core {ao_core.__version__}, plugin (built in) in ao_core" in result.stdout
    assert (
        "ao-good 1.0, plugin good in ao_good, loaded in 0.00 s\n  dtypes (1): int3x\n"
        "  runs on good chips\n" in result.stdout
    )
    assert result.stdout.endswith(
        "1 problem(s):\n  ao-bad 0.3 [import] ImportError: No module foo\n"
    )
    data = json.loads(ao("plugins", "--json").stdout)
    assert data["plugins"][1]["records"] == {"dtypes": ["int3x"]}
    assert data["plugins"][1]["machine"] == ["runs on good chips"]
    assert data["problems"][0]["phase"] == "import"
    assert "int4" in data["plugins"][0]["records"]["dtypes"]


def test_plugins_without_problems(ao, monkeypatch):
    monkeypatch.setattr(loader, "problems", list)
    assert "problem" not in ao("plugins").stdout


@pytest.fixture
def idle_kernels(monkeypatch):
    """Kernels of one plugin: two that lack something, one whose check fails, one that serves."""

    def broken():
        raise OSError("no such driver")

    checks = {
        "idle_a": lambda: "needs sm_90, found sm_80",
        "idle_b": lambda: "needs sm_90, found sm_80",
        "idle_c": broken,
        "busy": lambda: None,
    }
    monkeypatch.setattr(registry.kernels, "_records", dict(registry.kernels._records))
    ao_core.reopen()
    for name, unavailable in checks.items():
        ao_core.register(Kernel(name, "linear", "idle", "cpu", lambda: None, 50, unavailable))
    return list(checks)


def test_plugins_says_which_kernels_cannot_serve_here_and_why(ao, monkeypatch, idle_kernels):
    info = loader.PluginInfo("idle", "ao-idle", "1.0", "ao_idle", {"kernels": idle_kernels})
    monkeypatch.setattr(loader, "plugins", lambda: [info])
    lines = ao("plugins").stdout.splitlines()
    start = lines.index("ao-idle 1.0, plugin idle in ao_idle, loaded in 0.00 s")
    assert lines[start + 1 : start + 4] == [
        "  kernels (4): idle_a, idle_b, idle_c, busy",
        "  not usable here: idle_a, idle_b: needs sm_90, found sm_80",
        "  not usable here: idle_c: OSError: no such driver",
    ]
    data = json.loads(ao("plugins", "--json").stdout)["plugins"][1]
    assert data["unavailable"]["idle_c"] == "OSError: no such driver"
    assert "busy" not in data["unavailable"]


@pytest.mark.parametrize(
    "arguments", [["formats"], ["plugins"], ["inspect", "."], ["quantize", ".", "../out", "--plan"]]
)
def test_lines_into_a_file_are_120_characters_at_most(ao, tmp_path, monkeypatch, arguments):
    """Names are whole, in the first column; the rest is folded between words."""
    monkeypatch.chdir(tmp_path)
    layers = {"self_attention_of_the_decoder": nn.Linear(64, 64), "norm": nn.LayerNorm(64)}
    ao_core.save_model(nn.ModuleDict({"model_of_a_long_name": nn.ModuleDict(layers)}), ".")
    more = ["--config", "weight_only"] if arguments[0] == "quantize" else []
    done = ao(*arguments, *more)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 120
    if arguments[0] in ("inspect", "quantize"):
        assert "model_of_a_long_name.self_attention_of_the_decoder.weight" in done.stdout


def test_plugins_lists_kernels_without_an_op(ao, monkeypatch):
    orphan = Kernel("orphan", "attend_toy", "plain", "cpu", lambda: None, 50)
    info = loader.PluginInfo("good", "ao-good", "1.0", "ao_good", {"kernels": ["orphan"]})
    monkeypatch.setattr(loader, "plugins", lambda: [info])
    reason = "is for the op 'attend_toy', which no installed package registers"
    with registered(orphan):
        assert f"  not usable here: orphan: {reason}" in ao("plugins").stdout
        data = json.loads(ao("plugins", "--json").stdout)
        assert data["plugins"][1]["unavailable"] == {"orphan": reason}
        assert "linear" in data["plugins"][0]["records"]["ops"]
