"""How problems are told, and what AO_PLUGINS and AO_STRICT change."""

from __future__ import annotations

import sys
import warnings

import pytest

from ao_core.errors import PluginError, UnknownNameError
from ao_core.plugins import PluginProblem, PluginWarning, load_plugins, plugins, problems


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


def test_a_problem_warns_once_in_a_process(site, registry, load):
    site.add("ao-bad", "1 / 0")
    assert len(load()) == 1
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
    site.add("ao-good", dtypes=["fp3"])
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
def test_ao_plugins_chooses(site, registry, load, monkeypatch, value, expected, left_out):
    for dist in ("ao-a", "ao-b", "ao-c"):
        site.add(dist, dtypes=[dist[-1]])
    if value is not None:
        monkeypatch.setenv("AO_PLUGINS", value)
    assert load() == []
    assert [info.dist for info in registry.loader.plugins()] == expected
    for dist in ("ao-a", "ao-b", "ao-c"):
        assert (dist.replace("-", "_") in sys.modules) == (dist in expected)
    with pytest.raises(UnknownNameError) as caught:
        registry.dtypes.get("nothing")
    if left_out is None:
        assert "AO_PLUGINS" not in str(caught.value)
    else:
        assert str(caught.value).endswith(f" AO_PLUGINS leaves out: {left_out}.")


def test_ao_plugins_with_a_name_that_is_not_installed(site, registry, load, monkeypatch):
    site.add("ao-marlin", dtypes=["fp3"])
    monkeypatch.setenv("AO_PLUGINS", "marlni,marlin")
    (problem,) = load()
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
    site.add("ao-good", dtypes=["fp3"])
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
def test_ao_strict_of_another_value_is_not_strict(site, registry, load, monkeypatch, value):
    monkeypatch.setenv("AO_STRICT", value)
    site.add("ao-bad", "1 / 0")
    assert len(load()) == 1


def test_ao_strict_raises_nothing_where_all_is_well(site, registry, monkeypatch):
    monkeypatch.setenv("AO_STRICT", "1")
    site.add("ao-good", dtypes=["fp3"])
    assert registry.dtypes.get("fp3").name == "fp3"
