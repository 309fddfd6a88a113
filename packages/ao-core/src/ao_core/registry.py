"""Tables of everything that has a name: built-ins first, plugins when a name is not built in.

One `Table` per kind of record; `registry` is the instance that the process shares.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch

from ao_core.errors import FrozenError, PluginError, UnknownNameError
from ao_core.records import DType, Kernel, Recipe, ScaleMethod, Transform

if TYPE_CHECKING:
    from ao_core.config import Config
    from ao_core.layouts.base import Layout
    from ao_core.plugins import PluginLoader

Record: TypeAlias = (
    "DType | Layout | Kernel | ScaleMethod | Transform | Recipe"
    " | type[torch.optim.Optimizer | torch.Tensor]"
)

__all__ = [
    "CORE",
    "IN_PROCESS",
    "Record",
    "Registry",
    "Table",
    "name_of",
    "register",
    "registry",
    "reopen",
]

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
            raise UnknownNameError(self.kind, name, self._records, self._registry.notes())
        return record

    def local(self, name: str) -> T | None:
        """The record of that name among those already here, or None; loads no plugin."""
        self.fill()
        return self._records.get(name)

    def provider(self, name: str) -> str:
        """The distribution that the record came from: "ao-core", a plugin's, or "in-process"."""
        self.get(name)
        return self._providers[name]

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
                for record in list(source()):
                    self._registry.insert(self, record, CORE)
                self._filled = True

    def insert(self, record: T, provider: str) -> None:
        """Write one record; `Registry.add` is the public way.

        Raises:
            PluginError: it has no name, or the name is taken; the record already here stays.
        """
        name = name_of(record)
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"{self.kind} {record!r} of {provider} has the name {name!r}; "
                "a name must be a string that is not empty"
            )
        if name in self._records:
            raise _taken(self.kind, name, self._providers[name], provider)
        self._providers[name] = provider
        self._records[name] = record

    def _all(self) -> dict[str, T]:
        self.fill()
        self._registry.load_plugins()
        return self._records


class Registry:
    """The tables, and what holds for all of them: discovery, freezing, the epoch.

    Args:
        builtin_sources: for each table (by attribute name) a function that returns its built-in
            records; called when the table is first touched, so that nothing is imported early.
    """

    def __init__(
        self, builtin_sources: dict[str, Callable[[], Iterable[Any]]] | None = None
    ) -> None:
        self.builtin_sources = dict(builtin_sources or {})
        #: grows with every record added and every reopening; a kernel bound on a tensor under
        #: another epoch must be selected again
        self.epoch = 0
        #: True from the first kernel selection on; then kernels and layouts cannot be added
        self.frozen = False
        #: held while records are added, never while they are read
        self.lock = threading.RLock()
        self._loader: PluginLoader | None = None
        self._transform_of: dict[type, tuple[Transform, str]] = {}

        self.dtypes: Table[DType] = Table(
            self, "dtypes", "dtype", "a DType", lambda r: isinstance(r, DType)
        )
        self.layouts: Table[Layout] = Table(
            self, "layouts", "layout", "an instance of a Layout", _is_layout
        )
        self.kernels: Table[Kernel] = Table(
            self, "kernels", "kernel", "a Kernel", lambda r: isinstance(r, Kernel)
        )
        self.scales: Table[ScaleMethod] = Table(
            self,
            "scales",
            "way to choose scales",
            "a ScaleMethod",
            lambda r: isinstance(r, ScaleMethod),
        )
        self.transforms: Table[Transform] = Table(
            self, "transforms", "transform", "a Transform", lambda r: isinstance(r, Transform)
        )
        self.recipes: Table[Recipe] = Table(
            self, "recipes", "recipe", "a Recipe", lambda r: isinstance(r, Recipe)
        )
        self.optimizers: Table[type[torch.optim.Optimizer]] = Table(
            self,
            "optimizers",
            "optimizer",
            "a subclass of torch.optim.Optimizer",
            lambda r: isinstance(r, type) and issubclass(r, torch.optim.Optimizer),
        )
        self.tensors: Table[type[torch.Tensor]] = Table(
            self,
            "tensors",
            "tensor class",
            "a subclass of torch.Tensor",
            lambda r: isinstance(r, type) and issubclass(r, torch.Tensor),
        )

    @property
    def tables(self) -> dict[str, Table[Any]]:
        """All tables by attribute name, which is also the name of their hook without "ao_"."""
        return {
            "dtypes": self.dtypes,
            "layouts": self.layouts,
            "kernels": self.kernels,
            "scales": self.scales,
            "transforms": self.transforms,
            "recipes": self.recipes,
            "optimizers": self.optimizers,
            "tensors": self.tensors,
        }

    def add(self, record: Record, provider: str = CORE) -> None:
        """Put a record into the table of its type.

        Raises:
            PluginError: it is no record, has no name, or its name (or a transform's configuration)
                is taken; the message names both providers.
            FrozenError: a kernel or layout, after a kernel was selected.
        """
        table = self._table_of(record)
        if self.frozen and (table is self.kernels or table is self.layouts):
            raise FrozenError(
                f"{table.kind} {getattr(record, 'name', record)!r} of {provider} comes too late: a "
                "kernel was selected already, and compiled functions would ignore it. Call "
                "ao_core.reopen() first; it also resets torch.compile."
            )
        with self.lock:
            table.fill()
            self.insert(table, record, provider)
            self.epoch += 1

    def transform_for(self, config_type: type[Config]) -> Transform:
        """The transform of exactly this class of configuration; a miss loads the plugins once.

        Raises:
            UnknownNameError: nobody registered one; says which package the class comes from.
        """
        self.transforms.fill()
        if config_type not in self._transform_of:
            self.load_plugins()
        if config_type not in self._transform_of:
            known = [known_type.__name__ for known_type in list(self._transform_of)]
            notes = [self.loader.origin(config_type), *self.notes()]
            raise UnknownNameError("configuration class", config_type.__name__, known, notes)
        return self._transform_of[config_type][0]

    def freeze(self) -> None:
        """Close the kernel and layout tables, plugins included; done at the first selection."""
        if not self.frozen:
            self.load_plugins()
            self.frozen = True

    def reopen(self) -> None:
        """Open the tables again, and forget what torch.compile traced with the old ones."""
        self.frozen = False
        self.epoch += 1
        # Dynamo takes seconds to import; where nobody imported it, nothing was traced.
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()

    @property
    def loader(self) -> PluginLoader:
        """The discovery that fills these tables; imported when first needed."""
        if self._loader is None:
            from ao_core.plugins import PluginLoader

            with self.lock:
                if self._loader is None:
                    self._loader = PluginLoader(self)
        return self._loader

    def load_plugins(self) -> None:
        """Load all plugins, once. With AO_STRICT=1, raise `PluginError` if one has a problem."""
        self.loader.load()

    def notes(self) -> list[str]:
        """What a failed lookup should mention: plugins that failed or were left out."""
        return self.loader.notes()

    def insert(self, table: Table[Any], record: Any, provider: str) -> None:
        """Put a record into a known table; `add` is the public way."""
        if isinstance(record, Transform):
            config_type = record.config_type
            if config_type in self._transform_of:
                owner = self._transform_of[config_type][1]
                raise _taken("configuration class", config_type.__name__, owner, provider)
            table.insert(record, provider)
            self._transform_of[config_type] = (record, provider)
            return
        table.insert(record, provider)
        if table is self.tensors:
            torch.serialization.add_safe_globals([record])

    def _table_of(self, record: object) -> Table[Any]:
        for table in self.tables.values():
            if table.holds(record):
                return table
        expected = ", ".join(table.expects for table in self.tables.values())
        raise PluginError(
            f"record={record!r} is a {type(record).__name__}, which no table holds; "
            f"give one of: {expected}"
        )


