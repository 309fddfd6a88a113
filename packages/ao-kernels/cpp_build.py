"""Compiles C++ for the build hook and for tests: what changed, for this machine or for that of a wheel.

AO_WHEEL_PLATFORM names the platform of a wheel, such as manylinux_2_28_aarch64, where `$CXX` is a
compiler for it; "any" asks for a pure wheel. Without it the library is for the machine that compiles.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent
#: the environment variable with the platform of a wheel
PLATFORM = "AO_WHEEL_PLATFORM"
#: the oldest macOS that a library is compiled for
MACOS = "11.0"
#: other names of the same processors
ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


class CannotBuild(Exception):
    """The machine lacks something; the text, a sentence without its end, says what."""


class DoesNotCompile(CannotBuild):
    """The compiler was found, and refused the sources."""


class Target(NamedTuple):
    """What is compiled for."""

    #: as `sys.platform` has it
    system: str
    #: the kind of processor: x86_64, aarch64
    machine: str
    #: the platform of a wheel with the library, such as linux_x86_64
    tag: str
    #: whether AO_WHEEL_PLATFORM asked for it
    asked: bool = False

    @property
    def foreign(self) -> bool:
        """Whether another machine runs it than the one that compiles."""
        return (self.system, self.machine) != (sys.platform, _here())


def chosen_target() -> Target:
    """The platform that AO_WHEEL_PLATFORM names, or this machine.

    Raises:
        CannotBuild: it asks for a wheel without the library.
        DoesNotCompile: it names a platform that nothing is compiled for.
    """
    if wanted := os.environ.get(PLATFORM):
        return _named(wanted)
    tag = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if sys.platform == "darwin":
        # a universal Python is of two processors, the library of this one only
        tag = f"macosx_{MACOS.replace('.', '_')}_{platform.machine()}"
    return Target(sys.platform, _here(), tag)


def _here() -> str:
    name = platform.machine().lower()
    return ALIASES.get(name, name)


def _named(tag: str) -> Target:
    if tag == "any":
        raise CannotBuild(f"{PLATFORM}=any asked for a wheel without it")
    found = re.fullmatch(r"(linux|manylinux\w*|macosx)_(?:\d+_\d+_)?(x86_64|aarch64|arm64)", tag)
    if found is None:
        raise DoesNotCompile(
            f"{PLATFORM}={tag}: use the platform of a wheel, such as manylinux_2_28_x86_64, "
            "macosx_11_0_arm64 or any"
        )
    system = "darwin" if found[1] == "macosx" else "linux"
    return Target(system, ALIASES.get(found[2], found[2]), tag, asked=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and wait until no other process builds there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_objects(
    compiler: list[str],
    sources: dict[Path, tuple[str, ...]],
    flags: list[str],
    out: Path,
    jobs: int,
) -> list[Path]:
    """Compile what changed since the last time into `out`; the objects.

    Raises:
        DoesNotCompile: the compiler found errors; it has printed them.
    """
    work = []
    # what a unit includes may depend on which headers there are
    headers = " ".join(sorted(path.name for path in ROOT.glob("csrc/**/*.h")))
    for source, own in sources.items():
        place = source.relative_to(ROOT).with_suffix("").as_posix().replace("/", "-")
        command = [*compiler, *flags, *own, "-MMD", "-c", str(source), "-o"]
        work.append((out / f"{place}.o", [*command, str(out / f"{place}.o")]))
    with ThreadPoolExecutor(jobs) as pool:
        failed = [
            problem
            for problem in pool.map(lambda unit: _compile(unit[0], unit[1], headers), work)
            if problem
        ]
    if failed:
        raise DoesNotCompile(
            f"{shlex.join(compiler)} does not compile {len(failed)} of {len(work)} files ({failed[0]})"
        )
    return [target for target, _ in work]


def _compile(target: Path, command: list[str], headers: str) -> str:
    """Run a compiler unless its output is newer than all it was made of; its first error, or nothing."""
    stamp, text = target.with_suffix(".cmd"), f"{shlex.join(command)}\n{headers}"
    if _fresh(target) and stamp.exists() and stamp.read_text(encoding="utf-8") == text:
        return ""
    stamp.unlink(missing_ok=True)
    started = time.time()
    done = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        return next((line for line in lines if "error" in line), lines[0]).strip()
    os.utime(target, (started, started))  # so that what is edited meanwhile is compiled again
    stamp.write_text(text, encoding="utf-8")
    return ""


def _fresh(target: Path) -> bool:
    depends = target.with_suffix(".d")
    if not target.exists() or not depends.exists():
        return False
    names = shlex.split(depends.read_text(encoding="utf-8").replace("\\\n", " "))[1:]
    made = target.stat().st_mtime
    return all(os.path.exists(name) and os.path.getmtime(name) < made for name in names)


def is_clang(compiler: list[str]) -> bool:
    """Whether a compiler is clang, under whichever name."""
    probe = [*compiler, "-dM", "-E", "-x", "c++", "-"]
    done = subprocess.run(probe, input="", capture_output=True, text=True, check=False)
    return "__clang__" in done.stdout


def sanitizing(sanitize: str, compiler: list[str]) -> list[str]:
    """The flags of the sanitizers, such as "address,undefined"; none for an empty text."""
    if not sanitize:
        return []
    checks = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    # checks as calls: code with each of them written out takes minutes to compile
    calls = ["--param", "asan-instrumentation-with-call-threshold=0"]
    if is_clang(compiler):
        calls = ["-mllvm", "-asan-instrumentation-with-call-threshold=0"]
    return [*checks, *calls, "-O1", "-g1"]
