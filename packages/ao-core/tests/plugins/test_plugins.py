"""Plugins that work: what they provide, when they are loaded, the command line hook."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path

import pytest

import ao_core
from ao_core.errors import PluginError
from ao_core.plugins import (
    PluginInfo,
    PluginWarning,
    call_cli_hooks,
    load_plugins,
    plugins,
    problems,
)
from ao_core.testing.warm import run_python


def test_a_good_plugin(site, registry, load):
    site.add("ao-good", dtypes=["fp3", "fp5"], version="0.3")
    assert load() == []
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]
    assert registry.dtypes.provider("fp3") == "ao-good"
    assert registry.loader.plugins() == [
        PluginInfo("good", "ao-good", "0.3", "ao_good", {"dtypes": ["fp3", "fp5"]})
    ]


def test_the_public_functions_act_on_the_registry_of_the_process(site, registry):
    site.add("ao-good", dtypes=["fp3"])
    site.add("ao-worse", "raise RuntimeError('boom')")
    with pytest.warns(PluginWarning, match="boom"):
        load_plugins()
    assert [info.dist for info in plugins()] == ["ao-good"]
    assert [problem.dist for problem in problems()] == ["ao-worse"]


def test_every_kind_of_record(site, registry, load):
    source = """
import torch
from ao_core.config import Config as Base
from ao_core.layouts.base import Layout
from ao_core.folder_records import FolderKind
from ao_core.interchange_records import Interchange
from ao_core.records import Algorithm, Recipe, ScaleMethod, Transform

class Config(Base): pass
class Flip(Layout):
    name = "flip"
class Momentum(torch.optim.SGD): pass

@hookimpl
def ao_dtypes(): yield dtype("fp3")
@hookimpl
def ao_layouts(): return (Flip(),)
@hookimpl
def ao_kernels(): return [Kernel("k", "linear", "flip", "cpu", same, 0)]
@hookimpl
def ao_scale_methods(): return [ScaleMethod("s", None)]
@hookimpl
def ao_transforms(): return {Transform(Config, "t", 1, same)}
@hookimpl
def ao_algorithms(): return [Algorithm("a", Config, same, same)]
@hookimpl
def ao_recipes(): return [Recipe("good/r", Config())]
@hookimpl
def ao_folder_kinds(): return [FolderKind("f", same, same, same, same)]
@hookimpl
def ao_interchange(): return [Interchange("i", same, same, same, same, "nothing")]
@hookimpl
def ao_optimizers(): return [Momentum]
"""
    site.add("ao-good", source)
    assert load() == []
    (info,) = registry.loader.plugins()
    assert info.records == {
        "dtypes": ["fp3"],
        "layouts": ["flip"],
        "kernels": ["k"],
        "scale_methods": ["s"],
        "transforms": ["t"],
        "algorithms": ["a"],
        "recipes": ["good/r"],
        "folder_kinds": ["f"],
        "interchange": ["i"],
        "optimizers": ["Momentum"],
    }
    for plural, names in info.records.items():
        assert registry.tables[plural].provider(names[0]) == "ao-good"


def test_an_entry_point_may_name_an_object_and_a_distribution_may_have_two(site, registry, load):
    source = """
class Second:
    @staticmethod
    @hookimpl
    def ao_api(): return (0, 1)
    @hookimpl
    def ao_dtypes(self): return [dtype("fp5")]
    @hookimpl(specname="ao_kernels")
    def anything(self): return []
second = Second()
"""
    site.add("ao-good", source, dtypes=["fp3"], entry_points="b = ao_good:second\na = ao_good")
    assert load() == []
    assert [(p.name, p.module) for p in registry.loader.plugins()] == [
        ("a", "ao_good"),
        ("b", "ao_good:second"),
    ]
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]


def test_plugins_load_in_the_order_of_their_distributions(site, registry, load):
    for dist in ("ao-c", "ao-a", "ao-b"):
        site.add(dist, dtypes=[dist[-1]])
    assert load() == []
    assert registry.dtypes.names() == ["int4", "int8", "a", "b", "c"]


def test_a_distribution_that_another_hides_is_not_loaded(site, registry, load, tmp_path):
    site.add("ao-good", dtypes=["fp3"], version="2.0")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    type(site)(hidden).add("AO_Good", dtypes=["fp5"], version="1.0", entry_points="old = ao_old")
    site.path.append(str(hidden))
    assert load() == []
    assert [(p.name, p.version) for p in registry.loader.plugins()] == [("good", "2.0")]


def test_requirements_that_are_met_or_do_not_apply(site, registry, load):
    requires = [
        "torch>=2",
        "Pluggy",
        'no-such-dist; python_version < "3"',
        'no-such-dist>=3; extra == "gpu"',
    ]
    site.add("ao-good", dtypes=["fp3"], requires=requires)
    assert load() == []
    assert "fp3" in registry.dtypes


def test_a_plugin_may_look_names_up_while_it_is_loaded(site, registry, load):
    source = """
