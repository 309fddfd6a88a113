"""The application: its commands, those of plugins, and what happens to errors.

Importing it imports no torch, so that `ao --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import typer
import typer.core
from typer.main import get_command_name

from ao_core.__about__ import __version__
from ao_core.cli.explain import explain
from ao_core.cli.formats import formats
from ao_core.cli.inspect import inspect
from ao_core.cli.plugins import plugins
from ao_core.cli.quantize import quantize
from ao_core.cli.replay import replay
from ao_core.cli.verify import verify
from ao_core.discovery import installed, select
from ao_core.errors import AoError, PluginError

__all__ = ["first_stays", "make_app", "make_group", "run"]

_COMMANDS = (plugins, formats, explain, inspect, quantize, replay, verify)


class _Commands(typer.core.TyperGroup):
    """A group of commands: an error is one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; AO_DEBUG=1 lets errors through with their traceback."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            # usage errors have a method that shows them, which typer calls
            if os.environ.get("AO_DEBUG") == "1" or hasattr(error, "show"):
                raise
            typer.echo(f"ao: {_one_line(error)}", err=True)
            raise typer.Exit(2) from error


def make_group(name: str, summary: str) -> typer.Typer:
    """A command that has only sub-commands, which are still to be added; their errors are one line each."""
    return typer.Typer(
        name=name,
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help=summary,
    )


def make_app() -> typer.Typer:
    """The application with the built-in commands."""
    app = make_group("ao", "Quantize models, and look at what ao knows and did.")
    app.callback()(_options)
    for command in _COMMANDS:
        app.command()(command)
    return app


def run() -> None:
    """Build the application, with the commands of plugins where the arguments need them, and run it."""
    warnings.formatwarning = _short_warning
    app = make_app()
    if _needs_plugins(sys.argv[1:]):
        from ao_core.plugins import call_cli_hooks

        call_cli_hooks(app, first_stays(app))
    app()


def first_stays(app: typer.Typer) -> Callable[[str], None]:
    """A check after each plugin: the commands that it added under names that were taken go again.

    Returns:
        A function of the distribution, which raises `PluginError` with the names and both providers.
    """
    owners = {name: "ao-core" for name, _ in _named(app)}
    known = [command for _, command in _named(app)]
    options = app.registered_callback

    def check(dist: str) -> None:
        from ao_core.table import taken  # which imports torch, as plugins do

        errors = []
        if app.registered_callback is not options:
            app.registered_callback = options
            errors.append(f"the options of ao itself are ao-core's, and {dist} cannot replace them")
        for name, command in _named(app):
            # by identity: two commands may be equal
            if any(command is each for each in known):
                continue
            if name in owners:
                commands, groups = app.registered_commands, app.registered_groups
                commands[:] = [each for each in commands if each is not command]
                groups[:] = [each for each in groups if each is not command]
                errors.append(str(taken("command", name, owners[name], dist)))
            else:
                known.append(command)
                owners[name] = dist
        if errors:
            raise PluginError(" ".join(errors))

    return check


def _named(app: typer.Typer) -> list[tuple[str, Any]]:
    """The commands and groups with their names, in the order in which they were added."""
    found: list[tuple[str, Any]] = []
    for command in app.registered_commands:
        name = command.name or get_command_name(getattr(command.callback, "__name__", ""))
        found.append((name, command))
    for group in app.registered_groups:
        typer_name = getattr(group.typer_instance, "info", group).name
        names = [n for n in (group.name, typer_name) if isinstance(n, str) and n]
        found.append((names[0] if names else "", group))
    return found


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ao {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    # typer asks for a function to carry the options of the command itself
    pass


def _needs_plugins(arguments: list[str]) -> bool:
    """Whether a command of a plugin may be meant, or listed: only then are plugins worth loading."""
    first = next((a for a in arguments if not a.startswith("-")), None)
    if first is not None:
        return first not in {command.__name__ for command in _COMMANDS}
    return "--version" not in arguments and _some_plugin_has_commands()


def _some_plugin_has_commands() -> bool:
    """Look for `ao_cli` in the sources of the plugins, which costs less than importing them."""
    candidates, _ = installed()
    names = os.environ.get("AO_PLUGINS")
    if names is not None:
        candidates = select(candidates, names.split(","))
    return any(_may_define_commands(found.module.partition(":")[0]) for found in candidates)


def _may_define_commands(module: str) -> bool:
    """False only if the source of a module can be read and does not mention `ao_cli`."""
    path, origin = None, None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            return True
        path, origin = spec.submodule_search_locations, spec.origin
    try:
        return origin is None or "ao_cli" in Path(origin).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return True


def _one_line(error: Exception) -> str:
    """What happened; errors that nobody foresaw with their type and how to see more."""
    text = " ".join(str(error).split())
    if isinstance(error, (AoError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (AO_DEBUG=1 shows where)"


def _short_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning without the line of code that raised it, which says nothing to users."""
    return f"ao: warning: {message}\n"
