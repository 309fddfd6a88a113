"""Every way a plugin can be broken: it is reported, and nothing else suffers."""

from __future__ import annotations

from dataclasses import replace

import importlib_metadata
import pytest

# (source, options of Site.add, phase, part of the message)
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
    "attribute missing": ("", {"entry_points": "bad = ao_bad:no"}, "import", "attribute 'no'"),
    "not a reference": (
        "",
        {"entry_points": "bad = ao-bad!"},
        "import",
        "failed while importing: ",
    ),
    "missing requirement": (
        "",
        {"requires": ["torch>=2", "no-such-dist>=3"]},
        "requirements",
        "no-such-dist>=3 is not installed.",
    ),
    "conflicting requirement": (
        "",
        {"requires": ["torch<2"]},
        "requirements",
        f"torch<2 is required, but {importlib_metadata.version('torch')} is installed.",
    ),
    "two requirements": (
        "",
        {"requires": ["no-such-dist", "torch<1"]},
        "requirements",
        "no-such-dist is not installed; torch<1 is required",
    ),
    "unreadable requirement": ("", {"requires": ["torch>>2"]}, "requirements", "torch>>2"),
    "other major": (
        "",
        {"api": "(1, 0)"},
        "api",
        "written for API 1.0, and this ao-core has API 0.1; upgrade ao-core",
    ),
    "newer minor": ("", {"api": "(0, 2)"}, "api", "API 0.2, and this ao-core"),
    "no api": (
        "",
        {"api": None},
        "api",
        "it has no ao_api hook; add: @hookimpl def ao_api(): return (0, 1)",
    ),
    "api not marked": ("def ao_api(): return (0, 1)", {"api": None}, "api", "ao_api is not marked"),
    "api a string": ("", {"api": "'0.1'"}, "api", "ao_api returned '0.1'"),
    "api of bools": ("", {"api": "(False, True)"}, "api", "not two integers"),
    "api raises": ("", {"api": "1 / 0"}, "api", "ZeroDivisionError"),
    "wrong arguments": (
        "@hookimpl\ndef ao_dtypes(device): return []",
        {},
        "register",
        "device",
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_broken_plugin_is_left_out_and_reported(site, registry, load, case):
    source, options, phase, message = WHOLE[case]
    site.add("ao-bad", source, version="0.3", **options)
    site.add("ao-a-good", dtypes=["fp3"])
    site.add("ao-z-good", dtypes=["fp5"])
    (problem,) = load()
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
        f"@hookimpl\ndef ao_dtypes():\n    {body}\n"
        "@hookimpl\ndef ao_kernels(): return [Kernel('k', 'linear', '*', '*', same, 0)]\n"
    )


# (source, phase, part of the message, number formats that remain)
PARTLY = {
    "raises": (hook("raise ValueError('no')"), "hook ao_dtypes", "ValueError: no.", []),
    "exits": (hook("raise SystemExit"), "hook ao_dtypes", "SystemExit.", []),
    "raises halfway": (hook("yield dtype('fp3'); 1 / 0"), "hook ao_dtypes", "Zero", []),
    "none": (
        hook("pass"),
        "hook ao_dtypes",
        "returned NoneType; return a list, each item a DType",
        [],
    ),
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
        hook("return [dtype('fp3')]") + "\n@hookimpl\ndef ao_dtype(): return []",
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
        + "\n@hookimpl(specname='ao_recipes', wrapper=True)\ndef w(): return (yield)",
        "hook ao_recipes",
        "is a NoneType, not a Recipe",
        ["fp3"],
    ),
}


@pytest.mark.parametrize("case", PARTLY)
def test_the_rest_of_a_partly_broken_plugin_is_used(site, registry, load, case):
    source, phase, message, remaining = PARTLY[case]
    site.add("ao-bad", source, version="0.3")
    site.add("ao-good", dtypes=["good"])
    (problem,) = load()
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


def test_a_name_of_two_plugins_belongs_to_the_first(site, registry, load):
    site.add("ao-a", dtypes=["fp3", "a"])
    site.add("ao-b", dtypes=["fp3", "b"])
    (problem,) = load()
    assert problem.dist == "ao-b"
    assert "dtype 'fp3' is provided by ao-a already and claimed by ao-b too" in str(problem)
    assert registry.dtypes.provider("fp3") == "ao-a"
    assert registry.dtypes.provider("b") == "ao-b"


def test_what_was_registered_in_the_process_stays_before_a_plugin(site, registry, load):
    mine = replace(registry.dtypes.get("int4"), name="fp3")
    registry.add(mine, provider="in-process")
    site.add("ao-bad", dtypes=["fp3"])
    (problem,) = load()
    assert "provided by in-process already and claimed by ao-bad" in str(problem)
    assert registry.dtypes.get("fp3") is mine


def test_one_module_behind_two_entry_points(site, registry, load):
    site.add("ao-good", dtypes=["fp3"], entry_points="a = ao_good\nb = ao_good")
    (problem,) = load()
    assert (problem.name, problem.phase) == ("b", "register")
    assert "ao_good is loaded already" in str(problem)
    assert "fp3" in registry.dtypes


def test_metadata_that_cannot_be_read_hide_no_other_distribution(site, registry, load):
    site.add("ao-bad", entry_points="no equals sign")
    nameless = site.folder / "ao_nameless-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[ao.plugins]\nx = ao_x\n")
    unrelated = site.folder / "unrelated-1.0.dist-info"
    unrelated.mkdir()
    (unrelated / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    site.add("ao-good", dtypes=["fp3"])
    found = load()
    assert {problem.phase for problem in found} == {"discovery"}
    assert sorted(problem.dist for problem in found) == ["ao-bad", "of unknown name"]
    assert "fp3" in registry.dtypes


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", hook("raise KeyboardInterrupt")])
def test_an_interrupt_is_no_problem_of_the_plugin_and_leaves_nothing(site, registry, load, source):
    site.add("ao-a", dtypes=["fp3"])
    site.add("ao-b", source)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            registry.dtypes.get("fp3")
        assert registry.dtypes.local("fp3") is None
    site.write("ao_b", "# it interrupts no more", dtypes=["fp5"])
    assert load() == []
    assert registry.dtypes.names() == ["int4", "int8", "fp3", "fp5"]
