"""Tables of everything that has a name: built-ins first, plugins when a name is not built in.

One `Table` per kind of record; `registry` is the instance that the process shares.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ao_core.errors import FrozenError, PluginError, UnknownNameError
from ao_core.folder_records import FolderKind
from ao_core.interchange_records import Interchange
from ao_core.known import whose
from ao_core.model_records import ModelTransform
from ao_core.records import (
    Algorithm,
    DType,
    Kernel,
    Op,
    Recipe,
    ScaleMethod,
    Transform,
)
from ao_core.table import CORE, IN_PROCESS, Table, name_of, taken

if TYPE_CHECKING:
    from ao_core.config import Config
    from ao_core.layouts.base import Layout
    from ao_core.plugins import PluginLoader

Record: TypeAlias = (
    "DType | Layout | Op | Kernel | ScaleMethod | Transform | Algorithm | ModelTransform | Recipe"
    " | FolderKind | Interchange | type[torch.optim.Optimizer]"
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
        #: grows with every record added and every reopening; a kernel that was selected under
        #: another epoch must be selected again
        self.epoch = 0
        #: how often the tables were reopened; what a machine can do is asked again after that
        self.reopened = 0
        #: True from the first kernel selection on; then ops, kernels and layouts cannot be added
        self.frozen = False
        #: held while records are added, never while they are read
        self.lock = threading.RLock()
        self._loader: PluginLoader | None = None
        self._transform_of: dict[type, tuple[Transform, str]] = {}
        self._algorithm_of: dict[type, tuple[Algorithm, str]] = {}
        self._model_transform_of: dict[type, tuple[ModelTransform, str]] = {}

        self.dtypes: Table[DType] = Table(
            self, "dtypes", "dtype", "a DType", lambda r: isinstance(r, DType)
        )
        self.layouts: Table[Layout] = Table(
            self, "layouts", "layout", "an instance of a Layout", _is_layout
        )
        self.ops: Table[Op] = Table(self, "ops", "op", "an Op", lambda r: isinstance(r, Op))
        self.kernels: Table[Kernel] = Table(
            self, "kernels", "kernel", "a Kernel", lambda r: isinstance(r, Kernel)
        )
        self.scale_methods: Table[ScaleMethod] = Table(
            self,
            "scale_methods",
            "way to choose scales",
            "a ScaleMethod",
            lambda r: isinstance(r, ScaleMethod),
        )
        self.transforms: Table[Transform] = Table(
            self, "transforms", "transform", "a Transform", lambda r: isinstance(r, Transform)
        )
        self.algorithms: Table[Algorithm] = Table(
            self, "algorithms", "algorithm", "an Algorithm", lambda r: isinstance(r, Algorithm)
        )
        self.model_transforms: Table[ModelTransform] = Table(
            self,
            "model_transforms",
            "transform of a model",
            "a ModelTransform",
            lambda r: isinstance(r, ModelTransform),
        )
        self.recipes: Table[Recipe] = Table(
            self, "recipes", "recipe", "a Recipe", lambda r: isinstance(r, Recipe)
        )
        self.folder_kinds: Table[FolderKind] = Table(
            self,
            "folder_kinds",
            "kind of folder",
            "a FolderKind",
            lambda r: isinstance(r, FolderKind),
        )
        self.interchange: Table[Interchange] = Table(
            self,
            "interchange",
            "format of checkpoints",
            "an Interchange",
            lambda r: isinstance(r, Interchange),
        )
        self.optimizers: Table[type[torch.optim.Optimizer]] = Table(
            self,
            "optimizers",
            "optimizer",
            "a subclass of torch.optim.Optimizer",
            lambda r: isinstance(r, type) and issubclass(r, torch.optim.Optimizer),
        )

    @property
    def tables(self) -> dict[str, Table[Any]]:
        """All tables by attribute name, which is also the name of their hook without "ao_"."""
        return {
            "dtypes": self.dtypes,
            "layouts": self.layouts,
            "ops": self.ops,
            "kernels": self.kernels,
            "scale_methods": self.scale_methods,
            "transforms": self.transforms,
            "algorithms": self.algorithms,
            "model_transforms": self.model_transforms,
            "recipes": self.recipes,
            "folder_kinds": self.folder_kinds,
            "interchange": self.interchange,
            "optimizers": self.optimizers,
        }

    def add(self, record: Record, provider: str = CORE) -> None:
        """Put a record into the table of its type.

        Raises:
            PluginError: it is not a record, has no name, or its name (or a transform's configuration)
                is taken; the message names both providers.
            FrozenError: an op, a kernel or a layout, after a kernel was selected.
        """
        table = self._table_of(record)
        if self.frozen and table in (self.ops, self.kernels, self.layouts):
            raise FrozenError(
                f"{table.kind} {getattr(record, 'name', record)!r} of {provider} comes too late: a "
                "kernel was selected already, and compiled functions would ignore it. Call "
                "ao_core.reopen() first; it also resets torch.compile."
            )
        with self.lock:
            table.fill()
            if table is self.ops:
                self.kernels.fill()  # the reference goes there
            self.insert(table, record, provider)
            self.epoch += 1

    def plugins_added(self) -> None:
        """Start an epoch: what was selected before plugins were loaded is selected again."""
        with self.lock:
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
            if config_type in self._algorithm_of or config_type in self._model_transform_of:
                notes = ["It needs calibration data: quantize_(model, config, data=batches)."]
            raise UnknownNameError("configuration class", config_type.__name__, known, notes)
        return self._transform_of[config_type][0]

    def algorithm_for(self, config_type: type[Config]) -> Algorithm | None:
        """The algorithm of exactly this class of configuration, if any; a miss loads the plugins once."""
        if config_type not in self._algorithm_of:
            self.load_plugins()
        found = self._algorithm_of.get(config_type)
        return None if found is None else found[0]

    def model_transform_for(self, config_type: type[Config]) -> ModelTransform | None:
        """The model transform of exactly this class of configuration, if any; as `algorithm_for`."""
        if config_type not in self._model_transform_of:
            self.load_plugins()
        found = self._model_transform_of.get(config_type)
        return None if found is None else found[0]

    def freeze(self) -> None:
        """Close the tables of ops, kernels and layouts, plugins included; done at the first selection.

        A plugin that computes while it is imported selects kernels, too: among those that are here
        already, and the tables stay open for the others.
        """
        if not self.frozen:
            self.load_plugins()
            self.frozen = not self.loader.loading

    def reopen(self) -> None:
        """Open the tables again, and forget what torch.compile traced with the old ones.

        Plugins that were left out are tried again at the next lookup, and new ones are found.
        """
        with self.lock:
            self.frozen = False
            self.epoch += 1
            self.reopened += 1
        if self._loader is not None:
            self._loader.retry()
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

    def notes(self, name: str = "") -> list[str]:
        """What a failed lookup should mention: who has the name, and plugins that failed or were left out."""
        return [*whose(name), *self.loader.notes()]

    def after_fork(self) -> None:
        """In the child of a fork: locks that other threads of the parent held are free again."""
        self.lock = threading.RLock()
        if self._loader is not None:
            self._loader.after_fork()

    def insert(self, table: Table[Any], record: Any, provider: str) -> None:
        """Put a record into a known table; `add` is the public way."""
        self._check_shared_name(table, record, provider)
        if isinstance(record, (Transform, Algorithm, ModelTransform)):
            claims: dict[type, tuple[Any, str]] = {
                Transform: self._transform_of,
                Algorithm: self._algorithm_of,
                ModelTransform: self._model_transform_of,
            }[type(record)]  # type: ignore[assignment]
            config_type = record.config_type
            if config_type in claims:
                owner = claims[config_type][1]
                raise taken("configuration class", config_type.__name__, owner, provider)
            table.insert(record, provider)
            claims[config_type] = (record, provider)
            return
        if isinstance(record, Op):
            table.check_free(record, provider)
            self.kernels.insert(record.reference_kernel, provider)
        table.insert(record, provider)

    def _check_shared_name(self, table: Table[Any], record: Any, provider: str) -> None:
        """Raise where a recipe has the name of another package's transform or algorithm, or the reverse.

        `resolve_config` finds all by one name, and a package must not change what another's name means.
        """
        shared = (self.recipes, self.transforms, self.algorithms, self.model_transforms)
        if table not in shared or provider == CORE:  # which comes first
            return
        name = name_of(record)
        for others in (each for each in shared if each is not table):
            if others.local(name) is not None and others.provider(name) != provider:
                claimant = f"{provider} (as a {table.kind})"
                raise taken(others.kind, name, others.provider(name), claimant)

    def _table_of(self, record: object) -> Table[Any]:
        for table in self.tables.values():
            if table.holds(record):
                return table
        expected = ", ".join(table.expects for table in self.tables.values())
        raise PluginError(
            f"record={record!r} is a {type(record).__name__}, which no table holds; "
            f"give one of: {expected}"
        )


def _is_layout(record: object) -> bool:
    from ao_core.layouts.base import Layout

    return isinstance(record, Layout)


def _builtin_dtypes() -> Iterable[DType]:
    from ao_core.dtypes import BUILTIN_DTYPES

    return BUILTIN_DTYPES


def _builtin_scales() -> Iterable[ScaleMethod]:
    # above this module in the layers, hence only when the table is first touched
    return import_module("ao_core.scales").BUILTIN_SCALES  # type: ignore[no-any-return]


def _builtin_ops() -> Iterable[Op]:
    return import_module("ao_core.ops").BUILTIN_OPS  # type: ignore[no-any-return]


def _builtin_kernels() -> Iterable[Kernel]:
    registry.ops.fill()  # brings the reference of each
    return import_module("ao_core.torch_kernels").BUILTIN_KERNELS  # type: ignore[no-any-return]


def _builtin_transforms() -> Iterable[Transform]:
    return import_module("ao_core.recipes").BUILTIN_TRANSFORMS  # type: ignore[no-any-return]


def _builtin_layouts() -> Iterable[Layout]:
    from ao_core.layouts import BUILTIN_LAYOUTS

    return BUILTIN_LAYOUTS


#: The tables of this process.
registry = Registry(
    {
        "dtypes": _builtin_dtypes,
        "layouts": _builtin_layouts,
        "ops": _builtin_ops,
        "kernels": _builtin_kernels,
        "scale_methods": _builtin_scales,
        "transforms": _builtin_transforms,
    }
)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=registry.after_fork)


def register(record: Record) -> None:
    """Add a record without a package around it, for notebooks and tests; see `Registry.add`."""
    registry.add(record, provider=IN_PROCESS)


def reopen() -> None:
    """Allow ops, kernels and layouts to be registered again; see `Registry.reopen`."""
    registry.reopen()
