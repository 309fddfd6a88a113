"""Discovery against distributions faked on disk: whole ones, and every way to be broken."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import importlib_metadata
import pytest
import torch

import ao_core.registry
from ao_core.errors import PluginError, UnknownNameError
from ao_core.plugins import (
    PluginInfo,
    PluginProblem,
    PluginWarning,
    call_cli_hooks,
    load_plugins,
    plugins,
    problems,
)
from ao_core.records import DType
from ao_core.registry import Registry

HEADER = """
from ao_core.hookspecs import hookimpl
from ao_core.records import DType, Kernel

def same(x):
    return x

def dtype(name):
    return DType(name, 4, "int", encode=same, decode=same, min=-8, max=7, reach=7)
"""
API = """
@hookimpl
def ao_api():
    return (0, 1)
"""


def provides(*names):
    """Source of a plugin that provides these number formats."""
    return f"{API}\n@hookimpl\ndef ao_dtypes():\n    return [dtype(n) for n in {names!r}]\n"


class Site:
    """A folder on sys.path that looks as if packages were installed in it."""

    def __init__(self, folder):
        self.folder = folder
        #: what discovery sees of sys.path
        self.path = [str(folder)]

    def add(self, dist, source, *, version="1.0", requires=(), entry_points=None):
        """Install a distribution of one module: `ao-good` is `ao_good`, its entry point `good`."""
        module = dist.replace("-", "_")
        (self.folder / f"{module}.py").write_text(HEADER + source)
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        entry_points = entry_points or f"{dist.removeprefix('ao-')} = {module}"
        (info / "entry_points.txt").write_text(f"[ao.plugins]\n{entry_points}\n")


def built_in(name):
    return DType(name, 4, "int", encode=abs, decode=abs, min=-8, max=7, reach=7)


@pytest.fixture
def site(tmp_path, monkeypatch):
    for variable in ("AO_PLUGINS", "AO_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path)
    # What is really installed beside ao-core must not change the outcome of these tests.
    monkeypatch.setattr(
        importlib_metadata,
        "distributions",
        lambda: importlib_metadata.Distribution.discover(path=site.path),
    )
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


@pytest.fixture
def registry(monkeypatch):
    """A fresh registry in the place of the process's own."""
    fresh = Registry({"dtypes": lambda: [built_in("int4"), built_in("int8")]})
    monkeypatch.setattr(ao_core.registry, "registry", fresh)
    monkeypatch.setattr(sys.modules["ao_core.plugins"], "registry", fresh)
    return fresh


def load(registry):
    """Load plugins; the text of the warnings must be that of the problems, one for one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry.load_plugins()
    found = registry.loader.problems()
    assert [str(w.message) for w in caught] == [str(problem) for problem in found]
    assert all(w.category is PluginWarning for w in caught)
    return found


# --- plugins that work


def test_a_good_plugin(site, registry):
    site.add("ao-good", provides("fp3", "fp5"), version="0.3")
    assert load(registry) == []
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]
    assert registry.dtypes.provider("fp3") == "ao-good"
    assert registry.loader.plugins() == [
        PluginInfo("good", "ao-good", "0.3", "ao_good", {"dtypes": ["fp3", "fp5"]})
    ]


def test_the_public_functions_act_on_the_registry_of_the_process(site, registry):
    site.add("ao-good", provides("fp3"))
    site.add("ao-worse", "raise RuntimeError('boom')")
    with pytest.warns(PluginWarning, match="boom"):
        load_plugins()
    assert [info.dist for info in plugins()] == ["ao-good"]
    assert [problem.dist for problem in problems()] == ["ao-worse"]


def test_every_kind_of_record(site, registry):
    source = (
        API
        + """
import torch
from ao_core.layouts.base import Layout
from ao_core.records import Recipe, Transform

class Config: pass
class Flip(Layout):
    name = "flip"
class Momentum(torch.optim.SGD): pass
class Odd(torch.Tensor): pass

