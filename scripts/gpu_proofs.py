"""Run the proofs of GPU kernels, packages/*/proofs, that need no GPU; with `--all` the long ones too.

They are compiled and interpreted by the oldest Triton that is served, in an environment of their own
over this one: its interpreter works with older releases of NumPy only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from workspace import ROOT, load_toml

HOME = ROOT / ".nox" / "gpu_proofs"


def environment() -> Path:
    """The interpreter of an environment that has all of this one, and the group `gpu_proofs`."""
    if not (HOME / "pyvenv.cfg").exists():
        venv.create(HOME, with_pip=True)
    python = HOME / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    below = sysconfig.get_path("purelib")
    Path(site.strip(), "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    wanted = load_toml(ROOT / "pyproject.toml")["dependency-groups"]["gpu_proofs"]
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *wanted], check=True)
    return python


def main(arguments: list[str]) -> int:
    """Compile, then interpret: the interpreter is chosen before Triton is imported."""
    python, status = environment(), 0
    chosen = [] if "--all" in arguments else ["-m", "not slow"]
    for kind, interpret in (("compiled", "0"), ("interpreted", "1")):
        folders = sorted(ROOT.glob(f"packages/*/proofs/{kind}"))
        command: list[str | Path] = [python, "-m", "pytest", "-n", "2", *chosen, *folders]
        settings = {**os.environ, "TRITON_INTERPRET": interpret}
        status |= subprocess.run(command, cwd=ROOT, env=settings, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
