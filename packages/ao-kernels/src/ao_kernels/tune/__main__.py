"""What `python -m ao_kernels.tune` runs."""

from __future__ import annotations

from ao_core.ext.cli import check_packages

NAME = "python -m ao_kernels.tune"

if __name__ == "__main__":
    check_packages(NAME)
    from ao_kernels.tune.commands import tune

    tune(prog_name=NAME)
