"""What the installed library needs and exports, as binutils read it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ao_kernels.cpu import library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the format of Linux")


def read(*command):
    return subprocess.run(
        [*command, str(library.library_path())], capture_output=True, text=True, check=True
    ).stdout


def symbols(kind):
    """Names of dynamic symbols, without their versions; `kind` is an option of nm."""
    lines = read("nm", "-D", kind).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def test_it_needs_torch_and_the_runtime_of_the_compiler_only():
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", read("readelf", "-d")))
    assert "libtorch_cpu.so" in needed
    runtime = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0"}
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed <= {"libtorch_cpu.so", *runtime, *loader}


def test_it_remembers_no_place_of_the_machine_that_built_it():
    dynamic = read("readelf", "-d")
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    strings = set(re.findall(rb"[\x20-\x7e]{6,}", library.library_path().read_bytes()))
    places = {line for line in strings if re.match(rb"/(?!usr/|lib)[\w.-]+/", line)}
    assert places == set()


def test_it_uses_the_stable_abi_of_torch_only():
    undefined = symbols("--undefined-only")
    assert "torch_parallel_for" in undefined
    assert [name for name in undefined if re.search(r"(2at|3c10|5torch)\d", name)] == []
    assert [name for name in undefined if name.startswith(("Py", "_Py"))] == []
    assert [name for name in undefined if name.startswith(("GOMP", "omp_", "__kmp"))] == []


def test_it_exports_nothing():
    assert symbols("--defined-only") == set()
