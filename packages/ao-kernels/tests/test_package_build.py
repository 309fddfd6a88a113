"""The build: what it compiles, what it puts into a wheel, and what it does where it cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
MACHINE = platform.machine()
HERE = f"linux_{MACHINE}"
COPIED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CMakeLists.txt",
    "cmake",
    "build_library.py",
    "cuda_build.py",
)
LIBRARY, NOT_BUILT = "ao_kernels/cpu/libao_cpu.so", "ao_kernels/cpu/not_built.txt"
HOOK = "import sys; from scikit_build_core import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="compiles for Linux")


@pytest.fixture
def package(tmp_path):
    """The package with sources that take no time to compile, and a library that a developer has built."""
    root = tmp_path / "package"
    root.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (PACKAGE / name).is_dir() else shutil.copy
        copy(PACKAGE / name, root / name)
    texts = {
        "src/ao_kernels/__init__.py": "",
        "src/ao_kernels/__about__.py": '__version__ = "0.1.0"\n',
        "src/ao_kernels/cpu/__init__.py": "",
        "src/ao_kernels/cpu/libao_cpu.so": "of a developer",
        "csrc/cpu/a.cpp": "int a() { return 1; }\n",
        "csrc/cpu/deeper/b.cpp": "int b() { return 1; }\n",
        "csrc/torch/c.cpp": "int c() { return 1; }\n",
        "csrc/cuda/driver.h": "namespace ao::gpu {\n"
        "struct Image { const char* name; const void* data; unsigned long bytes; };\n"
        "extern const Image images[];\nextern const int image_count;\n}\n",
    }
    texts |= {f"csrc/cpu/{path.name}": "" for path in PACKAGE.glob("csrc/cpu/isa_*.cpp")}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def environment(**variables):
    free = {
        k: v for k, v in os.environ.items() if k not in ("CXX", "CXXFLAGS", "AO_WHEEL_PLATFORM")
    }
    return {**free, **variables}


def hook(package, kind="build_wheel", **variables):
    """Run a hook of the backend; the process, and the wheel if there is one."""
    out = package.parent / "out"
    done = subprocess.run(
        [sys.executable, "-c", HOOK, kind, str(out)],
        cwd=package, env=environment(**variables), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, next(out.glob("*.whl"), None)


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith((".py", "/"))]
        return {name: archive.read(name) for name in names if name.startswith("ao_kernels/")}


def script(package, name, text):
    path = package.parent / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_a_wheel_holds_the_stripped_library_and_is_of_one_platform(package, tmp_path):
    _, wheel = hook(package)
    assert wheel.name == f"ao_kernels-0.1.0-py3-none-{HERE}.whl"
    held = contents(wheel)
    assert list(held) == [LIBRARY]
    (tmp_path / "library").write_bytes(held[LIBRARY])
    names = subprocess.run(["nm", tmp_path / "library"], capture_output=True, text=True, check=True)
    assert "no symbols" in names.stderr


@pytest.mark.slow
def test_the_platform_of_a_wheel_can_be_named(package):
    _, wheel = hook(package, AO_WHEEL_PLATFORM=f"manylinux_2_28_{MACHINE}")
    assert wheel.name == f"ao_kernels-0.1.0-py3-none-manylinux_2_28_{MACHINE}.whl"
    assert list(contents(wheel)) == [LIBRARY]


@pytest.mark.slow
def test_where_it_does_not_compile_a_pure_wheel_has_the_first_error(package):
    (package / "csrc" / "cpu" / "a.cpp").write_text("int a = nonsense;\n")
    _, wheel = hook(package)
    assert wheel.name == "ao_kernels-0.1.0-py3-none-any.whl"
    held = contents(wheel)
    assert list(held) == [NOT_BUILT]
    reason = held[NOT_BUILT].decode()
    assert "does not compile or link it (" in reason
    assert "a.cpp:1:9: error:" in reason
    wheel.unlink()
    done, wheel = hook(package, AO_WHEEL_PLATFORM=HERE)
    assert (done.returncode, wheel) == (1, None)
    assert "nonsense" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler was found (tried no-such-compiler)"),
        ({"CXX": "false"}, "false cannot compile C++20 for the instruction sets of "),
        ({"AO_WHEEL_PLATFORM": "any"}, "AO_WHEEL_PLATFORM=any asked for a wheel without it"),
    ],
)
def test_a_pure_wheel_says_why_it_is_one(package, variables, reason):
    done, wheel = hook(package, **variables)
    assert wheel.name == "ao_kernels-0.1.0-py3-none-any.whl", done.stderr
    held = contents(wheel)
    assert list(held) == [NOT_BUILT]
    assert held[NOT_BUILT].decode().startswith(reason)


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("win_amd64", "AO_WHEEL_PLATFORM=win_amd64: use the platform of a wheel, such as"),
        (HERE, "no C++ compiler was found"),
    ],
)
def test_what_was_asked_for_is_built_or_fails(package, tag, reason):
    done, wheel = hook(package, AO_WHEEL_PLATFORM=tag, CXX="no-such-compiler")
    assert (done.returncode, wheel) == (1, None)
    assert reason in " ".join(done.stderr.split())


@pytest.mark.slow
def test_an_editable_installation_builds_in_place_or_says_why_not(package):
    place = package / "src" / "ao_kernels" / "cpu"
    (place / "not_built.txt").write_text("an older reason")
    _, wheel = hook(package, "build_editable")
    with zipfile.ZipFile(wheel) as archive:
        (paths,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert str(package / "src") in archive.read(paths).decode().split("\n")
        assert LIBRARY not in archive.namelist()
    assert (place / "libao_cpu.so").read_bytes().startswith(b"\x7fELF")
    assert not (place / "not_built.txt").exists()

    (package / "csrc" / "cpu" / "a.cpp").write_text("int a = nonsense;\n")
    done, _ = hook(package, "build_editable")
    assert done.returncode == 1
    assert "error: ao_cpu does not compile or link" in done.stdout + done.stderr
    assert (place / "libao_cpu.so").exists()

    done, _ = hook(package, "build_editable", CXX="no-such-compiler")
    assert done.returncode == 0
    reason = "no C++ compiler was found (tried no-such-compiler)"
    assert (place / "not_built.txt").read_text() == f"{reason}\n"
    assert not (place / "libao_cpu.so").exists()


@pytest.fixture
def library(package):
    """Configure the library by a compiler, or build it; the flags of each source, by its name."""

    def commands(*options, **variables):
        done = subprocess.run(
            [sys.executable, str(package / "build_library.py"), *options],
            env=environment(**variables), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        listed = json.loads((package / "build" / "library" / "compile_commands.json").read_text())
        return {Path(each["file"]).stem: each["command"].split() for each in listed}

    return commands


@pytest.mark.slow
@pytest.mark.skipif(MACHINE != "x86_64", reason="instruction sets of x86")
def test_units_get_the_flags_of_their_instruction_set(package, library):
    knowing = script(package, "knows++", 'exec g++ "$@"')
    found = library(CXX=knowing)
    names = {"generic", "avx2", "avx2_vnni", "avx512_vnni", "avx512", "amx"}
    units = {f"isa_{name}" for name in names}
    assert set(found) == {"a", "b", "c", "cuda_images", *units}
    assert found["isa_generic"].index("-O2") > found["isa_generic"].index("-O3")
    assert {"-mavx2", "-mfma", "-mf16c"} <= set(found["isa_avx2"])
    assert {"-mavx2", "-mavxvnni"} <= set(found["isa_avx2_vnni"])
    assert set(found["isa_avx512"]) - set(found["isa_avx512_vnni"]) >= {
        "-mavx512vbmi",
        "-mavx512bf16",
    }
    assert {"-mavx512vnni", "-mamx-bf16"} <= set(found["isa_amx"])
    assert {"-DAO_UNIT_amx", "-DAO_UNIT_avx2_vnni"} <= set(found["b"])
    assert not any(flag.startswith("-mavx") for flag in (*found["a"], *found["c"]))
    assert "-DTORCH_TARGET_VERSION=0x20b000000000000" in found["c"]

    # another compiler is used at once, and a set that it does not know is left out
    lesser = script(package, "less++", 'case "$*" in *-mamx*) exit 1;; esac\nexec g++ "$@"')
    found = library(CXX=lesser)
    assert {name for name in found if name.startswith("isa_")} == units - {"isa_amx"}
    assert found["a"][0] == lesser
    assert "-DAO_UNIT_avx2_vnni" in found["a"]
    assert "-DAO_UNIT_amx" not in found["a"]


def test_an_older_compiler_without_the_extensions_is_passed_over(package):
    old = script(package, "g++", "! grep -q __builtin_shufflevector probe.cpp 2>/dev/null")
    for name in ("c++", "clang++"):
        shutil.copy(old, package.parent / name)
    path = f"{package.parent}{os.pathsep}{os.environ['PATH']}"
    _, wheel = hook(package, PATH=path)
    reason = contents(wheel)[NOT_BUILT].decode()
    assert reason.startswith("g++, c++, clang++ cannot compile C++20")


@pytest.fixture
def find_torch():
    spec = importlib.util.spec_from_file_location("find_torch", PACKAGE / "cmake" / "find_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_is_found_without_importing_it(find_torch, monkeypatch, capsys):
    # where pip installs: that of this environment, or of another one that it lies over
    place = Path(importlib.util.find_spec("torch").origin).parents[1]
    monkeypatch.setattr(find_torch.sysconfig, "get_path", lambda name: str(place))
    monkeypatch.setattr(find_torch.importlib.util, "find_spec", lambda name: None)
    assert find_torch.main() == ""
    home = Path(capsys.readouterr().out.strip())
    assert (home / "include" / "torch" / "csrc" / "stable" / "library.h").is_file()
    assert any((home / "lib").glob("libtorch_cpu.*"))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ((2, 10), "torch >= 2.11 was needed, found 2.10"),
        ((1, 13), "torch >= 2.11 was needed, found 1.13"),
        ((3, 0), ""),
        (None, "the headers of torch were not found: install torch first"),
    ],
)
def test_a_torch_that_is_old_or_missing_is_refused(
    find_torch, monkeypatch, tmp_path, version, reason
):
    monkeypatch.setattr(find_torch.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(find_torch.importlib.util, "find_spec", lambda name: None)
    place = tmp_path / "torch" / "include" / "torch" / "headeronly" / "version.h"
    if version:
        place.parent.mkdir(parents=True)
        major, minor = version
        text = f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
        place.write_text(text)
    assert find_torch.main() == reason