@hookimpl
def ao_dtypes(): yield dtype("fp3")
@hookimpl
def ao_layouts(): return (Flip(),)
@hookimpl
def ao_kernels(): return [Kernel("k", "linear", "flip", "cpu", same, 0)]
@hookimpl
def ao_transforms(): return {Transform(Config, "t", 1, same)}
@hookimpl
def ao_recipes(): return [Recipe("good/r", Config())]
@hookimpl
def ao_optimizers(): return [Momentum]
@hookimpl
def ao_tensors(): return [Odd]
"""
    )
    site.add("ao-good", source)
    before = torch.serialization.get_safe_globals()
    try:
        assert load(registry) == []
        (info,) = registry.loader.plugins()
        assert info.records == {
            "dtypes": ["fp3"],
            "layouts": ["flip"],
            "kernels": ["k"],
            "transforms": ["t"],
            "recipes": ["good/r"],
            "optimizers": ["Momentum"],
            "tensors": ["Odd"],
        }
        for plural, names in info.records.items():
            assert registry.tables[plural].provider(names[0]) == "ao-good"
        odd = registry.tensors.get("Odd")
        assert odd in torch.serialization.get_safe_globals()
        assert odd not in before
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_an_entry_point_may_name_an_object_and_a_distribution_may_have_two(site, registry):
    source = (
        provides("fp3")
        + """
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
    )
    site.add("ao-good", source, entry_points="b = ao_good:second\na = ao_good")
    assert load(registry) == []
    assert [(p.name, p.module) for p in registry.loader.plugins()] == [
        ("a", "ao_good"),
        ("b", "ao_good:second"),
    ]
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]


def test_plugins_load_in_the_order_of_their_distributions(site, registry):
    for dist in ("ao-c", "ao-a", "ao-b"):
        site.add(dist, provides(dist[-1]))
    assert load(registry) == []
    assert registry.dtypes.names() == ["int4", "int8", "a", "b", "c"]


def test_a_distribution_that_another_hides_is_not_loaded(site, registry, tmp_path):
    site.add("ao-good", provides("fp3"), version="2.0")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    Site(hidden).add("AO_Good", provides("fp5"), version="1.0", entry_points="old = ao_old")
    site.path.append(str(hidden))
    assert load(registry) == []
    assert [(p.name, p.version) for p in registry.loader.plugins()] == [("good", "2.0")]


def test_requirements_that_are_met_or_do_not_apply(site, registry):
    requires = [
        "torch>=2",
        "Pluggy",
        'no-such-dist; python_version < "3"',
        'no-such-dist>=3; extra == "gpu"',
    ]
    site.add("ao-good", provides("fp3"), requires=requires)
    assert load(registry) == []
    assert "fp3" in registry.dtypes


def test_a_plugin_may_look_names_up_while_it_is_loaded(site, registry):
    source = """
from ao_core.registry import registry
registry.dtypes.get("int4")
try:
    registry.dtypes.get("fp3")
except LookupError as error:
    answer = error
"""
    site.add("ao-good", source + provides("fp3"))
    assert load(registry) == []
    assert "unknown dtype 'fp3'" in str(sys.modules["ao_good"].answer)
    assert "fp3" in registry.dtypes


def test_optional_hooks_of_another_version_are_no_problem(site, registry):
    site.add("ao-good", API + "@hookimpl(optionalhook=True)\ndef ao_futures(): return []\n")
    assert load(registry) == []


def test_freezing_loads_plugins_first_so_that_their_kernels_count(site, registry):
    source = (
        API + "@hookimpl\ndef ao_kernels():\n    return [Kernel('k', 'a', '*', '*', same, 0)]\n"
    )
    site.add("ao-good", source)
    registry.freeze()
    assert registry.kernels.names() == ["k"]
    assert registry.loader.problems() == []


def test_many_threads_load_once(site, registry):
    site.add("ao-good", "import time; time.sleep(0.05)\n" + provides("fp3"))
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


# --- plugins that are broken: (source, options of Site.add, phase, part of the message)

