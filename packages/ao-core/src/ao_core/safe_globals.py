"""What ao's tensors are pickled as, for ``torch.load(…, weights_only=True)`` after ``import ao_core``.

torch asks for the marked classes when it loads a file, and only then are they imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["CLASSES", "mark"]

#: (module, class) of what stands in a pickle of a `QTensor` or a `ComputeWeight`
CLASSES = (
    ("ao_core.tensor.qtensor", "QTensor"),
    ("ao_core.compute.weight", "ComputeWeight"),
    ("ao_core.compute.matmuls", "Matmuls"),
    ("ao_core.spec", "Spec"),
    ("ao_core.steps", "Step"),
)
_SERIALIZATION = "torch.serialization"


class _Later(tuple[str, str]):
    """What `add_safe_globals` takes, (class, its full name); the class is imported when it is unpacked."""

    def __iter__(self) -> Iterator[Any]:
        module, name = self[0], self[1]
        # the module's package fills the tables of operations
        import_module(module.rpartition(".")[0])
        return iter((getattr(import_module(module), name.rpartition(".")[2]), name))


class _AfterTorch(MetaPathFinder):
    """Marks the classes as soon as somebody imports torch; then it goes away."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, whose loader marks the classes when it has run."""
        if fullname != _SERIALIZATION:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def run_and_mark(module: ModuleType) -> None:
                run(module)
                _mark(module)

            loader.exec_module = run_and_mark  # type: ignore[method-assign]
        return spec


def mark() -> None:
    """Mark the classes as safe: now, or where torch is not imported yet, when it is."""
    module = sys.modules.get(_SERIALIZATION)
    if module is not None:
        _mark(module)
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


def _mark(serialization: ModuleType) -> None:
    serialization.add_safe_globals(
        [_Later((module, f"{module}.{name}")) for module, name in CLASSES]
    )
