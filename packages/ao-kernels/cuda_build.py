"""Compiles the CUDA kernels without a GPU, by the nvcc of PyPI's package `nvidia-cuda-nvcc` and others.

`python cuda_build.py` compiles what changed for all devices, and prints the sizes. A build of the C++ library
does so too where nvcc is installed in its Python, by `--source FILE`, and puts the kernels into the library.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
OUT = ROOT / "build" / "cuda"


class Storage(NamedTuple):
    """A way to store weights: what `linear.cu` is compiled with."""

    codes: str
    plane: int
    sums: bool


#: in the order of `Storage` in csrc/cuda/driver.h
STORAGES = {
    "int4": Storage("Int4", 64, False),
    "int4_g32": Storage("Int4", 32, False),
    "int4_sums": Storage("Int4", 64, True),
    "int4_g32_sums": Storage("Int4", 32, True),
    "int8": Storage("Int8", 64, False),
    "f8e4m3": Storage("E4m3", 64, False),
}
#: devices whose code is in the library: sm_80 serves 8.x, sm_90 Hopper, sm_100 10.x. Nothing in it is of one
#: architecture alone (90a, 100f), so that later devices can compile the PTX for themselves
TARGETS = ("sm_80", "sm_90", "sm_100")
PTX = "compute_90"
#: what the kernels are made of
SOURCES = ("linear.cu", "linear.h", "decode.h", "machine.h", "params.h")
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Werror", "all-warnings")


class DoesNotCompile(Exception):
    """The CUDA compiler refused the sources; it has printed why."""


def find_nvcc() -> Path | None:
    """The compiler of the wheels in this Python, or None."""
    spec = importlib.util.find_spec("nvidia")
    for home in (spec and spec.submodule_search_locations) or ():
        for nvcc in sorted(Path(home).glob("cu*/bin/nvcc")):
            return nvcc
    return None


def compile_to(
    nvcc: Path,
    target: Path,
    storage: Storage,
    options: tuple[str, ...],
    case: str = "",
    rows: int = 0,
) -> str:
    """Compile the kernels of a way to store weights; what the assembler tells of each (`-Xptxas -v`).

    `case` makes parameters of a launch constants, in C++ statements; with `rows`, only those kernels
    are made.

    Raises:
        DoesNotCompile: the compiler found errors.
    """
    defines = [
        f"-DAO_CODES={storage.codes}",
        f"-DAO_PLANE={storage.plane}",
        f"-DAO_SUMS={str(storage.sums).lower()}",
    ]
    defines += [f"-DAO_CASE={case}"] if case else []
    defines += [f"-DAO_ROWS={rows}"] if rows else []
    command = [
        str(nvcc),
        *FLAGS,
        *defines,
        *options,
        "-Xptxas",
        "-v",
        str(ROOT / "csrc/cuda/linear.cu"),
    ]
    stamp, told = target.with_suffix(".stamp"), target.with_suffix(".txt")
    text = _digest(command)
    if not (target.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == text):
        target.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        done = subprocess.run(
            [*command, "-o", str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
            raise DoesNotCompile(f"nvcc does not compile {target.name}")
        told.write_text(done.stderr, encoding="utf-8")
        stamp.write_text(text, encoding="utf-8")
    return told.read_text(encoding="utf-8")


def _digest(command: list[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    for name in SOURCES:
        digest.update((ROOT / "csrc" / "cuda" / name).read_bytes())
    return digest.hexdigest()


def build_images(nvcc: Path, jobs: int, targets: tuple[str, ...] = TARGETS) -> dict[str, Path]:
    """Each way's kernels for all devices in a file, compressed.

    Raises:
        DoesNotCompile: the compiler found errors.
    """
    options = ["-fatbin", "--compress-mode=size"]
    for name in targets:
        options += ["-gencode", f"arch={name.replace('sm', 'compute')},code={name}"]
    options += ["-gencode", f"arch={PTX},code={PTX}"]
    made = {name: OUT / f"{name}.fatbin" for name in STORAGES}
    with ThreadPoolExecutor(jobs) as pool:
        list(
            pool.map(
                lambda name: compile_to(nvcc, made[name], STORAGES[name], tuple(options)), made
            )
        )
    return made


def embedding(images: dict[str, Path]) -> str:
    """C++ that holds the files, as `driver.h` declares them."""
    lines = ['#include "cuda/driver.h"', ""]
    for name, path in images.items():
        lines += [
            f"// {hashlib.sha256(path.read_bytes()).hexdigest()}",
            f'__asm__(".section .rodata\\n.balign 64\\nao_image_{name}:\\n.incbin \\"{path}\\"\\n"',
            '        ".previous\\n");',
            f'extern "C" __attribute__((visibility("hidden"))) const char ao_image_{name}[];',
        ]
    entries = [
        f'    {{"{name}", ao_image_{name}, {path.stat().st_size}}},'
        for name, path in images.items()
    ]
    entries = entries or ["    {nullptr, nullptr, 0},"]
    count = f"const int image_count = {len(images)};"
    return "\n".join(
        [*lines, "namespace ao::gpu {", "const Image images[] = {", *entries, "};", count, "}", ""]
    )


def write_source(source: Path, jobs: int) -> None:
    """A C++ source that holds the kernels: none where no nvcc is installed.

    Raises:
        DoesNotCompile: the CUDA compiler found errors.
    """
    nvcc = find_nvcc() if sys.platform == "linux" else None
    text = embedding(build_images(nvcc, jobs) if nvcc else {})
    if not source.exists() or source.read_text(encoding="utf-8") != text:
        source.write_text(text, encoding="utf-8")


def main() -> None:
    """Compile, and tell the sizes; or write the source of the C++ library that holds the kernels."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers that run at a time"
    )
    parser.add_argument("--source", type=Path, help="C++ with the kernels, or with none of them")
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None and arguments.source is None:
        sys.exit("error: there is no nvcc: install the group nvcc of the root pyproject.toml")
    try:
        if nvcc is None or arguments.source is not None:
            write_source(arguments.source, arguments.jobs)
            return
        images = build_images(nvcc, arguments.jobs)
    except DoesNotCompile as problem:
        sys.exit(f"error: {problem}")
    for path in images.values():
        sys.stdout.write(f"{path} {path.stat().st_size}\n")


if __name__ == "__main__":
    main()