WHOLE = {
    "import error": ("import cutlass_is_not_here", {}, "import", "No module named 'cutlass_is"),
    "raises at import": ("1 / 0", {}, "import", "ZeroDivisionError: division by zero."),
    "syntax error": ("def (", {}, "import", "SyntaxError"),
    "exits at import": ("raise SystemExit(3)", {}, "import", "SystemExit: 3."),
    "base exception at import": (
        "class Stop(BaseException): pass\nraise Stop",
        {},
        "import",
        "failed while importing: Stop.",
    ),
    "module missing": ("", {"entry_points": "bad = ao_nowhere"}, "import", "'ao_nowhere'"),
    "attribute missing": (API, {"entry_points": "bad = ao_bad:no"}, "import", "attribute 'no'"),
    "not a reference": (
        API,
        {"entry_points": "bad = ao-bad!"},
        "import",
        "failed while importing: ",
    ),
    "missing requirement": (
        API,
        {"requires": ["torch>=2", "no-such-dist>=3"]},
        "requirements",
        "no-such-dist>=3 is not installed.",
    ),
    "conflicting requirement": (
        API,
        {"requires": ["torch<2"]},
        "requirements",
        f"torch<2 is required, but {importlib_metadata.version('torch')} is installed.",
    ),
    "two requirements": (
        API,
        {"requires": ["no-such-dist", "torch<1"]},
        "requirements",
        "no-such-dist is not installed; torch<1 is required",
    ),
    "unreadable requirement": (API, {"requires": ["torch>>2"]}, "requirements", "torch>>2"),
    "other major": (
        API.replace("(0, 1)", "(1, 0)"),
        {},
        "api",
        "written for API 1.0, and this ao-core has API 0.1; upgrade ao-core",
    ),
    "newer minor": (API.replace("(0, 1)", "(0, 2)"), {}, "api", "API 0.2, and this ao-core"),
    "no api": ("", {}, "api", "it has no ao_api hook; add: @hookimpl def ao_api(): return (0, 1)"),
    "api not marked": ("def ao_api(): return (0, 1)", {}, "api", "ao_api is not marked"),
    "api a string": (API.replace("(0, 1)", "'0.1'"), {}, "api", "ao_api returned '0.1'"),
    "api of bools": (API.replace("(0, 1)", "(False, True)"), {}, "api", "not two integers"),
    "api raises": (API.replace("return (0, 1)", "return 1 / 0"), {}, "api", "ZeroDivisionError"),
    "wrong arguments": (
        API + "@hookimpl\ndef ao_dtypes(device): return []",
        {},
        "register",
        "device",
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_broken_plugin_is_left_out_and_reported(site, registry, case):
    source, options, phase, message = WHOLE[case]
    site.add("ao-bad", source, version="0.3", **options)
    site.add("ao-a-good", provides("fp3"))
    site.add("ao-z-good", provides("fp5"))
    (problem,) = load(registry)
    assert (problem.name, problem.dist, problem.version) == ("bad", "ao-bad", "0.3")
    assert problem.phase == phase
    assert isinstance(problem.exception, BaseException)
    assert message in str(problem)
    assert str(problem).startswith("Plugin ao-bad 0.3 failed while ")
    assert "\n" not in str(problem)
    assert [info.dist for info in registry.loader.plugins()] == ["ao-a-good", "ao-z-good"]
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]


def hook(body):
    """Source of a plugin whose `ao_dtypes` has this body, and whose `ao_kernels` works."""
    return (
        f"{API}\n@hookimpl\ndef ao_dtypes():\n    {body}\n"
        "@hookimpl\ndef ao_kernels(): return [Kernel('k', 'linear', '*', '*', same, 0)]\n"
    )


# (source, phase, part of the message, number formats that remain)
PARTLY = {
    "raises": (hook("raise ValueError('no')"), "hook ao_dtypes", "ValueError: no.", []),
    "exits": (hook("raise SystemExit"), "hook ao_dtypes", "SystemExit.", []),
    "raises halfway": (hook("yield dtype('fp3'); 1 / 0"), "hook ao_dtypes", "Zero", []),
    "none": (hook("pass"), "hook ao_dtypes", "returned NoneType; return a list of a DType", []),
    "one record": (hook("return dtype('fp3')"), "hook ao_dtypes", "returned DType;", []),
    "a string": (hook("return 'fp3'"), "hook ao_dtypes", "returned str;", []),
    "wrong type": (
        hook("return [dtype('fp3'), 'fp5', dtype('fp6')]"),
        "hook ao_dtypes",
        "one of its records is a str, not a DType",
        ["fp3", "fp6"],
    ),
    "wrong table": (
        hook("return [Kernel('fp3', 'linear', '*', '*', same, 0)]"),
        "hook ao_dtypes",
        "is a Kernel, not a DType",
        [],
    ),
    "no name": (hook("return [dtype('')]"), "hook ao_dtypes", "has the name ''", []),
    "name of a built-in": (
        hook("return [dtype('fp3'), dtype('int4')]"),
        "hook ao_dtypes",
        "'int4' is provided by ao-core already and claimed by ao-bad too; the one of ao-core stays",
        ["fp3"],
    ),
    "a name twice": (hook("return [dtype('x')] * 2"), "hook ao_dtypes", "claimed by ao-bad", ["x"]),
    "misspelt hook": (
        hook("return [dtype('fp3')]") + "@hookimpl\ndef ao_dtype(): return []",
        "hook ao_dtype",
        "there is no such hook. Did you mean 'ao_dtypes'? Known: ",
        ["fp3"],
    ),
    "hook not marked": (
        hook("return [dtype('fp3')]") + "def ao_recipes(): return []",
        "hook ao_recipes",
        "not marked with @hookimpl",
        ["fp3"],
    ),
    "wrapper": (
        hook("return [dtype('fp3')]")
        + "@hookimpl(specname='ao_recipes', wrapper=True)\ndef w(): return (yield)",
        "hook ao_recipes",
        "is a NoneType, not a Recipe",
        ["fp3"],
    ),
}


@pytest.mark.parametrize("case", PARTLY)
def test_the_rest_of_a_partly_broken_plugin_is_used(site, registry, case):
    source, phase, message, remaining = PARTLY[case]
    site.add("ao-bad", source, version="0.3")
    site.add("ao-good", provides("good"))
    (problem,) = load(registry)
    assert (problem.name, problem.dist, problem.version) == ("bad", "ao-bad", "0.3")
    assert problem.phase == phase
    assert message in str(problem)
    assert str(problem).startswith(f"Plugin ao-bad 0.3 failed in {phase}: ")
    assert registry.dtypes.names() == ["int4", "int8", *remaining, "good"]
    assert registry.kernels.provider("k") == "ao-bad"
    bad, good = registry.loader.plugins()
    expected = {"dtypes": remaining, "kernels": ["k"]} if remaining else {"kernels": ["k"]}
    assert bad.records == expected
    assert good.records == {"dtypes": ["good"]}


def test_a_name_of_two_plugins_belongs_to_the_first(site, registry):
    site.add("ao-a", provides("fp3", "a"))
    site.add("ao-b", provides("fp3", "b"))
    (problem,) = load(registry)
    assert problem.dist == "ao-b"
    assert "dtype 'fp3' is provided by ao-a already and claimed by ao-b too" in str(problem)
    assert registry.dtypes.provider("fp3") == "ao-a"
    assert registry.dtypes.provider("b") == "ao-b"


def test_what_was_registered_in_the_process_stays_before_a_plugin(site, registry):
    mine = built_in("fp3")
    registry.add(mine, provider="in-process")
    site.add("ao-bad", provides("fp3"))
    (problem,) = load(registry)
    assert "provided by in-process already and claimed by ao-bad" in str(problem)
    assert registry.dtypes.get("fp3") is mine


def test_one_module_behind_two_entry_points(site, registry):
    site.add("ao-good", provides("fp3"), entry_points="a = ao_good\nb = ao_good")
    (problem,) = load(registry)
    assert (problem.name, problem.phase) == ("b", "register")
    assert "ao_good is loaded already" in str(problem)
    assert "fp3" in registry.dtypes


def test_metadata_that_cannot_be_read_hide_no_other_distribution(site, registry):
    site.add("ao-bad", API, entry_points="no equals sign")
    nameless = site.folder / "ao_nameless-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[ao.plugins]\nx = ao_x\n")
    unrelated = site.folder / "unrelated-1.0.dist-info"
    unrelated.mkdir()
    (unrelated / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    site.add("ao-good", provides("fp3"))
    found = load(registry)
    assert {problem.phase for problem in found} == {"discovery"}
    assert sorted(problem.dist for problem in found) == ["ao-bad", "of unknown name"]
    assert "fp3" in registry.dtypes


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", hook("raise KeyboardInterrupt")])
def test_an_interrupt_is_no_problem_of_the_plugin_and_leaves_nothing(site, registry, source):
    site.add("ao-a", provides("fp3"))
    site.add("ao-b", source)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            registry.dtypes.get("fp3")
        assert registry.dtypes.local("fp3") is None
    (site.folder / "ao_b.py").write_text(HEADER + provides("fp5") + "# no longer interrupts\n")
    sys.modules.pop("ao_b", None)
    assert load(registry) == []
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]