from ao_core.registry import registry
registry.dtypes.get("int4")
try:
    registry.dtypes.get("fp3")
except LookupError as error:
    answer = error
"""
    site.add("ao-good", source, dtypes=["fp3"])
    assert load() == []
    assert "unknown dtype 'fp3'" in str(sys.modules["ao_good"].answer)
    assert "fp3" in registry.dtypes


def test_optional_hooks_of_another_version_are_no_problem(site, registry, load):
    site.add("ao-good", "@hookimpl(optionalhook=True)\ndef ao_futures(): return []\n")
    assert load() == []


def test_freezing_loads_plugins_first_so_that_their_kernels_count(site, registry):
    source = "@hookimpl\ndef ao_kernels():\n    return [Kernel('k', 'a', '*', '*', same, 0)]\n"
    site.add("ao-good", source)
    registry.freeze()
    assert registry.kernels.names() == ["k"]
    assert registry.loader.problems() == []


def test_many_threads_load_once(site, registry):
    site.add("ao-good", "import time; time.sleep(0.05)", dtypes=["fp3"])
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.dtypes.get("fp3"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert registry.loader.problems() == []


def test_a_plugin_that_works_long_while_it_is_loaded_is_named(site, load, monkeypatch):
    site.add("ao-good", "for _ in range(100_000): pass", dtypes=["fp3"])
    monkeypatch.setattr("ao_core.plugins.SLOW", 0.0)
    (problem,) = load()
    assert (problem.dist, problem.phase) == ("ao-good", "speed")
    assert "s to load, " in str(problem)


def cli(body, arguments="app"):
    return f"@hookimpl\ndef ao_cli({arguments}):\n    {body}\n"


def test_cli_hooks_get_the_application_and_fail_alone(site, registry, load, monkeypatch):
    site.add("ao-a", cli("app.append('a')"))
    site.add("ao-b", cli("raise SystemExit(2)"))
    site.add("ao-c", cli("app.append('c')"))
    site.add("ao-d", cli("same(1)", arguments=""))
    site.add("ao-e", "1 / 0")
    assert len(load()) == 1
    app = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call_cli_hooks(app)
    assert [str(warning.message) for warning in caught] == [
        "Plugin ao-b 1.0 failed in hook ao_cli: SystemExit: 2."
    ]
    assert app == ["a", "c"]
    assert [(p.dist, p.phase) for p in problems()] == [("ao-e", "import"), ("ao-b", "hook ao_cli")]
    monkeypatch.setenv("AO_STRICT", "1")
    with pytest.raises(PluginError, match="hook ao_cli"):
        call_cli_hooks(app)


def test_sentences_about_the_machine_come_by_distribution_and_fail_alone(site, registry, load):
    hook = "@hookimpl\ndef ao_machine():\n    {}\n"
    site.add("ao-a", hook.format("return ['two cores']"))
    site.add("ao-b", hook.format("raise OSError('no such device')"))
    site.add("ao-c", hook.format("return 'no list'"))
    assert load() == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert registry.loader.machine() == {"ao-a": ["two cores"]}
    assert [str(warning.message).partition(": ")[0] for warning in caught] == [
        f"Plugin ao-{name} 1.0 failed in hook ao_machine" for name in "bc"
    ]


def run(site, code):
    """Run code in a new interpreter that sees the site; return what it printed."""
    source = Path(ao_core.__file__).parents[1]
    path = os.pathsep.join([str(site.folder), str(source), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "AO_PLUGINS": "good"}
    return run_python("-c", code, env=environment, check=True).stdout


def test_nothing_of_plugins_is_imported_until_a_name_is_missed(site):
    site.add("ao-good", dtypes=["fp3"])
    output = run(
        site,
        """
import sys, torch
tools = {"pluggy", "packaging", "importlib_metadata"}
before = tools & set(sys.modules)
from ao_core.records import DType
from ao_core.registry import registry
registry.builtin_sources["dtypes"] = lambda: [
    DType("int4", 4, "int", abs, abs, min=-8, max=7, quant_max=7)
]
registry.dtypes.get("int4"), "int4" in registry.dtypes, registry.dtypes.local("fp3")
print("ao_good" in sys.modules, sorted(tools & set(sys.modules) - before))
print(registry.dtypes.get("fp3").name, registry.dtypes.provider("fp3"))
print("ao_good" in sys.modules, sorted(tools & set(sys.modules)))
""",
    )
    assert output.splitlines() == [
        "False []",
        "fp3 ao-good",
        "True ['importlib_metadata', 'packaging', 'pluggy']",
    ]


@pytest.mark.parametrize("listing", ["names()", "values()", "items()"])
def test_asking_for_all_names_loads_plugins(site, registry, listing):
    site.add("ao-good", dtypes=["fp3"])
    assert "ao_good" not in sys.modules
    assert len(getattr(registry.dtypes, listing.removesuffix("()"))()) == 3
    assert "ao_good" in sys.modules
