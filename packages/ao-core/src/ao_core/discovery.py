"""Which plugins are installed, and does one fit this ao-core: the checks behind `plugins.py`.

Nothing here keeps state or swallows an error of a plugin: `plugins.PluginLoader` does both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ao_core.errors import PluginError

if TYPE_CHECKING:
    import pluggy
    from importlib_metadata import EntryPoint

__all__ = [
    "GROUP",
    "Candidate",
    "bad_hook_names",
    "check_api",
    "check_requirements",
    "did_you_mean",
    "hooks_of",
    "installed",
    "select",
]

#: the entry-point group
GROUP = "ao.plugins"


@dataclass(frozen=True)
class Candidate:
    """An entry point of the group, not imported yet, with what its distribution says of itself."""

    name: str
    dist: str
    version: str
    #: "package.module" or "package.module:attribute"
    module: str
    entry_point: EntryPoint
    requires: tuple[str, ...]


def installed() -> tuple[list[Candidate], list[tuple[str, Exception]]]:
    """All entry points of the group, sorted by distribution and name, and (distribution, error).

    Asks each distribution itself, because `importlib_metadata.entry_points` raises where any one,
    however unrelated, has an entry_points.txt that cannot be read.
    """
    import importlib_metadata

    found: dict[str, list[Candidate]] = {}
    errors: list[tuple[str, Exception]] = []
    for distribution in importlib_metadata.distributions():
        dist = "of unknown name"
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            dist, version = distribution.name, distribution.version
            requires = tuple(distribution.requires or ())
            # As for imports, the first on sys.path hides others of its name.
            if _canonical(dist) not in found:
                found[_canonical(dist)] = [
                    Candidate(entry.name, dist, version, entry.value, entry, requires)
                    for entry in distribution.entry_points.select(group=GROUP)
                ]
        except Exception as error:
            errors.append((dist, error))
    return [
        candidate
        for dist in sorted(found)
        for candidate in sorted(found[dist], key=lambda candidate: candidate.name)
    ], errors


def select(candidates: Sequence[Candidate], names: Iterable[str]) -> list[Candidate]:
    """The candidates whose entry point or distribution has one of the names."""
    wanted = {_canonical(name) for name in names}
    return [c for c in candidates if {_canonical(c.name), _canonical(c.dist)} & wanted]


def check_requirements(candidate: Candidate) -> None:
    """Compare what the distribution requires, extras aside, with what is installed.

    Raises:
        PluginError: something is missing or has another version; names all of them.
    """
    import importlib_metadata
    from packaging.requirements import Requirement

    unmet = []
    for text in candidate.requires:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib_metadata.version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            unmet.append(f"{needed} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{needed} is required, but {version} is installed")
    if unmet:
        raise PluginError("; ".join(unmet))


def check_api(manager: pluggy.PluginManager, plugin: object, core: tuple[int, int]) -> None:
    """Ask the plugin for its API version: the major must be that of `core`, the minor not above.

    Raises:
        PluginError: it has no `ao_api`, or returns something else, or does not fit.
    """
    hook = getattr(plugin, "ao_api", None)
    example = f"@hookimpl def ao_api(): return {core}"
    if hook is None:
        raise PluginError(f"it has no ao_api hook; add: {example}")
    if manager.parse_hookimpl_opts(plugin, "ao_api") is None:
        raise PluginError(f"ao_api is not marked; write: {example}")
    api = hook()
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        raise PluginError(f"ao_api returned {api!r}, not two integers such as {core}")
    if api[0] != core[0] or api[1] > core[1]:
        older = "the plugin" if api < core else "ao-core"
        raise PluginError(
            f"it was written for API {api[0]}.{api[1]}, and this ao-core has API "
            f"{core[0]}.{core[1]}; upgrade {older}"
        )


def hooks_of(manager: pluggy.PluginManager, plugin: object, hook: str) -> list[pluggy.HookImpl]:
    """The plugin's own implementations of one hook."""
    return [h for h in getattr(manager.hook, hook).get_hookimpls() if h.plugin is plugin]


def bad_hook_names(
    manager: pluggy.PluginManager, plugin: object
) -> Iterator[tuple[str, PluginError]]:
    """(name, what is wrong) for marked functions that are no hook and for hooks without mark."""
    known = [caller.name for caller in vars(manager.hook).values() if caller.has_spec()]
    for caller in manager.get_hookcallers(plugin) or ():
        optional = all(h.optionalhook for h in hooks_of(manager, plugin, caller.name))
        if not caller.has_spec() and not optional:
            hint = did_you_mean(caller.name, known)
            yield (
                caller.name,
                PluginError(f"there is no such hook.{hint} Known: {', '.join(known)}"),
            )
    for name in known:
        if hasattr(plugin, name) and manager.parse_hookimpl_opts(plugin, name) is None:
            yield name, PluginError("it is not called, because it is not marked with @hookimpl")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known name most like this one, with a space before it; or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _canonical(name: str) -> str:
    """A distribution's name as packaging compares them: "AO_Marlin" is "ao-marlin"."""
    return re.sub(r"[-_.]+", "-", name).lower()