def name_of(record: object) -> Any:
    """The name that a record is found by: `__name__` of a class, `name` of anything else."""
    return getattr(record, "__name__" if isinstance(record, type) else "name", None)


def _is_layout(record: object) -> bool:
    from ao_core.layouts.base import Layout

    return isinstance(record, Layout)


def _taken(kind: str, name: str, owner: str, claimant: str) -> PluginError:
    return PluginError(
        f"{kind} {name!r} is provided by {owner} already and claimed by {claimant} too; the one of "
        f"{owner} stays. Rename one of them, or uninstall one of the packages."
    )


def _builtin_dtypes() -> Iterable[DType]:
    from ao_core.dtypes import BUILTIN_DTYPES

    return BUILTIN_DTYPES


def _builtin_scales() -> Iterable[ScaleMethod]:
    from ao_core.scales import BUILTIN_SCALES

    return BUILTIN_SCALES


def _builtin_kernels() -> Iterable[Kernel]:
    # above this module in the layers, hence only when the table is first touched
    return import_module("ao_core.torch_kernels").BUILTIN_KERNELS  # type: ignore[no-any-return]


def _builtin_transforms() -> Iterable[Transform]:
    return import_module("ao_core.recipes").BUILTIN_TRANSFORMS  # type: ignore[no-any-return]


def _builtin_recipes() -> Iterable[Recipe]:
    return import_module("ao_core.recipes").BUILTIN_RECIPES  # type: ignore[no-any-return]


def _builtin_layouts() -> Iterable[Layout]:
    from ao_core.layouts import BUILTIN_LAYOUTS

    return BUILTIN_LAYOUTS


#: The tables of this process.
registry = Registry(
    {
        "dtypes": _builtin_dtypes,
        "layouts": _builtin_layouts,
        "kernels": _builtin_kernels,
        "scales": _builtin_scales,
        "transforms": _builtin_transforms,
        "recipes": _builtin_recipes,
    }
)


def register(record: Record) -> None:
    """Add a record without a package around it, for notebooks and tests; see `Registry.add`."""
    registry.add(record, provider=IN_PROCESS)


def reopen() -> None:
    """Allow kernels and layouts to be registered again; see `Registry.reopen`."""
    registry.reopen()
