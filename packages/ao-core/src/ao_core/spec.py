"""`Spec`: what a quantized tensor is, as frozen, hashable data without tensors or objects."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

from ao_core.arguments import check_fields
from ao_core.errors import ConfigError
from ao_core.schema import (
    BOOL,
    FINITE,
    TEXT,
    Fields,
    Items,
    Number,
    OneOf,
    Optional,
    Row,
    SchemaError,
    check,
)
from ao_core.steps import STEP_FIELDS, Step, check_steps

__all__ = [
    "BLOCKSIZE",
    "NO_SCALE",
    "OPTIONS",
    "ROW",
    "SCALE_DTYPES",
    "TENSOR",
    "WHOLE",
    "ZERO_POINT_KINDS",
    "Primitive",
    "Spec",
    "blocks_of_numbers",
    "blocksize_of",
    "matrix_block",
]

Primitive: TypeAlias = bool | int | float | str

#: In a block, the extent of a whole dimension, whatever its size.
WHOLE = -1
#: the block of one scale per row, and that of one scale per tensor, of a matrix
ROW = (1, WHOLE)
TENSOR = (WHOLE, WHOLE)
#: Names of the number formats a scale may be stored in (or a nested `Spec`: double quantization).
SCALE_DTYPES = ("float32", "bfloat16", "float16", "e8m0", "e4m3")
#: in place of one: the format has no scale, value = decode(code)
NO_SCALE = "none"
#: options that ao-core reads, and any kernel may meet: how powers of two and other scales are chosen, how
#: operations in place round, how float8 matmuls add up, and what FSDP2 gathers
OPTIONS = ("mx_mode", "scale_rule", "rounding", "fast_accum", "enable_fsdp_float8_all_gather")
#: the option "blocksize" of layouts of square blocks, where it is not set
BLOCKSIZE = 64
#: "none": symmetric; "int": uint8 zero point in the domain of codes; "float": the same, not rounded;
#: "offset": in the domain of values, what is taken off after scaling, and stored as the scale is.
ZERO_POINT_KINDS = ("none", "int", "float", "offset")


def matrix_block(block: tuple[int, ...]) -> tuple[int, int]:
    """Extents of rows and columns of a block of a matrix; of one extent, along a row."""
    rows, columns = (1, *block)[-2:]
    return rows, columns


def _as_written(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Fields of a spec; some only where they are set, so that other files stay what they were."""
    return {name: value for name, value in fields if name not in ("static", "input") or value}


