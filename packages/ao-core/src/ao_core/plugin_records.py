"""What is known of plugins: those in use, what went wrong with them, and what one loading gathers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ao_core.errors import AoError

if TYPE_CHECKING:
    import pluggy

    from ao_core.discovery import Candidate

__all__ = ["WHOLE", "Haul", "PluginInfo", "PluginProblem", "PluginWarning"]

#: phases after which a plugin is left out whole, and how a sentence names them
WHOLE = {
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
    #: seconds that its import and its hooks took
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class PluginProblem:
    """What went wrong with a plugin; `str()` is a sentence.

    After a problem in the phase "discovery", "AO_PLUGINS", "requirements", "import", "api" or
    "register" the plugin is left out whole. After one in "hook ao_dtypes" and the like, the record
    in question, or all of that hook if it raised, is left out and the rest is used. After "state" (it
    changed something for everybody, which was set back) and "speed" all of it is used. Later ones, such as
    "refuses of kernel 'fast'", are of records in use, each of which is noted once.
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
        plugin = f"{self.dist} {self.version}".rstrip()
        if self.phase in ("state", "speed"):
            return f"Plugin {plugin} {text.rstrip(' .:')}."
        when = WHOLE.get(self.phase, f"in {self.phase}")
        return f"Plugin {plugin} failed {when}: {text.rstrip(' .:')}."


@dataclass
class Haul:
    """What one loading gathers; it reaches the registry only when all plugins have been asked."""

    candidates: list[Candidate] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    infos: list[PluginInfo] = field(default_factory=list)
    records: list[tuple[PluginInfo, str, Any]] = field(default_factory=list)
    cli: list[tuple[PluginInfo, pluggy.HookImpl]] = field(default_factory=list)
    machine: list[tuple[PluginInfo, pluggy.HookImpl]] = field(default_factory=list)
    problems: list[PluginProblem] = field(default_factory=list)
    #: plugins in use, under the names that pluggy knows them by
    registered: list[tuple[object, str]] = field(default_factory=list)

    def kept(self) -> Haul:
        """The plugins in use and their problems, for another loading."""
        in_use = {(info.name, info.dist) for info in self.infos}
        problems = [
            p
            for p in self.problems
            if p.phase not in WHOLE and ((p.name, p.dist) in in_use or not p.name)
        ]
        return Haul(
            infos=list(self.infos),
            cli=list(self.cli),
            machine=list(self.machine),
            problems=problems,
            registered=list(self.registered),
        )

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
