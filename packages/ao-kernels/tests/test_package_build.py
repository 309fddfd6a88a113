"""The build hook: what it compiles, what it puts into a wheel, and what it does where it cannot."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

PACKAGE = Path(__file__).parents[1]


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The module hatch_build, at work in an empty folder."""
    spec = importlib.util.spec_from_file_location("hatch_build", PACKAGE / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hatch_build", module)
    spec.loader.exec_module(module)
    for each in (module, sys.modules["cpp_build"]):
        monkeypatch.setattr(each, "ROOT", tmp_path)
    monkeypatch.delenv("AO_WHEEL_PLATFORM", raising=False)
    monkeypatch.setattr(module, "IN_PLACE", tmp_path / "src" / "ao_kernels" / "cpu")
    return module


@pytest.fixture
def initialize(hook):
    """Run the hook as hatchling would; returns what is to be built, and the warnings."""

    def run(version):
        warnings = []
        app = SimpleNamespace(display_warning=warnings.append)
        build = hook.NativeBuild("", {}, None, None, "", "wheel", app)
        data = {"force_include": {}, "pure_python": True}
        build.initialize(version, data)
        return data, warnings

    return run


@pytest.fixture
def compiles(hook, monkeypatch):
    """Stands in for compiling and linking."""

    def build_library(target, *, sanitize="", strip=False, jobs=1):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("stripped" if strip else "with symbols")

    monkeypatch.setattr(hook, "build_library", build_library)


def test_a_wheel_holds_the_stripped_library_and_is_of_one_platform(initialize, compiles):
    data, warnings = initialize("standard")
    ((path, place),) = data["force_include"].items()
    assert place == "ao_kernels/cpu/libao_cpu.so"
    assert Path(path).read_text() == "stripped"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert data["tag"] == f"py3-none-{platform}"
    assert data["pure_python"] is False
    assert warnings == []


def test_an_editable_installation_builds_in_place(hook, initialize, compiles):
    (hook.IN_PLACE).mkdir(parents=True)
    (hook.IN_PLACE / "not_built.txt").write_text("an older reason")
    data, _ = initialize("editable")
    assert data == {"force_include": {}, "pure_python": True}
    assert [path.name for path in hook.IN_PLACE.iterdir()] == ["libao_cpu.so"]


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_without_a_compiler_the_reason_is_installed(hook, initialize, monkeypatch, version):
    folder = hook.IN_PLACE if version == "editable" else hook.ROOT / "build" / "wheel"
    folder.mkdir(parents=True)
    (folder / "libao_cpu.so").write_text("of an earlier build")
    monkeypatch.setenv("CXX", "no-such-compiler")
    data, (warning,) = initialize(version)
    reason = "no C++ compiler was found (tried no-such-compiler)"
    assert warning == f"ao-kernels without its C++ library: {reason}"
    assert [path.name for path in folder.iterdir()] == ["not_built.txt"]
    assert (folder / "not_built.txt").read_text() == f"{reason}\n"
    assert "tag" not in data
    assert data["pure_python"] is True
    included = ["ao_kernels/cpu/not_built.txt"] if version == "standard" else []
    assert list(data["force_include"].values()) == included


def test_a_wheel_for_macos_is_of_one_processor(hook, monkeypatch):
    monkeypatch.setattr(hook.sys, "platform", "darwin")
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "macosx-10.9-universal2")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert hook.chosen_target() == ("darwin", "aarch64", "macosx_11_0_arm64", False)


@pytest.mark.parametrize(
    ("tag", "system", "machine"),
    [
        ("manylinux_2_28_x86_64", "linux", "x86_64"),
        ("manylinux_2_28_aarch64", "linux", "aarch64"),
        ("macosx_11_0_arm64", "darwin", "aarch64"),
        ("linux_x86_64", "linux", "x86_64"),
    ],
)
def test_the_platform_of_a_wheel_can_be_named(
    hook, initialize, compiles, monkeypatch, tag, system, machine
):
    monkeypatch.setenv("AO_WHEEL_PLATFORM", tag)
    monkeypatch.setattr(hook.sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    wanted = hook.chosen_target()
    assert wanted == (system, machine, tag, True)
    assert wanted.foreign == ((system, machine) != ("linux", "x86_64"))
    data, _ = initialize("standard")
    assert data["tag"] == f"py3-none-{tag}"


def test_a_pure_wheel_can_be_asked_for(initialize, monkeypatch):
    monkeypatch.setenv("AO_WHEEL_PLATFORM", "any")
    data, (warning,) = initialize("standard")
    assert "AO_WHEEL_PLATFORM=any asked for a wheel without it" in warning
    assert list(data["force_include"].values()) == ["ao_kernels/cpu/not_built.txt"]
    assert "tag" not in data


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        (
            "win_amd64",
            "AO_WHEEL_PLATFORM=win_amd64: use the platform of a wheel, such as manylinux",
        ),
        ("linux_x86_64", "no C.. compiler was found"),
    ],
)
def test_what_was_asked_for_is_built_or_fails(initialize, monkeypatch, tag, reason):
    monkeypatch.setenv("AO_WHEEL_PLATFORM", tag)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match=reason):
        initialize("standard")


