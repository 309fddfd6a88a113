"""`ao plugins`: what is installed, what it brings, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ao_core.cli.output import JSON, folded, show_json

if TYPE_CHECKING:
    from ao_core.plugins import PluginInfo

__all__ = ["plugins"]


def plugins(as_json: bool = JSON) -> None:
    """List plugins, their versions, what each registered, what cannot serve here, and what went wrong."""
    import warnings
    from contextlib import suppress

    from ao_core import plugins as found
    from ao_core.__about__ import __version__
    from ao_core.cli.app import first_stays, make_app
    from ao_core.errors import PluginError
    from ao_core.registry import CORE, registry

    with warnings.catch_warnings(), suppress(PluginError):
        # both say what is listed below
        warnings.simplefilter("ignore", found.PluginWarning)
        app = make_app()
        found.call_cli_hooks(app, first_stays(app))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", found.PluginWarning)
        machine = registry.loader.machine()
    infos, problems = found.plugins(), found.problems()
    builtin = {
        kind: [name for name in table.names() if table.provider(name) == CORE]
        for kind, table in registry.tables.items()
    }
    core = found.PluginInfo("(built in)", CORE, __version__, "ao_core", builtin)
    shown = [core, *infos]
    if as_json:
        show_json(
            {
                "plugins": [
                    {
                        "name": info.name,
                        "distribution": info.dist,
                        "version": info.version,
                        "module": info.module,
                        "seconds": round(info.seconds, 3),
                        "records": info.records,
                        "machine": machine.get(info.dist, []),
                        "unavailable": _unavailable(info),
                    }
                    for info in shown
                ],
                "problems": [
                    {
                        "name": problem.name,
                        "distribution": problem.dist,
                        "version": problem.version,
                        "phase": problem.phase,
                        "exception": type(problem.exception).__name__,
                        "message": str(problem.exception),
                    }
                    for problem in problems
                ],
            }
        )
        return
    for info in shown:
        took = "" if info is core else f", loaded in {info.seconds:.2f} s"
        typer.echo(f"{info.dist} {info.version}, plugin {info.name} in {info.module}{took}")
        for kind, names in info.records.items():
            if names:
                typer.echo(folded(f"  {kind} ({len(names)}): {', '.join(names)}"))
        for sentence in machine.get(info.dist, []):
            typer.echo(folded(f"  {sentence}"))
        alike: dict[str, list[str]] = {}
        for name, reason in _unavailable(info).items():
            alike.setdefault(reason, []).append(name)
        for reason, names in alike.items():
            typer.echo(folded(f"  not usable here: {', '.join(names)}: {reason}"))
    if problems:
        typer.echo(f"\n{len(problems)} problem(s):")
    for problem in problems:
        text = " ".join(str(problem.exception).split())
        plugin = f"{problem.dist} {problem.version}".rstrip()
        typer.echo(f"  {plugin} [{problem.phase}] {type(problem.exception).__name__}: {text}")


def _unavailable(info: PluginInfo) -> dict[str, str]:
    """Kernels of a plugin that cannot run on this machine, or whose op nobody registered, and why."""
    from ao_core.dispatch import unused
    from ao_core.registry import registry

    reasons = {}
    for name in info.records.get("kernels", ()):
        try:
            kernel = registry.kernels.get(name)
            reason = unused(kernel) or kernel.unavailable()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            reasons[name] = reason
    return reasons
