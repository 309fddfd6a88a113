"""How many lines check the GPU kernels, for each line of them: `python scripts/count_gpu_lines.py`.

Kernels are Triton functions, PTX and CUDA C++. What checks them runs without a GPU: proofs, tests of what is
launched and where, and the library that compiles and counts. Blank lines do not count.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "packages" / "ao-kernels"
KERNELS = ("src/ao_kernels/triton/*/kernel*.py", "src/ao_kernels/triton/*/*ptx.py", "csrc/cuda/*")
CHECKS = (
    "proofs/**/*.py", "tests/triton/*.py", "tests/cuda/*", "tests/checks/*.py", "checks/**/*.py",
)  # fmt: skip
#: the most lines that check, for each line of a kernel
MOST = 1.5


def lines(patterns: tuple[str, ...]) -> int:
    """Lines that are not blank, of all files that the patterns find."""
    files = {path for each in patterns for path in PACKAGE.glob(each) if path.is_file()}
    texts = (path.read_text(encoding="utf-8") for path in sorted(files))
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def main() -> None:
    """Print both numbers and their ratio; fail where there is too much."""
    kernels, checks = lines(KERNELS), lines(CHECKS)
    print(
        f"kernels {kernels}, checks {checks}: {checks / kernels:.2f} lines for each, at most {MOST}"
    )
    if checks > MOST * kernels:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
