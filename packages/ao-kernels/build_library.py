"""Builds the C++ library of ao-kernels in place, by CMake: `python build_library.py [--jobs 2]`.

What changed is compiled again. `--sanitize address,undefined` builds one for these sanitizers in build/.
CMake and Ninja are those installed in this Python, or else those on PATH.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent
IN_PLACE = ROOT / "src" / "ao_kernels" / "cpu"
LIBRARY = "libao_cpu.so"
#: holds the reason why there is no library next to it
NOT_BUILT = "not_built.txt"


class CannotBuild(Exception):
    """The machine lacks something; the text, a sentence without its end, says what."""


class DoesNotCompile(CannotBuild):
    """The compiler was found, and refused the sources; it has printed why."""


def build(
    name: str, target: str, settings: dict[str, str] | None = None, *, cxx: str = "", jobs: int = 0
) -> Path:
    """The folder build/NAME, where a target of CMakeLists.txt is built by $CXX, or by the compiler `cxx`.

    Raises:
        CannotBuild: the machine lacks a compiler, torch or CMake, or the sources do not compile.
    """
    out, env = ROOT / "build" / name, dict(os.environ)
    env |= {"CXX": cxx} if cxx else {}
    cmake, ninja = _program("cmake"), _program("ninja")
    if cmake is None:
        raise CannotBuild("there is no cmake: install it, as the extra `test` does")
    settings = {"Python_EXECUTABLE": sys.executable, **(settings or {})}
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    command = [cmake, "-S", str(ROOT), "-B", str(out), *generator]
    command += [f"-D{key}={value}" for key, value in settings.items()]
    with _alone_in(out):
        # CMake keeps the first compiler that it finds; Ninja compiles what has another command
        stamp = out / "asked.txt"
        text = "\0".join(
            [cmake, *generator, *(env.get(key, "") for key in ("CXX", "AO_WHEEL_PLATFORM"))]
        )
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != text:
            for old in (
                *out.glob("CMakeCache.txt"),
                *out.glob("CMakeFiles/*/CMakeCXXCompiler.cmake"),
            ):
                old.unlink()
            stamp.write_text(text, encoding="utf-8")
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise CannotBuild((out / NOT_BUILT).read_text(encoding="utf-8").strip())
        parallel = ["--parallel", str(jobs or os.cpu_count() or 1)]
        if subprocess.run(
            [cmake, "--build", str(out), "--target", target, *parallel], env=env, check=False
        ).returncode:
            raise DoesNotCompile(f"{target} does not compile or link")
    return out


def _program(name: str) -> str | None:
    """A program that a package of this Python holds, or one on PATH."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        module = importlib.import_module(name)
        folder = getattr(module, "CMAKE_BIN_DIR", None) or getattr(module, "BIN_DIR", "")
        if found := shutil.which(name, path=folder):
            return found
    return shutil.which(name)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and wait until no other process builds there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Build in place, or with sanitizers into build/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", default="", help="such as address,undefined")
    parser.add_argument("--jobs", type=int, default=0, help="compilers that run at a time")
    help_ = "write down why, and succeed, where the machine lacks a compiler or torch"
    parser.add_argument("--if-possible", action="store_true", help=help_)
    arguments = parser.parse_args()
    kind = arguments.sanitize.replace(",", "-")
    folder = ROOT / "build" / f"sanitize-{kind}" if kind else IN_PLACE
    name = f"library-{kind}" if kind else "library"
    asked = os.environ.get("AO_WHEEL_PLATFORM") not in (None, "", "any")
    try:
        made = build(name, "ao_cpu", {"AO_SANITIZE": arguments.sanitize}, jobs=arguments.jobs)
    except CannotBuild as problem:
        if not arguments.if_possible or asked or isinstance(problem, DoesNotCompile):
            sys.exit(f"error: {problem}")
        (folder / LIBRARY).unlink(missing_ok=True)
        (folder / NOT_BUILT).write_text(f"{problem}\n", encoding="utf-8")
        print(f"ao-kernels without its C++ library: {problem}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    # a new file in one step: processes that have the old one loaded keep it
    fresh = folder / f"{LIBRARY}.new"
    shutil.copyfile(made / LIBRARY, fresh)
    os.replace(fresh, folder / LIBRARY)
    (folder / NOT_BUILT).unlink(missing_ok=True)
    print(folder / LIBRARY)


if __name__ == "__main__":
    main()
