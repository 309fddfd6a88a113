"""Loading plugins so that a broken one harms nobody but its own users.

Each entry point of the group `ao.plugins` is checked for what it requires, imported, asked for its
API version and registered; then its hooks are called one by one. Whatever fails becomes a
`PluginProblem`, and all else goes on. `hookspecs.py` says what a plugin may provide.

Plugins are loaded in the state of a fresh process, wherever the first lookup happens (`neutral`). What
one of them changes for everybody, such as torch's default dtype, is set back.

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
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from ao_core.admission import check_record, tamed
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
from ao_core.errors import PluginError
from ao_core.neutral import neutral, restored
from ao_core.plugin_records import WHOLE, Haul, PluginInfo, PluginProblem, PluginWarning
from ao_core.registry import Registry, name_of, registry

if TYPE_CHECKING:
    import pluggy

# pluggy, packaging and importlib_metadata are imported inside functions: most processes never look
# up a name that is not built in, and should not pay for them when they import ao_core.

__all__ = [
    "SLOW",
    "PluginInfo",
    "PluginLoader",
    "PluginProblem",
    "PluginWarning",
    "call_cli_hooks",
    "load_plugins",
    "plugins",
    "problems",
]

#: seconds of computing after which a plugin is slow to load, its import and hooks together
SLOW = 2.0


class PluginLoader:
    """Loads the installed plugins into one registry, once."""

    def __init__(self, target: Registry) -> None:
        """Take the registry to load into; nothing is loaded yet."""
        self._registry = target
        self._lock = threading.RLock()
        #: True while plugins are imported and asked
        self.loading = False
        self._loaded = False
        self._haul = Haul()

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

    def call_cli_hooks(self, app: object, check: Callable[[str], None] = lambda dist: None) -> None:
        """Call every `ao_cli` hook with `app`; see the function of this name."""
        self.load()
        before = len(self._haul.problems)
        for info, hook in self._haul.cli:
            with self._haul.guard(info, "hook ao_cli"):
                # pluggy let a hook register only if its arguments are none or `app`.
                hook.function(*[app for _ in hook.argnames])
            with self._haul.guard(info, "hook ao_cli"):
                check(info.dist)
        _warn(self._haul.problems[before:])
        self._check_strict()

    def machine(self) -> dict[str, list[str]]:
        """What the `ao_machine` hooks say of this machine, by distribution; failures are isolated."""
        self._load_once()
        before = len(self._haul.problems)
        said: dict[str, list[str]] = {}
        for info, hook in self._haul.machine:
            with self._haul.guard(info, "hook ao_machine"):
                said[info.dist] = [str(each) for each in _listed(hook.function(), "a sentence")]
        _warn(self._haul.problems[before:])
        return said

    def report(self, dist: str, phase: str, error: BaseException) -> None:
        """Note a problem that showed in use, once for a distribution and phase, with a warning.

        Raises:
            PluginError: with AO_STRICT=1.
        """
        info = next((i for i in self._haul.infos if i.dist == dist), None)
        name, version = ("", "") if info is None else (info.name, info.version)
        problem = PluginProblem(name, dist, version, phase, error)
        with self._lock:
            if any((p.dist, p.phase) == (dist, phase) for p in self._haul.problems):
                return
            self._haul.problems.append(problem)
        _warn([problem])
        self._check_strict()

    def retry(self) -> None:
        """At the next lookup, try the plugins again that were left out whole, if there are any."""
        with self._lock:
            self._loaded = self._loaded and not any(p.phase in WHOLE for p in self._haul.problems)

    def after_fork(self) -> None:
        """In the child of a fork: no other thread is loading here."""
        self._lock = threading.RLock()
        self.loading = False

    def _load_once(self) -> None:
        with self._lock:
            # A plugin that looks a name up while it is being loaded sees what is there already.
            if self._loaded or self.loading:
                return
            self.loading = True
            try:
                with neutral():
                    haul = self._gather()
                for info, plural, record in haul.records:
                    with haul.guard(info, f"hook ao_{plural}"):
                        self._add(haul, info, plural, record)
                known = {(p.dist, p.phase) for p in self._haul.problems}
                self._haul = haul
                self._loaded = True
            finally:
                self.loading = False
            if haul.records:
                self._registry.plugins_added()
        _warn([p for p in haul.problems if (p.dist, p.phase) not in known])

    def _gather(self) -> Haul:
        """Ask the plugins that are not in use. Changes nothing here, so Ctrl-C leaves nothing half done."""
        import pluggy

        from ao_core import hookspecs

        manager = pluggy.PluginManager("ao")
        manager.add_hookspecs(hookspecs)
        haul = self._haul.kept()
        for plugin, name in haul.registered:
            manager.register(plugin, name)
        in_use = {(info.name, info.dist) for info in haul.infos}
        for candidate in _choose(haul):
            if (candidate.name, candidate.dist) in in_use:
                continue
            changes: list[str] = []
            start, busy = perf_counter(), thread_time()
            with restored(changes):
                info = self._ask(manager, candidate, haul)
            seconds, busy = perf_counter() - start, thread_time() - busy
            if info is not None:
                haul.infos.append(replace(info, seconds=seconds))
            who = info or candidate
            for change in changes:
                haul.note(who, "state", PluginError(f"changed {change}; it was set back"))
            if busy > SLOW or seconds > 5 * SLOW:  # other programs make it wait too
                text = (
                    f"took {seconds:.1f} s to load, {busy:.1f} s of them computing; import and build what "
                    "takes time in the functions that its records carry"
                )
                haul.note(who, "speed", PluginError(text))
        return haul

    def _ask(
        self, manager: pluggy.PluginManager, candidate: Candidate, haul: Haul
    ) -> PluginInfo | None:
        """Import one plugin and call its hooks; None, and a problem noted, where it is left out."""
        plugin = _open(manager, candidate, haul)
        if plugin is None:
            return None
        info = PluginInfo(candidate.name, candidate.dist, candidate.version, candidate.module)
        for name, error in bad_hook_names(manager, plugin):
            haul.note(info, f"hook {name}", error)
        for plural, table in self._registry.tables.items():
            for hook in hooks_of(manager, plugin, f"ao_{plural}"):
                with haul.guard(info, f"hook ao_{plural}"):
                    records = _listed(hook.function(), table.expects)
                    haul.records += [(info, plural, record) for record in records]
        haul.cli += [(info, hook) for hook in hooks_of(manager, plugin, "ao_cli")]
        haul.machine += [(info, hook) for hook in hooks_of(manager, plugin, "ao_machine")]
        return info

    def _add(self, haul: Haul, info: PluginInfo, plural: str, record: Any) -> None:
        table = self._registry.tables[plural]
        if not table.holds(record):
            raise PluginError(
                f"one of its records is a {type(record).__name__}, not {table.expects}"
            )
        check_record(record)
        admitted, change = tamed(record, self._registry)
        if change is not None:
            haul.note(info, f"hook ao_{plural}", PluginError(change))
        self._registry.add(admitted, provider=info.dist)
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


def _choose(haul: Haul) -> list[Candidate]:
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


def _open(manager: pluggy.PluginManager, candidate: Candidate, haul: Haul) -> object | None:
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
        name = f"{candidate.dist}:{candidate.name}"
        manager.register(plugin, name)
        haul.registered.append((plugin, name))
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


def call_cli_hooks(app: object, check: Callable[[str], None] = lambda dist: None) -> None:
    """Let every plugin add its sub-commands to `app`, a `typer.Typer`; failures are isolated.

    Args:
        app: what the hooks get.
        check: called with the distribution after each hook; what it raises is a problem of that plugin.
    """
    registry.loader.call_cli_hooks(app, check)
