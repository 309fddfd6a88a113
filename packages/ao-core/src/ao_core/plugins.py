"""Loading plugins so that a broken one harms nobody but its own users.

Each entry point of the group `ao.plugins` is checked for what it requires, imported, asked for its
API version and registered; then its hooks are called one by one. Whatever fails becomes a
`PluginProblem`, and all else goes on. `hookspecs.py` says what a plugin may provide.

Environment variables, read when plugins are loaded:
    AO_PLUGINS: unset loads all; empty loads none; "a,b" loads only the entry points or
        distributions of these names.
    AO_STRICT: "1" turns a problem into a `PluginError`.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ao_core.discovery import (
    Candidate,
    bad_hook_names,
    check_api,
    check_requirements,
    did_you_mean,
    hooks_of,
    installed,
    select,
)
from ao_core.errors import AoError, PluginError
from ao_core.registry import Registry, name_of, registry

if TYPE_CHECKING:
    import pluggy

# pluggy, packaging and importlib_metadata are imported inside functions: most processes never look
# up a name that is not built in, and should not pay for them when they import ao_core.

__all__ = [
    "PluginInfo",
    "PluginLoader",
    "PluginProblem",
    "PluginWarning",
    "call_cli_hooks",
    "load_plugins",
    "plugins",
    "problems",
]

_WHEN = {
    "discovery": "while reading its metadata",
    "AO_PLUGINS": "while being selected by AO_PLUGINS",
    "requirements": "while checking its requirements",
    "import": "while importing",
    "api": "while checking its API version",
    "register": "while registering its hooks",
}


class PluginWarning(UserWarning):
    """A plugin, or a part of it, could not be used."""


@dataclass(frozen=True)
class PluginInfo:
    """A plugin in use, and the names of the records it provided, by table ("dtypes", …)."""

    name: str
    dist: str
    version: str
    module: str
    records: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class PluginProblem:
    """What went wrong with a plugin; `str()` is a sentence.

    After a problem in the phase "discovery", "AO_PLUGINS", "requirements", "import", "api" or
    "register" the plugin is left out whole. After one in "hook ao_dtypes" and the like, the record
    in question, or all of that hook if it raised, is left out and the rest is used.
    """

    #: of the entry point
    name: str
    dist: str
    version: str
    phase: str
    exception: BaseException

    def __str__(self) -> str:
        text = " ".join(str(self.exception).split())
        if not isinstance(self.exception, (AoError, ImportError)):
            text = f"{type(self.exception).__name__}: {text}"
        when = _WHEN.get(self.phase, f"in {self.phase}")
        plugin = f"{self.dist} {self.version}".rstrip()
        return f"Plugin {plugin} failed {when}: {text.rstrip(' .:')}."


@dataclass
class _Haul:
    """What one loading gathers; it reaches the registry only when all plugins have been asked."""

    candidates: list[Candidate] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    infos: list[PluginInfo] = field(default_factory=list)
    records: list[tuple[PluginInfo, str, Any]] = field(default_factory=list)
    cli: list[tuple[PluginInfo, pluggy.HookImpl]] = field(default_factory=list)
    problems: list[PluginProblem] = field(default_factory=list)

    def note(self, who: PluginInfo | Candidate, phase: str, error: BaseException) -> None:
        """Keep a problem."""
        self.problems.append(PluginProblem(who.name, who.dist, who.version, phase, error))

    @contextmanager
    def guard(self, who: PluginInfo, phase: str) -> Iterator[None]:
        """Turn whatever the block raises into a problem, `sys.exit` included."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.note(who, phase, error)


