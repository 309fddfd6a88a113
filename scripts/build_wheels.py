"""Wheels of ao-kernels for every platform, compiled by zig, checked, and tried where this machine runs them.

`python scripts/build_wheels.py [--json FILE] [--platforms A,B] [--pythons A,B]` writes them into dist/wheels.
zig compiles for other processors and for older systems than this one, with the libraries of those. Linux
wheels are checked by auditwheel. Each is installed into an empty folder and used without a compiler, by this
Python where it can, and by the others that are named: of environments with another torch, or of another
processor, as `python scripts/make_sysroot.py` prepares one.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).parent))
from benchmarking import Row, arguments, record
from check_dist import library_problems, wheel_problems
from workspace import ROOT, finish

PACKAGE = ROOT / "packages" / "ao-kernels"
OUT = ROOT / "dist" / "wheels"
LIBRARY = "ao_kernels/cpu/libao_cpu.so"
PURE = "any"
#: platform of a wheel -> what zig calls it; it knows AVX-512 without vectors of 512 bits, unless it is told
TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28 -mevex512",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
}
#: instruction sets that a library may hold
SETS = (
    *("generic", "neon", "neon_dotprod", "neon_i8mm"),
    *("avx2", "avx2_vnni", "avx512_vnni", "avx512", "amx"),
)
#: libraries that each system has, and torch's; all else must be in the library
_ALLOWED = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux-.*|libtorch_cpu\.so|libSystem\..*")
_ABOUT = "import platform as p, torch; print(p.machine(), p.python_version(), torch.__version__)"
_TRY = """
import sys, torch
from ao_core import quantize_
from ao_quant import Int4WeightOnlyConfig
import ao_kernels
from ao_kernels.cpu import library
assert ao_kernels.__file__.startswith(sys.argv[1]), ao_kernels.__file__
layer = torch.nn.Linear(192, 64, dtype=torch.bfloat16)
x = torch.randn(3, 192, dtype=torch.bfloat16)
quantize_(layer, Int4WeightOnlyConfig(64))
error = (layer(x) - torch.nn.functional.linear(x, layer.weight.dequantize(), layer.bias)).abs().max()
assert error < 0.1, error
print("kernels of ao-core" if library.unavailable() else library.isa())
"""

TEXT = """\
`nox -s wheels` compiles them by zig {zig} (clang and libc++, linked statically), on any machine. *sets*:
instruction sets in the library, of which the best one that a processor has is used; *needs*: shared libraries
of the system and of torch, on Linux; *glibc*: the oldest that has all symbols, as auditwheel lists them;
*used*: the instruction set, or whose kernels, in processes without a compiler after the wheel was installed;
those of ARM are emulated by qemu."""


def module(name: str, *arguments: str | Path) -> list[str]:
    """The command that runs a module of this Python."""
    return [sys.executable, "-m", name, *map(str, arguments)]


def build(platform: str) -> Path:
    """One wheel."""
    folder = OUT / platform
    for old in folder.glob("*.whl"):
        old.unlink()
    env = {**os.environ, "AO_WHEEL_PLATFORM": platform}
    if platform != PURE:
        env["CXX"] = f"{sys.executable} -m ziglang c++ -target {TARGETS[platform]}"
    options = "--wheel", "--no-isolation", "--outdir"
    subprocess.run(module("build", *options, folder, PACKAGE), check=True, env=env)
    (wheel,) = folder.glob("*.whl")
    return wheel


def library_of(wheel: Path) -> bytes | None:
    """The compiled library of a wheel, or None."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(LIBRARY) if LIBRARY in archive.namelist() else None