def test_on_windows_nothing_is_compiled(hook, monkeypatch):
    monkeypatch.setattr(hook.sys, "platform", "win32")
    with pytest.raises(hook.CannotBuild, match="not built for Windows yet"):
        hook.find_compiler()


def test_a_compiler_that_is_too_old_is_no_compiler(hook, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(hook.CannotBuild, match="false cannot compile C"):
        hook.find_compiler()


def test_a_compiler_is_found(hook, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert hook.find_compiler()[0] in ("g++", "c++", "clang++")
    monkeypatch.setenv("CXX", "g++ -pipe")
    assert hook.find_compiler() == ["g++", "-pipe"]


def test_torch_is_found_without_importing_it(hook, monkeypatch):
    # where pip installs: that of this environment, or of another one that it lies over
    place = Path(importlib.util.find_spec("torch").origin).parents[1]
    monkeypatch.setattr(hook.sysconfig, "get_path", lambda name: str(place))
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    found = hook.find_torch()
    assert (found.include / "torch" / "csrc" / "stable" / "library.h").is_file()
    assert any(found.lib.glob("libtorch_cpu.*"))


def headers(hook, monkeypatch, folder, version):
    """Make the headers of a torch of this version the only ones."""
    monkeypatch.setattr(hook.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    place = folder / "torch" / "include" / "torch" / "headeronly" / "version.h"
    if version:
        place.parent.mkdir(parents=True)
        major, minor = version
        text = f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
        place.write_text(text)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ((2, 10), "torch >= 2.11 was needed, found 2.10"),
        ((1, 13), "torch >= 2.11 was needed, found 1.13"),
        (None, "the headers of torch were not found: install torch first"),
    ],
)
def test_a_torch_that_is_old_or_missing_is_refused(hook, monkeypatch, tmp_path, version, reason):
    headers(hook, monkeypatch, tmp_path, version)
    with pytest.raises(hook.CannotBuild, match=f"^{reason}$"):
        hook.find_torch()


def test_a_newer_torch_is_welcome(hook, monkeypatch, tmp_path):
    headers(hook, monkeypatch, tmp_path, (3, 0))
    assert hook.find_torch().include == tmp_path / "torch" / "include"


def sources(hook, **texts):
    folder = hook.ROOT / "csrc" / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.cpp").write_text(text)
    return folder


def test_units_get_the_flags_of_their_instruction_set(hook):
    names = ("generic", "avx2", "avx2_vnni", "avx512_vnni", "avx512", "amx", "neon")
    folder = sources(hook, a="", **{f"isa_{name}": "" for name in names})
    x86, arm = hook.ISA_FLAGS["x86_64"], hook.ISA_FLAGS["aarch64"]
    found = {path.stem: flags for path, flags in hook.cpu_sources(x86).items()}
    assert set(found) == {"a", *(f"isa_{name}" for name in names if name != "neon")}
    assert found["isa_generic"] == ("-O2",)
    assert "-mavx2" in found["isa_avx2"]
    assert {"-mavx2", "-mavxvnni"} <= set(found["isa_avx2_vnni"])
    assert set(found["isa_avx512"]) - set(found["isa_avx512_vnni"]) == {
        "-mavx512vbmi",
        "-mavx512bf16",
    }
    assert "-mavx512vnni" in found["isa_avx512"]
    assert {"-mavx512vnni", "-mamx-bf16"} <= set(found["isa_amx"])
    assert {path.stem for path in hook.cpu_sources(arm)} == {"a", "isa_generic", "isa_neon"}
    (folder / "deeper").mkdir()
    (folder / "deeper" / "b.cpp").write_text("")
    assert "b" in {path.stem for path in hook.cpu_sources({"generic": ()})}


def test_a_set_that_the_compiler_does_not_know_is_left_out(hook, monkeypatch):
    sources(hook, a="", isa_generic="", isa_amx="", isa_avx2_vnni="")
    known = {}

    def run(command, **options):
        return hook.subprocess.CompletedProcess(command, int(known["flag"] not in command))

    monkeypatch.setattr(hook.subprocess, "run", run)
    for known["flag"], units, told in (
        ("-std=c++20", {"isa_amx", "isa_avx2_vnni"}, ("-DAO_UNIT_avx2_vnni", "-DAO_UNIT_amx")),
        ("-mavxvnni", {"isa_avx2_vnni"}, ("-DAO_UNIT_avx2_vnni",)),
        ("-mfoo", set(), ()),
    ):
        found = hook.cpu_sources(hook.units_of("x86_64", ["g++"]))
        stems = {path.stem: flags for path, flags in found.items()}
        assert set(stems) == {"a", "isa_generic"} | units
        assert stems["a"] == told
    assert hook.units_of("riscv64", ["g++"]) == {"generic": ()}


def test_only_what_changed_is_compiled_again(hook, monkeypatch):
    folder = sources(hook, one='#include "shared.h"\nint one() { return N; }', two="int two;")
    (folder / "shared.h").write_text("#define N 1\n")
    ran = []
    really_run = hook.subprocess.run

    def run(command, **options):
        ran.append(Path(command[-1]).stem)
        return really_run(command, **options)

    monkeypatch.setattr(hook.subprocess, "run", run)

    def compile_all(*flags):
        ran.clear()
        units = hook.cpu_sources({"generic": ()})
        out = hook.ROOT / "build"
        out.mkdir(exist_ok=True)
        objects = hook.compile_objects(["g++"], units, list(flags), out, jobs=2)
        assert all(path.is_file() for path in objects)
        return sorted(ran)

    def touch(path):
        later = path.stat().st_mtime + 100
        os.utime(path, (later, later))

    both = ["csrc-cpu-one", "csrc-cpu-two"]
    assert compile_all() == both
    assert compile_all() == []
    assert compile_all("-O1") == both
    touch(folder / "shared.h")
    assert compile_all("-O1") == ["csrc-cpu-one"]


def test_a_file_edited_while_it_is_compiled_is_compiled_again(hook, monkeypatch):
    folder = sources(hook, a="int a;")
    units = hook.cpu_sources({"generic": ()})
    hook.compile_objects(["g++"], units, [], hook.ROOT, jobs=1)
    made = (hook.ROOT / "csrc-cpu-a.o").stat().st_mtime
    os.utime(folder / "a.cpp", (made + 0.001, made + 0.001))
    ran = []
    failing = SimpleNamespace(returncode=1, stderr="")
    monkeypatch.setattr(hook.subprocess, "run", lambda *a, **k: ran.append(a) or failing)
    with pytest.raises(hook.DoesNotCompile, match=r"exit status 1"):
        hook.compile_objects(["g++"], units, [], hook.ROOT, jobs=1)
    assert len(ran) == 1


def test_what_does_not_compile_ends_the_build_with_the_first_error(hook, capfd):
    sources(hook, good="int a;", bad="int b = nonsense;")
    reason = (
        r"g\+\+ does not compile 1 of 2 files \(.*bad.cpp:1:9: error: .nonsense. was not declared"
    )
    with pytest.raises(hook.DoesNotCompile, match=reason):
        hook.compile_objects(["g++"], hook.cpu_sources({"generic": ()}), [], hook.ROOT, jobs=1)
    assert "nonsense" in capfd.readouterr().err


@pytest.fixture
def failing_compiler(hook, tmp_path, monkeypatch):
    """A compiler that passes every probe and refuses every file."""
    compiler = tmp_path / "fails++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *probe.cpp*|*-dM*) exit 0;; esac\n'
        'echo "x.cpp:3:1: error: sorry, unimplemented" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    sources(hook, a="int a;")
    return str(compiler)


def test_installing_succeeds_where_the_compiler_fails(hook, initialize, failing_compiler):
    data, (warning,) = initialize("standard")
    folder = hook.ROOT / "build" / "wheel"
    assert [path.name for path in folder.iterdir()] == ["not_built.txt"]
    reason = (folder / "not_built.txt").read_text()
    assert reason.startswith(
        f"{failing_compiler} does not compile 2 of 2 files (x.cpp:3:1: error: "
    )
    assert reason.strip() in warning
    assert data["pure_python"] is True
    assert list(data["force_include"].values()) == ["ao_kernels/cpu/not_built.txt"]


def test_a_developer_is_told_that_the_compiler_fails(initialize, failing_compiler):
    with pytest.raises(SystemExit, match="error: .*fails.. does not compile 2 of 2 files"):
        initialize("editable")


def test_an_older_compiler_without_the_extensions_is_passed_over(hook, monkeypatch, tmp_path):
    old = tmp_path / "old++"
    refuses = '*probe.cpp) ! grep -q __builtin_shufflevector "$each"; exit;;'
    old.write_text(f"#!/bin/sh\nfor each; do case $each in {refuses} esac; done\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(hook.CannotBuild, match=r"old\+\+ cannot compile C\+\+20"):
        hook.find_compiler()
