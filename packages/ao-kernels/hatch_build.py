"""Builds the C++ library of ao-kernels: the build hook of hatchling, and a command for developers.

`python hatch_build.py` rebuilds what changed, in place. As a hook it compiles the library into the
wheel; where that is impossible (no C++20 compiler, no headers of torch, a compiler that fails) the
wheel is a pure one that holds the reason, because installing must succeed: ao-core's kernels serve
then. An editable installation is a developer's, to whom a compiler that fails is an error. So it is where
AO_WHEEL_PLATFORM names the platform of a wheel (cpp_build.py).

Sources are found by place: csrc/cpu/**/*.cpp is plain C++, csrc/torch/*.cpp binds it to torch's
stable ABI. A file isa_NAME.cpp gets the flags of the instruction set NAME, and is left out on
processors of another kind. csrc/cuda/*.cpp launches the CUDA kernels, which are compiled into the
library where nvcc is installed (cuda_build.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
sys.path.append(str(ROOT))
import cuda_build  # noqa: E402
from cpp_build import (  # noqa: E402
    MACOS,
    PLATFORM,
    CannotBuild,
    DoesNotCompile,
    Target,
    alone_in,
    chosen_target,
    compile_objects,
    sanitizing,
)

IN_PLACE = ROOT / "src" / "ao_kernels" / "cpu"
LIBRARY = "libao_cpu.so"
#: holds the reason why there is no library beside it
NOT_BUILT = "not_built.txt"

#: the oldest torch whose stable ABI the library uses, as torch encodes it: 2.11
TARGET_VERSION = 0x020B000000000000
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra"),
    # nobody looks at the flags of floating-point exceptions, for whose sake gcc vectorizes no loop with a
    # choice between two numbers; results stay the same, and it is clang's default
    "-fno-trapping-math",
)
# gcc 12 takes the undefined registers in its own intrinsics for uninitialized variables; clang does not
# know all of these options
_QUIET = ("-Wno-uninitialized", "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512_VNNI = (*(f"-mavx512{each}" for each in ("f", "bw", "vl", "dq", "vnni")), "-mfma", "-mf16c")
_AVX512 = (*_AVX512_VNNI, "-mavx512vbmi", "-mavx512bf16")
ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "generic": ("-O2",),  # -O3 makes loops over four registers twice as much code
        "avx2": (*_AVX2, *_QUIET),
        "avx2_vnni": (*_AVX2, "-mavxvnni", *_QUIET),
        "avx512_vnni": (*_AVX512_VNNI, *_QUIET),
        "avx512": (*_AVX512, *_QUIET),
        "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8", *_QUIET),
    },
    "aarch64": {"generic": ("-O2",), "neon": ()},
}
#: sets that the library does without where the compiler does not know their flags
OPTIONAL = ("avx2_vnni", "amx")


class Torch(NamedTuple):
    """Where torch's headers and libraries lie."""

    include: Path
    lib: Path


def find_compiler() -> list[str]:
    """The command of a C++20 compiler that knows every instruction set needed: $CXX, or the first found.

    Raises:
        CannotBuild: there is none.
    """
    wanted = chosen_target()
    if wanted.system == "win32":
        raise CannotBuild("it is not built for Windows yet")
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["g++"], ["c++"], ["clang++"]]
    found = [command for command in candidates if shutil.which(command[0])]
    if not found:
        tried = ", ".join(command[0] for command in candidates)
        raise CannotBuild(f"no C++ compiler was found (tried {tried})")
    units = ISA_FLAGS.get(wanted.machine, {})
    flags = [flag for name, unit in units.items() if name not in OPTIONAL for flag in unit]
    for command in found:
        if _compiles(command, flags):
            return command
    names = ", ".join(shlex.join(command) for command in found)
    raise CannotBuild(f"{names} cannot compile C++20 for the instruction sets of {wanted.machine}")


#: C++20 with the extensions that the sources use: those of g++ from 12 on, and of clang++ from 14 on
_PROBE = """
#include <bit>
#include <concepts>
typedef int Lanes __attribute__((vector_size(16)));
Lanes swapped(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
int main() { return std::bit_width(0u); }
"""


def _compiles(compiler: list[str], flags: Iterable[str]) -> bool:
    """Does a compiler know C++20 and the flags?"""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROBE, encoding="utf-8")
        probe = [*compiler, "-std=c++20", *flags, "-c", str(source), "-o", f"{source}.o"]
        return subprocess.run(probe, capture_output=True).returncode == 0


