"""Compiles and runs the C++ tests: `python run.py [--sanitize address,undefined] [doctest options]`.

They run once for each instruction set. `--compiler "clang++ -stdlib=libc++"` compiles them by another
compiler than the one found; with `--target aarch64` they are compiled by a cross compiler and run under qemu;
with `--lesser` the choice of the set is tested on emulated processors that have less than this one.
CMakeLists.txt has the sets and how they are compiled.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PACKAGE))

from build_library import CannotBuild, DoesNotCompile, build  # noqa: E402

#: the kind of this machine's processor
HERE = {"amd64": "x86_64", "arm64": "aarch64"}.get(
    platform.machine().lower(), platform.machine().lower()
)
#: kinds of processors that the tests are compiled for
TARGETS = ("aarch64", "x86_64")
#: exit status of the tests where AO_CPU_ISA cannot be obeyed
NOT_HERE = 77
#: sets that have all but some kernels from another one → the tests of those
OWN_TESTS = {
    "amx": "*test_linear.cpp,*test_ends.cpp,*test_words.cpp,*test_expand.cpp,*test_isa.cpp",
    "avx2_vnni": "*test_linear.cpp,*test_ends.cpp,*test_words.cpp,*test_expand.cpp,*test_isa.cpp",
    "neon_dotprod": "*test_linear.cpp,*test_ends.cpp,*test_expand.cpp,*test_attend.cpp,*test_isa.cpp",
    "neon_i8mm": "*test_linear.cpp,*test_ends.cpp,*test_attend.cpp,*test_isa.cpp",
}
#: a set that has all but some kernels from another one → that one
BASES = {"amx": "avx512", "avx2_vnni": "avx2", "neon_dotprod": "neon", "neon_i8mm": "neon"}
#: tests that mean nothing under qemu: its own memory counts as that of the process, and grows as it runs
NOT_EMULATED = "memory for many rows is bounded"
#: what a processor of qemu must be given
CHOICES = {
    "x86_64": {"Nehalem": "generic", "Haswell": "avx2"},
    "aarch64": {"cortex-a72": "neon", "neoverse-n1": "neon_dotprod", "max": "neon_i8mm"},
}
#: a set that not all of these have
BEST = {"x86_64": "avx512", "aarch64": "neon_i8mm"}


def tool(name: str, package: str) -> str:
    """A program on PATH; ends with a sentence that says what to install where it is missing."""
    if shutil.which(name) is None:
        sys.exit(f"error: {name} is missing; on Debian it is in the package {package}")
    return name


def compile_tests(
    compiler: str, target: str, sanitize: str, wanted: list[str], jobs: int
) -> tuple[Path, list[str]]:
    """The test program for a kind of processor, and the wanted sets that it has; an empty list: all."""
    tested = {*wanted, *(BASES[each] for each in wanted if each in BASES)}
    settings = {
        "AO_LIBRARY": "OFF", "AO_SANITIZE": sanitize, "AO_SETS": ";".join(sorted(tested)),
    }  # fmt: skip
    if target != HERE:
        settings |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": target}
    kind = re.sub(r"[^a-z0-9]+", "-", f"{'' if target != HERE else compiler} {sanitize}")
    name = "-".join(filter(None, ["tests", target, *kind.strip("-").split("-")]))
    out = build(name, "ao_cpu_tests", settings, cxx=compiler, jobs=jobs)
    sets = (out / "sets.txt").read_text(encoding="utf-8").split()
    return out / "ao_cpu_tests", [isa for isa in sets if not wanted or isa in wanted]


def check_units(program: Path, sets: list[str]) -> int:
    """How many units export more than their table of kernels: the linker could take it for others."""
    wrong = 0
    for unit in sorted(program.parent.glob("CMakeFiles/ao_objects.dir/csrc/cpu/isa_*.o")):
        name = unit.name.partition(".")[0]
        if name.removeprefix("isa_") not in sets:
            continue
        listed = subprocess.run(
            [tool("nm", "binutils"), "--defined-only", "--extern-only", "--demangle", str(unit)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        names = [line.split(maxsplit=2)[2] for line in listed.stdout.splitlines()]
        if names != [f"ao::{name}"]:
            print(f"{unit.name} exports {', '.join(names)}", flush=True)
            wrong += 1
    return wrong


def run(command: list[str], isa: str) -> int:
    """Run the tests with one instruction set; 1 where they fail."""
    env = {**os.environ, "AO_CPU_ISA": isa}
    if isa in OWN_TESTS:
        command = [*command, f"--source-file={OWN_TESTS[isa]}"]
    done = subprocess.run(
        command, env=env, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lacking = done.returncode == NOT_HERE
    print(
        f"-- {isa}\n{'   not run: this machine lacks it' if lacking else done.stdout}", flush=True
    )
    return int(done.returncode not in (0, NOT_HERE))


def check_choices(program: Path, target: str) -> int:
    """How many emulated processors are given the wrong set, or take one that they lack."""
    emulator, best = tool(f"qemu-{target}", "qemu-user"), BEST[target]
    wrong = 0
    for cpu, expected in CHOICES[target].items():
        command = [emulator, "-cpu", cpu, str(program), "--isa"]
        free = {key: value for key, value in os.environ.items() if key != "AO_CPU_ISA"}
        chosen = subprocess.run(command, env=free, capture_output=True, text=True, check=False)
        forced = subprocess.run(
            command,
            env={**free, "AO_CPU_ISA": best},
            capture_output=True,
            text=True,
            check=False,
        )
        found = chosen.stdout.strip()
        refused = f"AO_CPU_ISA={best}: this processor lacks it" in forced.stderr
        right = found == expected and refused == (expected != best)
        right = right and forced.returncode == (NOT_HERE if refused else 0)
        print(f"-- {cpu}: {found}, {'as it must be' if right else 'WRONG'}", flush=True)
        wrong += not right
    return wrong


def main() -> None:
    """Build and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", default="", help="such as address,undefined")
    parser.add_argument("--target", default=HERE, choices=TARGETS)
    parser.add_argument(
        "--sets", default="", help="instruction sets that are tested, a,b; default: all"
    )
    parser.add_argument("--compiler", default="", help="default: $CXX, or the first found")
    parser.add_argument(
        "--if-installed",
        action="store_true",
        help="say so and succeed where the compiler is missing",
    )
    parser.add_argument("--lesser", action="store_true", help="also on emulated processors")
    parser.add_argument(
        "--jobs", type=int, default=1, help="compilers, or tests, that run at a time"
    )
    arguments, options = parser.parse_known_args()
    target, compiler, prefix = arguments.target, arguments.compiler, []
    if compiler:
        name = shlex.split(compiler)[0]
        if arguments.if_installed and shutil.which(name) is None:
            print(f"-- {compiler}\n   not run: it is not installed", flush=True)
            return
        tool(name, name.replace("++", ""))
    if target != HERE:
        compiler = compiler or tool(
            f"{target}-linux-gnu-g++", f"g++-{target.replace('_', '-')}-linux-gnu"
        )
        prefix = [tool(f"qemu-{target}", "qemu-user")]
        options = [*options, f"--test-case-exclude={NOT_EMULATED}"]
    wanted = arguments.sets.split(",") if arguments.sets else []
    try:
        program, sets = compile_tests(compiler, target, arguments.sanitize, wanted, arguments.jobs)
    except CannotBuild as problem:
        if isinstance(problem, DoesNotCompile) or not arguments.if_installed:
            sys.exit(f"error: {problem}")
        print(f"-- {compiler}\n   not run: {problem}", flush=True)  # a library of it is missing
        return
    command = [*prefix, str(program), *options]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        failed = sum(pool.map(lambda isa: run(command, isa), sets))
    if target == HERE and not arguments.sanitize:
        failed += check_units(program, sets)
    if arguments.lesser:
        failed += check_choices(program, target)
    sys.exit(failed)


if __name__ == "__main__":
    main()
