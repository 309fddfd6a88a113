"""Build programs of llama.cpp for this machine: `python scripts/build_llama.py FOLDER [PROGRAM ...]`.

llama-bench unless told otherwise.

From the source distribution of llama-cpp-python at the version that constraints.txt pins; into
FOLDER/bin, which also gets the libraries. Nothing is done where that version is there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from workspace import ROOT

#: parts of llama.cpp that its programs do not need
LEFT_OUT = ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER", "BUILD_APP")


def build(home: Path, programs: list[str]) -> None:
    """Build into `home`, whose file `version` names what is there."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in lines if line.startswith("llama-cpp-python=="))
    stamp, made = home / "version", " ".join([pin, *programs])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made:
        return
    shutil.rmtree(home, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        run(
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "-d",
            place,
            pin,
        )
        (sdist,) = Path(place).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        (tree,) = Path(place).glob("*/vendor/llama.cpp")
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_UI=OFF"]
        options += [f"-DLLAMA_{name}=OFF" for name in LEFT_OUT]
        run("cmake", "-S", str(tree), "-B", str(home), *options)
        run("cmake", "--build", str(home), "--target", *programs, "-j", "2")
    stamp.write_text(made, encoding="utf-8")


def run(module: str, *arguments: str) -> None:
    """A module of this Python as a program; its failure ends this one."""
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve(), sys.argv[2:] or ["llama-bench"])
