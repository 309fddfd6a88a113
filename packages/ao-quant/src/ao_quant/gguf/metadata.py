"""The metadata of GGUF files as Python and numpy values, with their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ao_core.ext import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["add_metadata", "gguf_package"]


def gguf_package() -> Any:
    """The package `gguf`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError(
            "gguf", "ao-quant[gguf]", "Reading and writing GGUF files"
        ) from error
    return gguf


def add_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    """Tell the writer of every key, in order.

    Raises:
        ConfigError: a value that GGUF, or the `gguf` package, cannot hold.
    """
    for key, value in metadata.items():
        plain, kind, inner = _typed(key, value)
        writer.add_key_value(key, plain, kind, sub_type=inner)
        if key == "general.alignment":
            if kind.name != "UINT32" or plain < 8 or plain & (plain - 1):
                raise ConfigError(f"metadata[{key!r}]={value!r}: use a power of two, at least 8")
            writer.data_alignment = plain


def _typed(key: str, value: Any) -> tuple[Any, Any, Any]:
    """(value, its GGUF type, the type of its items if it is an array)."""
    import numpy

    types = gguf_package().GGUFValueType
    if isinstance(value, (list, tuple, numpy.ndarray)):
        items = value.tolist() if isinstance(value, numpy.ndarray) else list(value)
        inner = _scalar_type(value) if isinstance(value, numpy.ndarray) else _common_type(items)
        if inner is not None and getattr(value, "ndim", 1) == 1 and items:
            return items, types.ARRAY, inner
    elif (kind := _scalar_type(value)) is not None:
        return getattr(value, "item", lambda: value)(), kind, None
    raise ConfigError(
        f"metadata[{key!r}]={value!r}: use a str, bool, number or numpy scalar, or a list or array of "
        "these that is not empty and of one kind"
    )


def _common_type(items: list[Any]) -> Any:
    """The type of the items of a list, None if there is no common one; integers have signs in arrays."""
    types = gguf_package().GGUFValueType
    found = {_scalar_type(item) for item in items}
    if found <= {types.UINT32, types.INT32}:
        small = all(-(1 << 31) <= item < 1 << 31 for item in items)
        return types.INT32 if small else types.INT64
    if found <= {types.UINT32, types.INT32, types.INT64}:
        return types.INT64
    return found.pop() if len(found) == 1 else None


def _scalar_type(value: Any) -> Any:
    """The type of a scalar, or of the items of a numpy array; None: there is none."""
    types = gguf_package().GGUFValueType
    if (dtype := getattr(value, "dtype", None)) is not None:
        return getattr(types, str(dtype).upper(), None)
    if isinstance(value, bool):
        return types.BOOL
    if isinstance(value, str):
        return types.STRING
    if isinstance(value, float):
        return types.FLOAT32
    if not isinstance(value, int):
        return None
    ranges = (
        (types.UINT32, 0, 32),
        (types.INT32, 1 << 31, 32),
        (types.INT64, 1 << 63, 64),
        (types.UINT64, 0, 64),
    )
    return next((kind for kind, low, bits in ranges if 0 <= value + low < 1 << bits), None)