def needed(library: bytes) -> list[str] | None:
    """The shared libraries that a library needs; None: it is of another system than Linux."""
    if not library.startswith(b"\x7fELF"):
        return None
    dynamic: Any = ELFFile(BytesIO(library)).get_section_by_name(".dynamic")
    return [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


def audited(wheel: Path) -> tuple[int, int]:
    """The newest version of glibc that auditwheel finds symbols of."""
    done = subprocess.run(
        module("auditwheel", "show", wheel), check=True, capture_output=True, text=True
    )
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", done.stdout)
    return max((int(major), int(minor)) for major, minor in versions)


def about(python: str) -> list[str]:
    """The kind of processor of a Python, its version, and that of its torch."""
    command = [*shlex.split(python), "-c", _ABOUT]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@functools.cache
def siblings() -> list[Path]:
    """Wheels of the packages that the trial needs."""
    for name in ("ao-core", "ao-quant"):
        options = "--wheel", "--no-isolation", "--outdir"
        package = ROOT / "packages" / name
        subprocess.run(module("build", *options, OUT / "siblings", package), check=True)
    return sorted((OUT / "siblings").glob("*.whl"))


def used(wheel: Path, platform: str, python: str) -> str:
    """The instruction set that a process without a compiler uses, or whose kernels instead."""
    _, version, torch = about(python)
    place, (major, minor, _) = wheel.parent / f"installed-{version}", version.split(".")
    wanted: list[str | Path] = [
        "-q",
        "--no-deps",
        "--upgrade",
        "--target",
        place,
        "--only-binary=:all:",
    ]
    wanted += ["--python-version", f"{major}.{minor}"]
    wanted += [] if platform == PURE else ["--platform", platform]
    # plugins are found by what pip writes down of a package
    subprocess.run(module("pip", "install", *wanted, wheel, *siblings()), check=True)
    env = {
        **os.environ,
        "PATH": str(Path(sys.executable).parent),
        "PYTHONPATH": str(place),
    }
    program, *options = shlex.split(python)
    command = [shutil.which(program) or program, *options, "-c", _TRY, str(place)]
    done = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True)
    return f"{done.stdout.strip()} (Python {major}.{minor}, torch {torch.partition('+')[0]})"


def row_of(platform: str, wheel: Path, pythons: list[str]) -> tuple[Row, list[str]]:
    """A line of the table, and what is wrong with a wheel; the Pythons that can run it use it."""
    problems = wheel_problems(wheel)
    library = library_of(wheel)
    if platform != PURE:
        problems += library_problems(wheel)
    elif library is not None:
        problems.append("it holds a library")
    if library and str(ROOT).encode() in library:
        problems.append("its library names folders of the machine that built it")
    libraries = needed(library) if library else None
    problems += [
        f"it needs {name}, which a system may lack"
        for name in libraries or ()
        if not _ALLOWED.fullmatch(name)
    ]
    glibc = audited(wheel) if platform.startswith("manylinux") else None
    if glibc and glibc > (2, 28):
        problems.append(f"it needs glibc {glibc[0]}.{glibc[1]}")
    sets = [name for name in SETS if library and f"\0{name}\0".encode() in library]
    running = [
        python for python in pythons if platform in (PURE, f"manylinux_2_28_{about(python)[0]}")
    ]
    return {
        "wheel": "-".join(wheel.stem.split("-")[2:]),
        "MB": wheel.stat().st_size / 1e6,
        "sets": ", ".join(sets),
        "needs": ", ".join(libraries or ()),
        "glibc": f"{glibc[0]}.{glibc[1]}" if glibc else "",
        "used": "; ".join(used(wheel, platform, python) for python in running),
    }, [f"{wheel.name}: {problem}" for problem in problems]


def main() -> int:
    """Build and check all of them, or those named."""
    args = arguments(__doc__, platforms=",".join([*TARGETS, PURE]), pythons="")
    pythons = [sys.executable, *filter(None, args.pythons.split(","))]
    version = subprocess.run(
        module("ziglang", "version"), check=True, capture_output=True, text=True
    ).stdout.strip()
    rows, problems = [], []
    for platform in args.platforms.split(","):
        row, wrong = row_of(platform, build(platform), pythons)
        rows.append(row)
        problems += wrong
    record(args.json, "Wheels of ao-kernels", TEXT.format(zig=version), rows)
    return finish(problems, f"{len(rows)} wheels")


if __name__ == "__main__":
    sys.exit(main())
