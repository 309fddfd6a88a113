"""The `ao` command: `main` is its entry point, all else is imported when it runs."""

from __future__ import annotations

import sys

__all__ = ["check_packages", "main"]


def main() -> None:
    """Run the command line in `sys.argv`; without the extra "cli", say how to install it."""
    check_packages("The ao command")
    from ao_core.cli.app import run

    run()


def check_packages(command: str) -> None:
    """End the process with a sentence where `command` lacks what the extra "cli" installs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        # the package is missing, not broken, so a traceback would tell less than the command
        sys.exit(
            f"{command} needs the package {error.name!r}, which is not installed. "
            'Install it with: pip install "ao-core[cli]"'
        )