# --- how problems are told


def test_a_failed_lookup_names_the_plugins_that_failed(site, registry):
    site.add("ao-marlin", "import cutlass_is_not_here", version="0.3")
    with (
        pytest.warns(PluginWarning),
        pytest.raises(UnknownNameError) as caught,
    ):
        registry.dtypes.get("itn4")
    assert str(caught.value) == (
        "unknown dtype 'itn4'. Did you mean 'int4'? Known: int4, int8. Plugin ao-marlin 0.3 failed "
        "while importing: No module named 'cutlass_is_not_here'."
    )


def test_a_problem_warns_once_in_a_process(site, registry):
    site.add("ao-bad", "1 / 0")
    assert len(load(registry)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            registry.load_plugins()
            assert "nothing" not in registry.dtypes
            with pytest.raises(UnknownNameError, match="ZeroDivisionError"):
                registry.dtypes.get("nothing")
    assert len(registry.loader.problems()) == 1


def test_warnings_turned_into_errors_do_not_load_twice(site, registry):
    site.add("ao-bad", "1 / 0")
    site.add("ao-good", provides("fp3"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PluginWarning):
            registry.dtypes.get("fp3")
        assert registry.dtypes.get("fp3").name == "fp3"


def test_transform_for_names_the_distribution_of_the_class(site, registry):
    site.add("ao-late", "class LateConfig: pass\n1 / 0", version="2.1")
    config = type("LateConfig", (), {"__module__": "ao_late.configs"})
    with (
        pytest.warns(PluginWarning),
        pytest.raises(UnknownNameError) as caught,
    ):
        registry.transform_for(config)
    assert "The distribution ao-late 2.1 should provide it." in str(caught.value)
    assert "Plugin ao-late 2.1 failed while importing" in str(caught.value)


def test_problem_text_without_a_message_has_no_loose_colon():
    problem = PluginProblem("x", "ao-x", "1", "import", AssertionError())
    assert str(problem) == "Plugin ao-x 1 failed while importing: AssertionError."


# --- environment variables


@pytest.mark.parametrize(
    ("value", "expected", "left_out"),
    [
        (None, ["ao-a", "ao-b", "ao-c"], None),
        ("", [], "a (ao-a), b (ao-b), c (ao-c)"),
        (" , ", [], "a (ao-a), b (ao-b), c (ao-c)"),
        ("a", ["ao-a"], "b (ao-b), c (ao-c)"),
        ("AO_B", ["ao-b"], "a (ao-a), c (ao-c)"),
        ("c, ao-a", ["ao-a", "ao-c"], "b (ao-b)"),
        ("a,ao-a", ["ao-a"], "b (ao-b), c (ao-c)"),
    ],
)
def test_ao_plugins_chooses(site, registry, monkeypatch, value, expected, left_out):
    for dist in ("ao-a", "ao-b", "ao-c"):
        site.add(dist, provides(dist[-1]))
    if value is not None:
        monkeypatch.setenv("AO_PLUGINS", value)
    assert load(registry) == []
    assert [info.dist for info in registry.loader.plugins()] == expected
    for dist in ("ao-a", "ao-b", "ao-c"):
        assert (dist.replace("-", "_") in sys.modules) == (dist in expected)
    with pytest.raises(UnknownNameError) as caught:
        registry.dtypes.get("nothing")
    if left_out is None:
        assert "AO_PLUGINS" not in str(caught.value)
    else:
        assert str(caught.value).endswith(f" AO_PLUGINS leaves out: {left_out}.")


def test_ao_plugins_with_a_name_that_is_not_installed(site, registry, monkeypatch):
    site.add("ao-marlin", provides("fp3"))
    monkeypatch.setenv("AO_PLUGINS", "marlni,marlin")
    (problem,) = load(registry)
    assert (problem.name, problem.phase) == ("marlni", "AO_PLUGINS")
    assert str(problem) == (
        "Plugin marlni failed while being selected by AO_PLUGINS: not installed. "
        "Did you mean 'marlin'? Installed: marlin."
    )
    assert "fp3" in registry.dtypes


def test_ao_strict_raises_every_time_and_names_all(site, registry, monkeypatch):
    monkeypatch.setenv("AO_STRICT", "1")
    site.add("ao-a", "1 / 0")
    site.add("ao-b", "import cutlass_is_not_here")
    site.add("ao-good", provides("fp3"))
    for look in (
        registry.load_plugins,
        registry.dtypes.names,
        lambda: registry.dtypes.get("fp7"),
        load_plugins,
    ):
        with pytest.raises(PluginError, match=r"^AO_STRICT=1: .*ao-a .*ao-b .*cutlass") as caught:
            look()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert registry.dtypes.get("int4").name == "int4"
    assert len(problems()) == 2
    assert [info.dist for info in plugins()] == ["ao-good"]


@pytest.mark.parametrize("value", ["", "0"])
def test_ao_strict_of_another_value_is_not_strict(site, registry, monkeypatch, value):
    monkeypatch.setenv("AO_STRICT", value)
    site.add("ao-bad", "1 / 0")
    assert len(load(registry)) == 1


def test_ao_strict_raises_nothing_where_all_is_well(site, registry, monkeypatch):
    monkeypatch.setenv("AO_STRICT", "1")
    site.add("ao-good", provides("fp3"))
    assert registry.dtypes.get("fp3").name == "fp3"


# --- the command line hook


def cli(body, arguments="app"):
    return f"{API}\n@hookimpl\ndef ao_cli({arguments}):\n    {body}\n"


def test_cli_hooks_get_the_application_and_fail_alone(site, registry, monkeypatch):
    site.add("ao-a", cli("app.append('a')"))
    site.add("ao-b", cli("raise SystemExit(2)"))
    site.add("ao-c", cli("app.append('c')"))
    site.add("ao-d", cli("same(1)", arguments=""))
    site.add("ao-e", "1 / 0")
    assert len(load(registry)) == 1
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


# --- laziness, in processes of their own


def run(site, code):
    """Run code in a new interpreter that sees the site; return what it printed."""
    source = Path(ao_core.registry.__file__).parents[1]
    path = os.pathsep.join([str(site.folder), str(source), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "AO_PLUGINS": "good"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_of_plugins_is_imported_until_a_name_is_missed(site):
    site.add("ao-good", provides("fp3"))
    output = run(
        site,
        """
import sys, torch
tools = {"pluggy", "packaging", "importlib_metadata"}
before = tools & set(sys.modules)
from ao_core.records import DType
from ao_core.registry import registry
registry.builtin_sources["dtypes"] = lambda: [
    DType("int4", 4, "int", abs, abs, min=-8, max=7, reach=7)
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
    site.add("ao-good", provides("fp3"))
    assert "ao_good" not in sys.modules
    assert len(getattr(registry.dtypes, listing.removesuffix("()"))()) == 3
    assert "ao_good" in sys.modules