@dataclass(frozen=True)
class Spec:
    """The format of a `QTensor`: value = (decode(code) - zero) * scale, one scale and zero a block.

    With an offset zero point it is value = decode(code) * scale - zero; without a scale, decode(code).

    Metadata of traced tensors: Dynamo deep-copies it and compares it with `==`, so fields hold
    primitives and nested `Spec`s only, never records from the registry.
    """

    #: name of a number format, e.g. "int4", "nf4", "f8e4m3"
    dtype: str
    #: elements that share one scale, aligned to the last dimensions: (1, 128) is a group of 128
    #: along the last one, `WHOLE` is all of a dimension, missing leading dimensions count 1
    block: tuple[int, ...]
    #: storage of the scale: one of `SCALE_DTYPES`, or the `Spec` of a scale that is a `QTensor`; `NO_SCALE`
    #: for formats of kind "dense", which have none, and for no others
    scale_dtype: str | Spec = "float32"
    #: one of `ZERO_POINT_KINDS`
    zero_point: str = "none"
    #: name of the layout that arranges the parts in memory
    layout: str = "plain"
    #: how activations are quantized before the matmul, at run time; None: they are not
    act: Spec | None = None
    #: further primitives, sorted by name, e.g. how scales are chosen: "mx_mode" (one of `MX_MODES`) where
    #: they are powers of two, "scale_rule" (one of `SCALE_RULES`). A name must be among `OPTIONS`, or
    #: the `options` of the layout or of a kernel; no tensor is made with one that nobody knows.
    options: tuple[tuple[str, Primitive], ...] = ()
    #: in `act`, or in the `Spec` of its scales: the one scale, and zero point, is known beforehand and a part
    #: of the weight, `act_scale` (and `act_zero_point`); otherwise they are chosen for each call
    static: bool = False
    #: steps that activations go through before the matmul and before `act`; the stored values are those
    #: of the stepped weight, and `QTensor.dequantize` undoes the steps; see `ao_core.steps`. At most one of
    #: each kind. Not in `act` or `scale_dtype`
    input: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.block or any(b != WHOLE and b < 1 for b in self.block):
            raise ConfigError(
                f"block={self.block!r}: each extent must be positive or {WHOLE} (the whole dimension)"
            )
        known = (*SCALE_DTYPES, NO_SCALE)
        if isinstance(self.scale_dtype, str) and self.scale_dtype not in known:
            raise ConfigError(
                f"scale_dtype={self.scale_dtype!r} is unknown; use one of {', '.join(known)} or a Spec"
            )
        if self.zero_point not in ZERO_POINT_KINDS:
            raise ConfigError(
                f"zero_point={self.zero_point!r} is unknown; use one of {', '.join(ZERO_POINT_KINDS)}"
            )
        if self.scale_dtype == NO_SCALE and self.zero_point != "none":
            raise ConfigError(
                f"zero_point={self.zero_point!r} with scale_dtype={NO_SCALE!r}: a format without a scale "
                "has no zero point either; use zero_point='none'"
            )
        check_steps(self.input)
        for name, nested in (("act", self.act), ("scale_dtype", self.scale_dtype)):
            if isinstance(nested, Spec) and nested.input:
                raise ConfigError(
                    f"{name}=({nested}) has input steps; only the format of a weight has them"
                )
        if self.static and self.block != (WHOLE, WHOLE):
            raise ConfigError(
                f"static=True with block={self.block!r}: the number of tokens differs from call to call, "
                f"so only one scale for all can be known beforehand; use block={(WHOLE, WHOLE)!r}"
            )
        shared = isinstance(self.scale_dtype, Spec) and self.scale_dtype.is_static
        if shared and (self.static or self.zero_point != "none"):
            raise ConfigError(
                f"scale_dtype=({self.scale_dtype}) with static={self.static}, "
                f"zero_point={self.zero_point!r}: where scales share a static one, they and their zero "
                "points are chosen for each call; use static=False and zero_point='none'"
            )

    @property
    def is_static(self) -> bool:
        """Whether a scale is known beforehand: the one of all values, or the one that scales share."""
        return self.static or (isinstance(self.scale_dtype, Spec) and self.scale_dtype.is_static)

    @property
    def chosen_scale_dtype(self) -> str:
        """The dtype in which scales are first chosen: float32 where they are quantized afterwards."""
        return self.scale_dtype if isinstance(self.scale_dtype, str) else "float32"

    def in_layout(self, layout: str) -> Spec:
        """The same format in another layout."""
        return self if layout == self.layout else _in_layout(self, layout)

    def option(self, name: str, default: Primitive) -> Primitive:
        """The value of an option, or `default` where it is not set."""
        return dict(self.options).get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return asdict(self, dict_factory=_as_written)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Spec:
        """Rebuild a `Spec` from `to_dict`'s form (lists and tuples alike).

        Raises:
            ConfigError: a field is unknown, missing, of another type or not one of its values.
        """
        try:
            check(data, _FIELDS, "Spec")
        except SchemaError as error:
            raise ConfigError(str(error)) from error
        values = dict(data)
        values["block"] = tuple(values["block"])
        values["options"] = tuple((name, value) for name, value in values.get("options", ()))
        values["input"] = tuple(Step(**step) for step in values.get("input", ()))
        for nested in ("scale_dtype", "act"):
            if isinstance(values.get(nested), dict):
                values[nested] = cls.from_dict(values[nested])
        return cls(**values)

    def __str__(self) -> str:
        steps = f" input=({', '.join(map(str, self.input))})" if self.input else ""
        if self.scale_dtype == NO_SCALE:  # then there are no blocks either
            return f"{self.dtype}{steps} {self.layout}"
        sep = "×"
        block = sep.join("*" if b == WHOLE else str(b) for b in self.block)
        scale = f"({self.scale_dtype})" if isinstance(self.scale_dtype, Spec) else self.scale_dtype
        text = f"{self.dtype}[{block}] scale={scale}"
        if self.zero_point != "none":
            text += f" zero_point={self.zero_point}"
        if self.static:
            text += " static"
        text += steps
        if self.act is not None:
            text += f" act=({self.act})"
        return f"{text} {self.layout}"


_PRIMITIVE = OneOf((BOOL, TEXT, Number(-(1 << 63), (1 << 63) - 1), FINITE), "a primitive")
#: what `Spec.from_dict` takes
_FIELDS: Fields = Fields(
    {"dtype": TEXT, "block": Items(Number(WHOLE, 1 << 48), least=1, most=64)},
    {
        "scale_dtype": OneOf((TEXT, lambda: _FIELDS)),
        "zero_point": TEXT,
        "layout": TEXT,
        "act": Optional(lambda: _FIELDS),
        "options": Items(Row((TEXT, _PRIMITIVE))),
        "static": BOOL,
        "input": Items(STEP_FIELDS),
    },
    closed=True,
)


@lru_cache(maxsize=512)
def _in_layout(spec: Spec, layout: str) -> Spec:
    return replace(spec, layout=layout)


def blocksize_of(spec: Spec) -> int:
    """Rows and columns of a stored block, in layouts of square blocks and those of kernels for them."""
    return int(spec.option("blocksize", BLOCKSIZE))


@lru_cache(maxsize=256)
def blocks_of_numbers(dtype: str, block: tuple[int, ...], has_zero_point: bool) -> Spec:
    """What counts of a format where scales are given: numbers, blocks, and whether there are zero points."""
    return Spec(dtype, block, zero_point="float" if has_zero_point else "none")
