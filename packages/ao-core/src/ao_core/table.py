"""`Table`: the records of one kind, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ao_core.admission import check_record
from ao_core.errors import PluginError, UnknownNameError
from ao_core.neutral import neutral

if TYPE_CHECKING:
    from ao_core.registry import Registry

__all__ = ["CORE", "IN_PROCESS", "Table", "name_of", "taken"]

T = TypeVar("T")

#: provider of the built-in records
CORE = "ao-core"
#: provider of what `register` adds
IN_PROCESS = "in-process"


class Table(Generic[T]):
    """Records of one kind by name. `registry.add` writes it, everybody may read it.

    A lookup that hits is two dictionary reads: no lock, no plugin.
    """

    def __init__(
        self,
        registry: Registry,
        plural: str,
        kind: str,
        expects: str,
        holds: Callable[[object], bool],
    ) -> None:
        self._registry = registry
        self._plural = plural
        #: for messages: "dtype"
        self.kind = kind
        #: for messages: what belongs here, "a DType"
        self.expects = expects
        #: whether an object belongs in this table
        self.holds = holds
        self._records: dict[str, T] = {}
        self._providers: dict[str, str] = {}
        self._filled = False

    def get(self, name: str) -> T:
        """The record of that name; a miss loads the plugins once.

        Raises:
            UnknownNameError: no built-in and no plugin has it; lists what is known and which
                plugins failed.
        """
        record = self.local(name)
        if record is None:
            self._registry.load_plugins()
            record = self._records.get(name)
        if record is None:
            notes = self._registry.notes(name)
            raise UnknownNameError(self.kind, name, self._records, notes)
        return record

    def local(self, name: str) -> T | None:
        """The record of that name among those already here, or None; loads no plugin."""
        self.fill()
        return self._records.get(name)

    def provider(self, name: str) -> str:
        """The distribution that the record came from: "ao-core", a plugin's, or "in-process"."""
        self.get(name)
        return self._providers[name]

    def builtin(self) -> list[T]:
        """The records of ao-core; loads no plugin."""
        self.fill()
        return [r for name, r in self._records.items() if self._providers[name] == CORE]

    def report(self, name: str, phase: str, error: BaseException) -> None:
        """Note a problem of the plugin that a record came from; see `PluginLoader.report`."""
        self._registry.loader.report(self.provider(name), phase, error)

    def names(self) -> list[str]:
        """All names, built-ins first, then plugins in the order they were loaded."""
        return list(self._all())

    def values(self) -> list[T]:
        """All records, in the order of `names`."""
        return list(self._all().values())

    def items(self) -> list[tuple[str, T]]:
        """All (name, record) pairs, in the order of `names`."""
        return list(self._all().items())

    def __contains__(self, name: str) -> bool:
        if self.local(name) is None:
            self._registry.load_plugins()
        return name in self._records

    def fill(self) -> None:
        """Take in the built-ins when the table is first touched."""
        if self._filled:
            return
        source = self._registry.builtin_sources.get(self._plural)
        if source is None:
            return
        with self._registry.lock:
            if not self._filled:
                # modules are imported here: what they compute must not depend on where the program is
                with neutral():
                    records = list(source())
                for record in records:
                    self._registry.insert(self, record, CORE)
                self._filled = True

    def insert(self, record: T, provider: str) -> None:
        """Write one record; `Registry.add` is the public way.

        Raises:
            PluginError: it has no name, or the name is taken; the record already here stays.
        """
        self.check_free(record, provider)
        check_record(record)
        name = name_of(record)
        self._providers[name] = provider
        self._records[name] = record

    def check_free(self, record: T, provider: str) -> None:
        """Raise `PluginError` where a record has no name, or one that is taken."""
        name = name_of(record)
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"{self.kind} {record!r} of {provider} has the name {name!r}; "
                "a name must be a string that is not empty"
            )
        if name in self._records:
            raise taken(self.kind, name, self._providers[name], provider)

    def _all(self) -> dict[str, T]:
        self.fill()
        self._registry.load_plugins()
        return self._records


def name_of(record: object) -> Any:
    """The name that a record is found by: `__name__` of a class, `name` of anything else."""
    return getattr(record, "__name__" if isinstance(record, type) else "name", None)


def taken(kind: str, name: str, owner: str, claimant: str) -> PluginError:
    """The error where two distributions claim one name."""
    return PluginError(
        f"{kind} {name!r} is provided by {owner} already and claimed by {claimant} too; the one of "
        f"{owner} stays. Rename one of them, or uninstall one of the packages."
    )
