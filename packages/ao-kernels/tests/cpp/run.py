"""Compiles and runs the C++ tests: `python run.py [--sanitize address,undefined] [doctest options]`.

They run once for each instruction set. `--compiler clang++` compiles them by another compiler than
the one found; with `--target aarch64` they are compiled by a cross compiler and run under qemu; with
`--lesser` the choice of the set is tested on emulated processors that have less than this one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PACKAGE))

from cpp_build import (  # noqa: E402
    CannotBuild,
    alone_in,
    chosen_target,
    compile_objects,
    is_clang,
    sanitizing,
)
from hatch_build import (  # noqa: E402
    FLAGS,
    ISA_FLAGS,
    OPTIONAL,
    cpu_sources,
    find_compiler,
    units_of,
)

#: the kind of this machine's processor
HERE = chosen_target().machine
#: exit status of the tests where AO_CPU_ISA cannot be obeyed
NOT_HERE = 77
#: sets that have all but some kernels from another one → the tests of those
OWN_TESTS = {
    "amx": "*test_linear.cpp,*test_ends.cpp,*test_isa.cpp",
    "avx2_vnni": "*test_linear.cpp,*test_ends.cpp,*test_words.cpp,*test_isa.cpp",
}
#: a set that has all but some kernels from another one → that one
BASES = {"amx": "avx512", "avx2_vnni": "avx2"}
#: what an x86 processor of qemu must be given
CHOICES = {"Nehalem": "generic", "Haswell": "avx2"}


def tool(name: str, package: str) -> str:
    """A program on PATH; ends with a sentence that says what to install where it is missing."""
    if shutil.which(name) is None:
        sys.exit(f"error: {name} is missing; on Debian it is in the package {package}")
    return name


def build(compiler: list[str], target: str, sanitize: str, sets: list[str], jobs: int) -> Path:
    """The test program for a kind of processor; the sanitizers watch those instruction sets."""
    kind = "clang" if is_clang(compiler) else ""
    parts = ["tests", target, kind, sanitize.replace(",", "-")]
    out = PACKAGE / "build" / "-".join(filter(None, parts))
    extra = sanitizing(sanitize, compiler)
    probe = subprocess.run(
        [*compiler, "-E", "-x", "c++", "-"], input="#include <doctest/doctest.h>",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode:
        sys.exit("error: doctest's header is missing; on Debian it is in the package doctest-dev")
    units = units_of(target, compiler, sanitize)
    tested = {
        name: flags for name, flags in units.items() if name in {*sets, *map(BASES.get, sets)}
    }
    sources = cpu_sources(tested)
    # the tests themselves are not watched: most of the time goes into what they compare with
    own = ("-fno-sanitize=all", "-O2") if sanitize else ()
    for path in sorted(PACKAGE.glob("tests/cpp/*.cpp")):
        # on_NAME.cpp: what runs on the instruction set NAME alone
        flags = units.get(path.stem.removeprefix("on_"), ())
        sources[path] = (*flags, *own)
    common = [*FLAGS, *extra, f"-I{PACKAGE / 'csrc' / 'cpu'}"]
    with alone_in(out):
        sources |= {
            no_kernels(out, name): () for name in units.keys() - tested if name not in OPTIONAL
        }
        try:
            objects = compile_objects(compiler, sources, common, out, jobs)
        except CannotBuild as problem:
            sys.exit(f"error: {problem}")
        link = [*compiler, *extra, *map(str, objects), "-pthread"]
        if target != HERE:
            link.append("-static")  # so that it needs no libraries of the other processor
        if subprocess.run([*link, "-o", str(out / "main")], check=False).returncode:
            sys.exit("error: the tests do not link")
    return out / "main"


def no_kernels(folder: Path, isa: str) -> Path:
    """A unit that is only to be linked: a set that is not tested takes as long to compile as one that is."""
    path = folder / f"isa_{isa}.cpp"
    lines = [
        '#include "isa.h"', "namespace ao {", f"extern const Isa isa_{isa};",
        f'const Isa isa_{isa} = [] {{ Isa isa{{}}; isa.name = "{isa}"; return isa; }}();', "}",
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def check_units(program: Path, sets: list[str]) -> int:
    """How many units export more than their table of kernels: the linker could take it for others."""
    wrong = 0
    for unit in sorted(program.parent.glob("*-isa_*.o")):
        if unit.stem.rpartition("isa_")[2] not in sets:
            continue
        listed = subprocess.run(
            [tool("nm", "binutils"), "--defined-only", "--extern-only", "--demangle", str(unit)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        names = [line.split(maxsplit=2)[2] for line in listed.stdout.splitlines()]
        if names != [f"ao::{unit.stem.rpartition('-')[2]}"]:
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


def check_choices(program: Path) -> int:
    """How many emulated processors are given the wrong set, or take one that they lack."""
    emulator = tool("qemu-x86_64", "qemu-user")
    wrong = 0
    for cpu, expected in CHOICES.items():
        command = [emulator, "-cpu", cpu, str(program), "--isa"]
        free = {key: value for key, value in os.environ.items() if key != "AO_CPU_ISA"}
        chosen = subprocess.run(command, env=free, capture_output=True, text=True, check=False)
        forced = subprocess.run(
            command,
            env={**free, "AO_CPU_ISA": "avx512"},
            capture_output=True,
            text=True,
            check=False,
        )
        found = chosen.stdout.strip()
        right = found == expected and forced.returncode == NOT_HERE
        right = right and "AO_CPU_ISA=avx512: this processor lacks it" in forced.stderr
        print(f"-- {cpu}: {found}, {'as it must be' if right else 'WRONG'}", flush=True)
        wrong += not right
    return wrong


def main() -> None:
    """Build and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", default="", help="such as address,undefined")
    parser.add_argument("--target", default=HERE, choices=sorted(ISA_FLAGS))
    parser.add_argument(
        "--sets", default="", help="instruction sets that are tested, a,b; default: all"
    )
    parser.add_argument("--compiler", default="", help="default: $CXX, or the first found")
    parser.add_argument(
        "--if-installed",
        action="store_true",
        help="say so and succeed where the compiler is missing",
    )
    parser.add_argument("--lesser", action="store_true", help="also on emulated x86 processors")
    parser.add_argument(
        "--jobs", type=int, default=1, help="compilers, or tests, that run at a time"
    )
    arguments, options = parser.parse_known_args()
    target: str = arguments.target
    if arguments.if_installed and shutil.which(arguments.compiler) is None:
        print(f"-- {arguments.compiler}\n   not run: it is not installed", flush=True)
        return
    if arguments.compiler and target == HERE:
        compiler, prefix = [tool(arguments.compiler, arguments.compiler.replace("++", ""))], []
    elif target == HERE:
        try:
            compiler, prefix = find_compiler(), []
        except CannotBuild as problem:
            sys.exit(f"error: {problem}")
    else:
        name = f"{target}-linux-gnu-g++"
        compiler = [tool(name, f"g++-{target.replace('_', '-')}-linux-gnu")]
        prefix = [tool(f"qemu-{target}", "qemu-user")]
    wanted = arguments.sets.split(",") if arguments.sets else ISA_FLAGS[target]
    sets = [isa for isa in ISA_FLAGS[target] if isa in wanted]
    program = build(compiler, target, arguments.sanitize, sets, arguments.jobs)
    command = [*prefix, str(program), *options]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        failed = sum(pool.map(lambda isa: run(command, isa), sets))
    if target == HERE and not arguments.sanitize:
        failed += check_units(program, sets)
    if arguments.lesser:
        failed += check_choices(program)
    sys.exit(failed)


if __name__ == "__main__":
    main()
