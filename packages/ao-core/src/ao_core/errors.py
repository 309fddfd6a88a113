"""The exceptions of ao. Each names the parameter, the value, the reason and what would work."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "AoError",
    "CheckpointError",
    "ConfigError",
    "DequantizeWarning",
    "FrozenError",
    "GraphError",
    "MissingExtraError",
    "PluginError",
    "QuantizationError",
    "StorageError",
    "UnknownNameError",
    "UnsupportedOp",
]


class AoError(Exception):
    """Base of all errors raised by ao packages."""


class ConfigError(AoError, ValueError):
    """A parameter of a configuration has a value that cannot work."""


class QuantizationError(AoError, ValueError):
    """A tensor cannot be quantized (NaN or inf values, meta device, integer dtype, …)."""


class GraphError(AoError, RuntimeError):
    """A model cannot be traced or copied, or a change of it alters its outputs; the model is as it was."""


class UnsupportedOp(AoError, NotImplementedError):
    """An operation that a layout or tensor cannot do; names the op and the layout."""


class StorageError(AoError, RuntimeError):
    """A program asks for the memory of a tensor that has no storage of its own, e.g. to write it into a file.

    Not a `NotImplementedError`, which programs that save models take to mean that there is nothing to write.
    """


class DequantizeWarning(UserWarning):
    """An op without a rule for quantized tensors was computed on the dequantized values; once per op."""


class CheckpointError(AoError, ValueError):
    """A checkpoint is corrupted, truncated, of another kind, or needs something missing."""


class PluginError(AoError):
    """A plugin could not be loaded, or two records claim one name."""


class FrozenError(AoError, RuntimeError):
    """A record was registered after the kernel tables were frozen."""


class MissingExtraError(AoError, ImportError):
    """An optional dependency is not installed; says which extra brings it."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {module!r}, which is not installed. "
            f'Install it with: pip install "{extra}"'
        )


class UnknownNameError(AoError, LookupError):
    """A name that neither ao nor a plugin has registered."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], notes: Iterable[str] = ()
    ) -> None:
        known = sorted(known)
        close = get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        tail = "".join(f" {note}" for note in notes)
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.{tail}")
        self.kind, self.name, self.known = kind, name, known