class PluginLoader:
    """Loads the installed plugins into one registry, once."""

    def __init__(self, target: Registry) -> None:
        """Take the registry to load into; nothing is loaded yet."""
        self._registry = target
        self._lock = threading.RLock()
        self._loading = False
        self._loaded = False
        self._haul = _Haul()

    def load(self) -> None:
        """Load all plugins the first time; see `load_plugins`."""
        self._load_once()
        self._check_strict()

    def plugins(self) -> list[PluginInfo]:
        """The plugins in use; see the function of this name."""
        self._load_once()
        return list(self._haul.infos)

    def problems(self) -> list[PluginProblem]:
        """The problems so far; see the function of this name."""
        self._load_once()
        return list(self._haul.problems)

    def notes(self) -> list[str]:
        """Sentences for a failed lookup: the problems, and what AO_PLUGINS left out."""
        notes = [str(problem) for problem in self._haul.problems]
        if self._haul.left_out:
            notes.append(f"AO_PLUGINS leaves out: {', '.join(self._haul.left_out)}.")
        return notes

    def origin(self, config_type: type) -> str:
        """A sentence on who should provide the transform for this class."""
        package = config_type.__module__.partition(".")[0]
        for candidate in self._haul.candidates:
            if re.split("[.:]", candidate.module)[0] == package:
                return f"The distribution {candidate.dist} {candidate.version} should provide it."
        return (
            f"No plugin comes from its package {package!r}; "
            "register a Transform for it with ao_core.register()."
        )

    def call_cli_hooks(self, app: object) -> None:
        """Call every `ao_cli` hook with `app`; see the function of this name."""
        self.load()
        before = len(self._haul.problems)
        for info, hook in self._haul.cli:
            with self._haul.guard(info, "hook ao_cli"):
                # pluggy let a hook register only if its arguments are none or `app`.
                hook.function(*[app for _ in hook.argnames])
        _warn(self._haul.problems[before:])
        self._check_strict()

    def _load_once(self) -> None:
        with self._lock:
            # A plugin that looks a name up while it is being loaded sees what is there already.
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                haul = self._gather()
                for info, plural, record in haul.records:
                    with haul.guard(info, f"hook ao_{plural}"):
                        self._add(info, plural, record)
                self._haul = haul
                self._loaded = True
            finally:
                self._loading = False
        _warn(haul.problems)

    def _gather(self) -> _Haul:
        """Ask all plugins. Changes nothing here, so that Ctrl-C leaves nothing half loaded."""
        import pluggy

        from ao_core import hookspecs

        manager = pluggy.PluginManager("ao")
        manager.add_hookspecs(hookspecs)
        haul = _Haul()
        for candidate in _choose(haul):
            plugin = _open(manager, candidate, haul)
            if plugin is None:
                continue
            info = PluginInfo(candidate.name, candidate.dist, candidate.version, candidate.module)
            haul.infos.append(info)
            for name, error in bad_hook_names(manager, plugin):
                haul.note(info, f"hook {name}", error)
            for plural, table in self._registry.tables.items():
                for hook in hooks_of(manager, plugin, f"ao_{plural}"):
                    with haul.guard(info, f"hook ao_{plural}"):
                        records = _listed(hook.function(), table.expects)
                        haul.records += [(info, plural, record) for record in records]
            haul.cli += [(info, hook) for hook in hooks_of(manager, plugin, "ao_cli")]
        return haul

    def _add(self, info: PluginInfo, plural: str, record: Any) -> None:
        table = self._registry.tables[plural]
        if not table.holds(record):
            raise PluginError(
                f"one of its records is a {type(record).__name__}, not {table.expects}"
            )
        self._registry.add(record, provider=info.dist)
        info.records.setdefault(plural, []).append(name_of(record))

    def _check_strict(self) -> None:
        if self._haul.problems and _strict():
            text = " ".join(map(str, self._haul.problems))
            raise PluginError(f"AO_STRICT=1: {text}") from self._haul.problems[0].exception


def _strict() -> bool:
    return os.environ.get("AO_STRICT") == "1"


def _warn(problems: list[PluginProblem]) -> None:
    # With AO_STRICT=1 the caller gets an exception that says the same.
    if not _strict():
        for problem in problems:
            warnings.warn(str(problem), PluginWarning, stacklevel=2)


def _choose(haul: _Haul) -> list[Candidate]:
    """The installed candidates that AO_PLUGINS names; all of them where it is not set."""
    haul.candidates, errors = installed()
    haul.problems += [PluginProblem("", dist, "", "discovery", error) for dist, error in errors]
    value = os.environ.get("AO_PLUGINS")
    if value is None:
        return haul.candidates
    names = [name.strip() for name in value.split(",") if name.strip()]
    known = [candidate.name for candidate in haul.candidates]
    for name in names:
        if not select(haul.candidates, [name]):
            hint = did_you_mean(name, known)
            error = PluginError(f"not installed.{hint} Installed: {', '.join(known) or 'none'}")
            haul.problems.append(PluginProblem(name, name, "", "AO_PLUGINS", error))
    chosen = select(haul.candidates, names)
    haul.left_out = [f"{c.name} ({c.dist})" for c in haul.candidates if c not in chosen]
    return chosen


def _open(manager: pluggy.PluginManager, candidate: Candidate, haul: _Haul) -> object | None:
    """Check, import and register one plugin; None, and a problem noted, where any of it fails."""
    from ao_core.hookspecs import API_VERSION

    phase = "requirements"
    try:
        check_requirements(candidate)
        phase = "import"
        plugin: object = candidate.entry_point.load()
        phase = "api"
        check_api(manager, plugin, API_VERSION)
        phase = "register"
        if manager.is_registered(plugin):
            raise PluginError(f"{candidate.module} is loaded already, for another entry point")
        manager.register(plugin, f"{candidate.dist}:{candidate.name}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        haul.note(candidate, phase, error)
        return None
    return plugin


def _listed(records: object, expects: str) -> list[Any]:
    if isinstance(records, str) or not isinstance(records, Iterable):
        raise PluginError(
            f"it returned {type(records).__name__}; return a list, each item {expects}"
        )
    return list(records)


def load_plugins() -> None:
    """Load all installed plugins into the registry; does nothing the second time.

    Warns:
        PluginWarning: once for each problem.

    Raises:
        PluginError: with AO_STRICT=1, if there is any problem; every time it is called.
    """
    registry.loader.load()


def plugins() -> list[PluginInfo]:
    """The plugins in use and what each provides; loads them, and raises nothing."""
    return registry.loader.plugins()


def problems() -> list[PluginProblem]:
    """What went wrong with plugins so far; loads them, and raises nothing."""
    return registry.loader.problems()


def call_cli_hooks(app: object) -> None:
    """Let every plugin add its sub-commands to `app`, a `typer.Typer`; failures are isolated."""
    registry.loader.call_cli_hooks(app)