def units_of(machine: str, compiler: list[str], sanitize: str = "") -> dict[str, tuple[str, ...]]:
    """The instruction sets of a kind of processor that a compiler knows, with their flags.

    Under sanitizers, whose own flags choose a level of optimization, without one.
    """
    units = ISA_FLAGS.get(machine, {"generic": ()})
    return {
        name: tuple(flag for flag in flags if not (sanitize and flag.startswith("-O")))
        for name, flags in units.items()
        if name not in OPTIONAL or _compiles(compiler, flags)
    }


def find_torch() -> Torch:
    """Torch's headers and libraries, found without importing it.

    In an isolated build torch cannot be imported, but pip runs it with the Python of the
    environment that it installs into, so that the torch installed there is found too.

    Raises:
        CannotBuild: there is no torch, or it is too old.
    """
    spec = importlib.util.find_spec("torch")
    homes = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    homes += [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    for home in homes:
        version = home / "include" / "torch" / "headeronly" / "version.h"
        if not version.is_file():
            continue
        text = version.read_text(encoding="utf-8")
        found = [
            re.search(rf"define TORCH_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR")
        ]
        numbers = tuple(int(match[1]) for match in found if match)
        if numbers < (2, 11):
            raise CannotBuild(f"torch >= 2.11 was needed, found {'.'.join(map(str, numbers))}")
        return Torch(home / "include", home / "lib")
    raise CannotBuild("the headers of torch were not found: install torch first")


def cpu_sources(units: dict[str, tuple[str, ...]]) -> dict[Path, tuple[str, ...]]:
    """The plain C++ sources for some instruction sets, each with flags of its own.

    Those of no set are told by AO_UNIT_NAME which optional sets there are.
    """
    told = tuple(f"-DAO_UNIT_{name}" for name in units if name in OPTIONAL)
    found = {}
    for path in sorted(ROOT.glob("csrc/cpu/**/*.cpp")):
        isa = path.stem.removeprefix("isa_") if path.stem.startswith("isa_") else None
        if isa is None:
            found[path] = told
        elif isa in units:
            found[path] = units[isa]
    return found


def build_library(target: Path, *, sanitize: str = "", strip: bool = False, jobs: int = 1) -> None:
    """Compile and link the library into the file `target`.

    Raises:
        CannotBuild: the machine lacks a compiler or torch, or the sources do not compile or link.
    """
    compiler, torch, machine = find_compiler(), find_torch(), chosen_target()
    kind = machine.tag if machine.asked else ""
    out = ROOT / "build" / "-".join(filter(None, ["library", kind, sanitize.replace(",", "-")]))
    with alone_in(out):
        _build_library(compiler, torch, machine, target, out, sanitize, strip, jobs)


def _build_library(
    compiler: list[str],
    torch: Torch,
    machine: Target,
    target: Path,
    out: Path,
    sanitize: str,
    strip: bool,
    jobs: int,
) -> None:
    extra = sanitizing(sanitize, compiler)
    if machine.system == "darwin":
        extra.append(f"-mmacosx-version-min={MACOS}")
    common = [*FLAGS, *extra, f"-I{ROOT / 'csrc' / 'cpu'}", f"-I{ROOT / 'csrc'}"]
    binding = [
        *(f"-DTORCH_TARGET_VERSION={TARGET_VERSION:#x}", f"-I{ROOT / 'csrc' / 'torch'}"),
        *("-isystem", str(torch.include)),
        # messages and registrations name files: without the places of the machine that built them
        *(f"-ffile-prefix-map={ROOT}/=", f"-ffile-prefix-map={torch.include}/="),
    ]
    sources = cpu_sources(units_of(machine.machine, compiler, sanitize))
    sources |= {path: tuple(binding) for path in sorted(ROOT.glob("csrc/torch/*.cpp"))}
    try:
        images = cuda_build.write_source(out, jobs)
    except cuda_build.DoesNotCompile as problem:
        raise DoesNotCompile(str(problem)) from None
    sources |= dict.fromkeys([*sorted(ROOT.glob("csrc/cuda/*.cpp")), images], ())
    objects = compile_objects(compiler, sources, common, out, jobs)
    link = [*compiler, "-shared", "-pthread", *extra, *map(str, objects)]
    link.append(f"-L{_stand_in(compiler, machine, out) if machine.foreign else torch.lib}")
    if machine.system == "darwin":
        # zig's linker knows no lists of symbols; all are hidden without it but those of libc++
        alone = ["-Wl,-exported_symbols_list,/dev/null"]
        link += ["-ltorch_cpu", f"-Wl,-install_name,@rpath/{LIBRARY}"]
        link += ["-Wl,-undefined,dynamic_lookup"] if machine.foreign else alone
        link += ["-Wl,-S", "-Wl,-x"] if strip else []
    else:
        # it registers itself when it is loaded, and nobody calls it by name: nothing is exported
        exports = out / "exports.map"
        exports.write_text("{ local: *; };\n", encoding="utf-8")
        link += ["-Wl,--no-as-needed", "-ltorch_cpu", f"-Wl,--version-script={exports}"]
        link += [] if sanitize or machine.foreign else ["-Wl,-z,defs"]
        link += ["-Wl,-s"] if strip else []
    linked = out / LIBRARY
    if subprocess.run([*link, "-o", str(linked)]).returncode:
        raise DoesNotCompile(f"{shlex.join(compiler)} does not link the library")
    target.parent.mkdir(parents=True, exist_ok=True)
    # a new file in one step: processes that have the old one loaded keep it
    fresh = target.with_suffix(".new")
    shutil.copyfile(linked, fresh)
    os.replace(fresh, target)


def _stand_in(compiler: list[str], machine: Target, out: Path) -> Path:
    """A folder with an empty libtorch_cpu for another machine: only its name is put into the library."""
    folder, empty = out / "torch", out / "torch" / "empty.cpp"
    folder.mkdir(exist_ok=True)
    empty.write_text("", encoding="utf-8")
    if machine.system == "darwin":
        name, named = "libtorch_cpu.dylib", "-Wl,-install_name,@rpath/libtorch_cpu.dylib"
    else:
        name, named = "libtorch_cpu.so", "-Wl,-soname,libtorch_cpu.so"
    command = [*compiler, "-shared", named, str(empty), "-o", str(folder / name)]
    if subprocess.run(command).returncode:
        raise DoesNotCompile(f"{shlex.join(compiler)} does not link a library for {machine.tag}")
    return folder


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library, or the reason why there is none, into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before hatchling gathers files; an editable installation builds in place."""
        editable = version == "editable"
        folder = IN_PLACE if editable else ROOT / "build" / "wheel"
        library, reason = folder / LIBRARY, folder / NOT_BUILT
        folder.mkdir(parents=True, exist_ok=True)
        jobs = os.cpu_count() or 1
        try:
            build_library(library, strip=not editable, jobs=jobs)
        except CannotBuild as problem:
            asked = os.environ.get(PLATFORM, "any") != "any"
            if asked or (editable and isinstance(problem, DoesNotCompile)):
                sys.exit(f"error: {problem}")
            library.unlink(missing_ok=True)
            reason.write_text(f"{problem}\n", encoding="utf-8")
            self.app.display_warning(f"ao-kernels without its C++ library: {problem}")
        else:
            reason.unlink(missing_ok=True)
        if editable:
            return
        if library.exists():
            # no symbol of CPython is used: any Python will do
            build_data["tag"] = f"py3-none-{chosen_target().tag}"
            build_data["pure_python"] = False
        content = library if library.exists() else reason
        build_data["force_include"][str(content)] = f"ao_kernels/cpu/{content.name}"


def main() -> None:
    """Build in place, or with sanitizers into build/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", default="", help="such as address,undefined")
    parser.add_argument("--jobs", type=int, default=1, help="compilers that run at a time")
    arguments = parser.parse_args()
    target = IN_PLACE / LIBRARY
    if arguments.sanitize:
        target = ROOT / "build" / f"sanitize-{arguments.sanitize.replace(',', '-')}" / LIBRARY
    try:
        build_library(target, sanitize=arguments.sanitize, jobs=arguments.jobs)
    except CannotBuild as problem:
        sys.exit(f"error: {problem}")
    if not arguments.sanitize:
        (IN_PLACE / NOT_BUILT).unlink(missing_ok=True)
    print(target)


if __name__ == "__main__":
    main()
