"""`QuantizationPlan`: the format of each parameter, with all that was measured to choose it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_core import Config, FqnToConfig, config_from_dict, config_to_dict
from ao_core.ext import ConfigError, json_object
from ao_core.ext.saving import read_text
from ao_core.ext.schema import (
    ANY,
    BOOL,
    COUNT,
    FINITE,
    SHAPE,
    TEXT,
    Fields,
    Items,
    OneOf,
    Optional,
    Row,
    SchemaError,
    Table,
    check,
)
from ao_quant.planning.ranks import rank_correlation
from ao_quant.planning.solve import frontier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Choice", "Kept", "Option", "QuantizationPlan", "Uniform"]

_FORMAT = 5
_SIZE = OneOf((COUNT, FINITE), "a number")
_OPTION = Fields({"config": Optional(Table(ANY)), "bytes": _SIZE, "data": _SIZE, "error": _SIZE})
_CHOICE = Fields(
    {
        "fqn": TEXT,
        "shape": SHAPE,
        "tied": Items(TEXT),
        "picked": COUNT,
        "options": Items(_OPTION, 1),
        "refused": Items(Row((Table(ANY), TEXT))),
    }
)
_UNIFORM = Fields(
    {
        "config": Table(ANY),
        "bytes": _SIZE,
        "error": _SIZE,
        "measured": Optional(_SIZE),
        "speed": Optional(_SIZE),
        "heads": BOOL,
    }
)
#: what the JSON form of a plan must be
_FIELDS = Fields(
    {
        "entries": Table(ANY),
        "hash": TEXT,
        "goal": TEXT,
        "limit": _SIZE,
        "measure": TEXT,
        "measured": Optional(_SIZE),
        "speed": Optional(_SIZE),
        "fixed": COUNT,
        "choices": Items(_CHOICE),
        "uniform": Items(_UNIFORM),
        "checks": Items(Row((_SIZE, _SIZE))),
        "kept": Items(Fields({"fqn": TEXT, "bytes": COUNT, "reason": TEXT}, closed=True)),
    }
)


@dataclass(frozen=True)
class Option:
    """A parameter in one of the formats."""

    #: None: as it is
    config: Config | None
    #: what it adds to the files of `save_model` at most: data, names, format and checksums
    bytes: int
    #: the data alone
    data: int
    #: as the measure of the plan has it
    error: float


@dataclass(frozen=True)
class Choice:
    """One parameter that was planned (tied ones: one choice, all names)."""

    fqn: str
    shape: tuple[int, ...]
    options: tuple[Option, ...]
    #: index of the option chosen
    picked: int
    tied: tuple[str, ...] = ()
    #: candidates that cannot hold it: (configuration, reason)
    refused: tuple[tuple[Config, str], ...] = ()

    @property
    def option(self) -> Option:
        """The option chosen."""
        return self.options[self.picked]


@dataclass(frozen=True)
class Uniform:
    """One format for all weights that can have it."""

    config: Config
    #: of the files
    bytes: int
    #: the sum of the errors of the weights
    error: float
    #: on the data or the sample; None where it was too large, or predicted to be far worse than the plan
    measured: float | None = None
    #: measured tokens per second; None where nothing is timed
    speed: float | None = None
    #: whether output heads have it too; else they have what `quantize_` gives them
    heads: bool = True


@dataclass(frozen=True)
class Kept:
    """A parameter that was not planned: it is saved as it is."""

    fqn: str
    bytes: int
    reason: str


@dataclass(frozen=True, repr=False)
class QuantizationPlan(FqnToConfig):
    """A `FqnToConfig` for `quantize_`, made by `plan`: it keeps what is not among its choices.

    `str()` is a table, `plot()` the curve it was chosen from, `to_json` and `save` write all of it.
    """

    #: the format that each weight gets
    choices: tuple[Choice, ...]
    #: weights that stay as they are, with reasons
    kept: tuple[Kept, ...]
    #: what was asked for: "budget", "bits", "max_kl" or "tokens_per_second", and how much
    goal: str
    limit: float
    #: "weight", "layer", "output" or "kl"; see `plan`
    measure: str
    #: bytes of the files beside the choices: what is kept, buffers, headers
    fixed: int
    #: the error of the choices together on the sample or the data; None without one
    measured: float | None
    #: tokens per second, measured on the device where it was made; None where nothing was timed
    speed: float | None
    #: each candidate for all weights; the plan is none of them where they are worse
    uniform: tuple[Uniform, ...]
    #: (predicted, measured) errors of groups of weights, by which predictions were corrected
    checks: tuple[tuple[float, float], ...]

    def __init__(
        self,
        choices: Sequence[Choice],
        kept: Sequence[Kept],
        *,
        goal: str,
        limit: float,
        measure: str,
        fixed: int,
        measured: float | None = None,
        speed: float | None = None,
        uniform: Sequence[Uniform] = (),
        checks: Sequence[tuple[float, float]] = (),
    ) -> None:
        entries: dict[str, Config | None] = {c.fqn: c.option.config for c in choices}
        super().__init__({**entries, "*": None})
        values = {
            "choices": tuple(choices),
            "kept": tuple(kept),
            "goal": goal,
            "limit": limit,
            "measure": measure,
            "fixed": fixed,
            "measured": measured,
            "speed": speed,
            "uniform": tuple(uniform),
            "checks": tuple(checks),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def having(self, **fields: Any) -> QuantizationPlan:
        """The same with other values of some fields."""
        names = ("choices", "kept", "goal", "limit", "measure", "fixed", "measured", "speed")
        return QuantizationPlan(
            **{name: getattr(self, name) for name in (*names, "uniform", "checks")} | fields
        )

    def picking(
        self, picks: Sequence[int], *, measured: float | None = None, fixed: int | None = None
    ) -> QuantizationPlan:
        """The same with other options chosen."""
        return self.having(
            choices=[replace(c, picked=pick) for c, pick in zip(self.choices, picks, strict=True)],
            fixed=self.fixed if fixed is None else fixed,
            measured=measured,
            speed=None,
        )

    def fits(self, other: QuantizationPlan) -> bool:
        """Whether another plan of the same weights is within what was asked for, but for its error."""
        if self.goal == "tokens_per_second":
            return other.speed is not None and other.speed >= self.limit
        if self.goal == "max_kl":
            return other.bytes <= self.bytes
        return (other.bytes if self.goal == "budget" else other.bits) <= self.limit

    @property
    def taken(self) -> Uniform | None:
        """The recipe for all weights that this plan is; None: it is none of them."""
        own = (self.bytes, self.error)
        return next((each for each in self.uniform if (each.bytes, each.error) == own), None)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted and measured errors; None where fewer than three were measured."""
        measured = [(u.error, u.measured) for u in self.uniform if u.measured is not None]
        return rank_correlation([*self.checks, *measured])

    @property
    def picks(self) -> tuple[int, ...]:
        """Index of the option of each choice."""
        return tuple(choice.picked for choice in self.choices)

    @property
    def bytes(self) -> int:
        """What the files of weights that `save_model` writes, and their index, have at most."""
        return self.fixed + sum(choice.option.bytes for choice in self.choices)

    @property
    def bits(self) -> float:
        """Mean bits per weight of the planned parameters: codes, scales and zero points."""
        weights = sum(prod(choice.shape) for choice in self.choices)
        return 8.0 * sum(choice.option.data for choice in self.choices) / max(weights, 1)

    @property
    def error(self) -> float:
        """Sum of the errors of the choices."""
        return fsum(choice.option.error for choice in self.choices)

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """(bytes of the files, sum of errors) of the best plans, from the smallest on.

        The corners of the convex hull: what lies between two of them is near the line.
        """
        errors = [[option.error for option in choice.options] for choice in self.choices]
        sizes = [[option.bytes for option in choice.options] for choice in self.choices]
        return tuple((round(size) + self.fixed, error) for size, error in frontier(errors, sizes))

    @property
    def hash(self) -> str:
        """A digest of the configuration, of what was asked for and of the sizes."""
        content = [config_to_dict(self), self.goal, self.limit, self.measure, self.bytes]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: that of a `FqnToConfig`, and with it all that was measured."""
        return {
            **config_to_dict(self),
            "ao_quant_plan": _FORMAT,
            "hash": self.hash,
            "goal": self.goal,
            "limit": self.limit,
            "measure": self.measure,
            "measured": self.measured,
            "speed": self.speed,
            "fixed": self.fixed,
            "choices": [
                {
                    "fqn": choice.fqn,
                    "shape": list(choice.shape),
                    "tied": list(choice.tied),
                    "picked": choice.picked,
                    "options": [
                        {"config": _to_dict(o.config), "bytes": o.bytes, "data": o.data, "error": o.error}
                        for o in choice.options
                    ],
                    "refused": [[config_to_dict(c), reason] for c, reason in choice.refused],
                }
                for choice in self.choices
            ],
            "uniform": [{**vars(u), "config": config_to_dict(u.config)} for u in self.uniform],
            "checks": [list(pair) for pair in self.checks],
            "kept": [asdict(kept) for kept in self.kept],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantizationPlan:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: it is not a plan, one of a newer version, or was changed by hand.
            UnknownNameError: a configuration's package is not installed.
        """
        if (version := data.get("ao_quant_plan")) != _FORMAT:
            raise ConfigError(f"not a plan of version {_FORMAT}: ao_quant_plan={version!r}")
        try:
            check(data, _FIELDS, "plan")
            found = cls(
                [_choice(choice) for choice in data["choices"]],
                [Kept(**kept) for kept in data["kept"]],
                **{name: data[name] for name in ("goal", "limit", "measure", "fixed")},
                **{name: data[name] for name in ("measured", "speed")},
                uniform=[
                    Uniform(**{**each, "config": config_from_dict(each["config"])})
                    for each in data["uniform"]
                ],
                checks=[(guess, found) for guess, found in data["checks"]],
            )
        except (SchemaError, IndexError) as error:
            raise ConfigError(f"not a plan: {error}") from error
        if found.hash != data["hash"] or config_to_dict(found)["entries"] != data["entries"]:
            raise ConfigError(
                f"hash={data['hash']!r} is not that of the plan, {found.hash!r}: it was changed"
            )
        return found

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> QuantizationPlan:
        """Inverse of `to_json`; errors as `from_dict`."""
        return cls.from_dict(json_object(text, "plan"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` into a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizationPlan:
        """Read what `save` wrote; errors as `from_dict`."""
        return cls.from_json(read_text(path))

    def __str__(self) -> str:
        from ao_quant.planning.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        return f"<QuantizationPlan {self.hash}: {len(self.choices)} parameters, {self.bytes} bytes>"

    def plot(self) -> Figure:
        """A figure of error over size: the curve, one format everywhere, and this plan.

        Raises:
            MissingExtraError: matplotlib is not installed (extra "plan").
        """
        from ao_quant.planning.plot import plan_figure

        return plan_figure(self)


def _to_dict(config: Config | None) -> dict[str, Any] | None:
    return None if config is None else config_to_dict(config)


def _choice(data: Mapping[str, Any]) -> Choice:
    options = tuple(map(_option, data["options"]))
    refused = tuple((config_from_dict(config), str(reason)) for config, reason in data["refused"])
    return Choice(
        data["fqn"], tuple(data["shape"]), options, data["picked"], tuple(data["tied"]), refused
    )


def _option(data: Mapping[str, Any]) -> Option:
    config = None if data["config"] is None else config_from_dict(data["config"])
    return Option(config, data["bytes"], data["data"], data["error"])
