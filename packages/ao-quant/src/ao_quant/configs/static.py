"""Configurations whose activations have static scales, which calibration finds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

import torch

from ao_core import WHOLE, Spec
from ao_core.ext import ConfigError, WeightConfig, WeightFormat
from ao_quant.configs.base import YES_NO, one_of
from ao_quant.configs.floats import FLOAT8, Float8DynamicActivationFloat8WeightConfig
from ao_quant.configs.ints import Int8DynamicActivationInt8WeightConfig
from ao_quant.configs.mx import NVFP4DynamicActivationNVFP4WeightConfig

__all__ = [
    "OBSERVERS",
    "ON_OUTLIERS",
    "Float8StaticActivationFloat8WeightConfig",
    "Int8StaticActivationInt8WeightConfig",
    "NVFP4StaticActivationNVFP4WeightConfig",
    "StaticConfig",
]

#: the values of every `observer`
OBSERVERS = ("minmax", "percentile", "mse")
#: the values of every `on_outliers`
ON_OUTLIERS = ("dynamic", "dense", "keep")


def _each(value: Any) -> tuple[Any, ...]:
    """The values of a weight: one, or one for each of its experts; at least one."""
    return value if isinstance(value, tuple) and value else (value,)


@dataclass(frozen=True)
class StaticConfig(WeightConfig):
    """Base of the static configurations: how calibration finds a scale, and the scale.

    Pass a configuration without `act_scale` to `ao_quant.prepare`. `ao_quant.convert` makes one with
    `act_scale` per layer.
    """

    #: how the range of the activations is found: "minmax", all that was seen; "percentile", what holds a
    #: share of it; "mse", what has the least squared error in this format
    observer: str = field(default="minmax", kw_only=True)
    #: for the observer "percentile": percent of the values that are inside the range
    percentile: float = field(default=99.99, kw_only=True)
    #: scale of all activations of a layer, or of a 3-D weight of experts one for each; None: to be found
    act_scale: float | tuple[float, ...] | None = field(default=None, kw_only=True)
    #: what weights get whose products have much larger errors with one scale than with one per token:
    #: "dynamic", a scale per token; "dense", nothing; "keep", one scale, as all others
    on_outliers: str = field(default="dynamic", kw_only=True)
    #: how many times the squared error with scales per token that with one scale may be before a weight
    #: counts as one with outliers; 1 or more
    max_error_ratio: float = field(default=1.5, kw_only=True)

    def __post_init__(self) -> None:
        one_of(self, "observer", OBSERVERS)
        one_of(self, "on_outliers", ON_OUTLIERS)
        if type(self.percentile) is not float or not 50.0 < self.percentile <= 100.0:
            self._refuse("percentile", "use a float above 50.0 and up to 100.0")
        if type(self.max_error_ratio) is not float or not 1.0 <= self.max_error_ratio < inf:
            self._refuse(
                "max_error_ratio", "use a float from 1.0 on; on_outliers='keep' allows any error"
            )
        if self.act_scale is not None and not all(
            type(each) is float and 2.0**-126 <= each < 2.0**128 for each in _each(self.act_scale)
        ):
            self._refuse(
                "act_scale",
                "use a positive float32, or of experts one for each, or None where it is to be found",
            )

    def _refuse(self, parameter: str, hint: str) -> None:
        value = getattr(self, parameter)
        raise ConfigError(f"{parameter}={value!r} in {type(self).__name__}: {hint}")

    def _static(
        self, dynamic: WeightFormat, zero_point: int | tuple[int, ...] | None = None
    ) -> WeightFormat:
        """The format with one scale for all activations, which is given, in place of one per token."""
        act = dynamic.spec.act
        assert act is not None
        spec = replace(dynamic.spec, act=replace(act, block=(WHOLE, WHOLE), static=True))
        return WeightFormat(
            spec, act_scale=self.act_scale, act_zero_point=zero_point, acts_everywhere=True
        )

    def calibrated(
        self, scale: float | tuple[float, ...], zero_point: int | tuple[int, ...] | None
    ) -> StaticConfig:
        """The same with the scale, and the zero point where there is one, of one layer or of its experts."""
        return replace(self, act_scale=scale)

    def of_matrix(self, number: int) -> StaticConfig:
        """The same with the scale of one expert; itself where all have one."""
        if not isinstance(self.act_scale, tuple):
            return self
        points = getattr(self, "act_zero_point", None)
        return self.calibrated(self.act_scale[number], None if points is None else points[number])

    def dynamic(self, layers: str = "linear") -> WeightConfig:
        """The same with scales that each call computes; `layers` as in the dynamic configurations."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ConfigError` where the scale is not known yet."""
        if self.act_scale is None:
            self._refuse(
                "act_scale",
                "static scales of activations come from data: quantize_(model, config, data=batches), or "
                "ao_quant.prepare(model, config), batches within `with ao_quant.calibrate(model):`, and "
                "ao_quant.convert(model). A checkpoint takes the configuration of the report that "
                "either returns",
            )


@dataclass(frozen=True)
class Int8StaticActivationInt8WeightConfig(StaticConfig):
    """Weights in symmetric int8; activations in int8 with one scale, found by calibration."""

    weight_only: ClassVar[str] = "int8_weight_only"

    #: False: activations have a zero point too, for inputs that are not centred, e.g. after GELU
    symmetric_activations: bool = True
    #: of the weights: "row", one scale per row, or "tensor"
    granularity: str = "row"
    #: zero point of asymmetric activations, 0 to 255, next to `act_scale`, and as many
    act_zero_point: int | tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "symmetric_activations", YES_NO)
        one_of(self, "granularity", ("row", "tensor"))
        wanted = self.act_scale is not None and not self.symmetric_activations
        if wanted != (self.act_zero_point is not None):
            self._refuse(
                "act_zero_point", "goes with act_scale and symmetric_activations=False, only"
            )
        points = _each(self.act_zero_point) if wanted else ()
        if any(type(each) is not int or not 0 <= each <= 255 for each in points):
            self._refuse("act_zero_point", "use integers from 0 to 255")
        if wanted and len(points) != len(_each(self.act_scale)):
            self._refuse("act_zero_point", "use as many as act_scale has")

    def calibrated(
        self, scale: float | tuple[float, ...], zero_point: int | tuple[int, ...] | None
    ) -> StaticConfig:
        """The same with the scale, and the zero point where there is one, of one layer or of its experts."""
        return replace(self, act_scale=scale, act_zero_point=zero_point)

    def dynamic(self, layers: str = "linear") -> WeightConfig:
        """The same with one scale per token; `layers` as in the dynamic configuration."""
        return Int8DynamicActivationInt8WeightConfig(
            self.symmetric_activations, "row", layers=layers
        )

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        dynamic = Int8DynamicActivationInt8WeightConfig(
            self.symmetric_activations, self.granularity
        )
        return self._static(dynamic.weight_format(dtype), self.act_zero_point)


@dataclass(frozen=True)
class Float8StaticActivationFloat8WeightConfig(StaticConfig):
    """Weights and activations in 8-bit floating point, with one activation scale, found by calibration."""

    weight_only: ClassVar[str] = "float8_weight_only"

    #: of the weights: "row", one scale per row, or "tensor"
    granularity: str = "row"
    #: "e4m3" or "e5m2"; a GPU has no matmul of e5m2 with e5m2
    weight_dtype: str = "e4m3"
    #: "e4m3" or "e5m2"
    activation_dtype: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "granularity", ("row", "tensor"))
        one_of(self, "weight_dtype", FLOAT8)
        one_of(self, "activation_dtype", FLOAT8)

    def dynamic(self, layers: str = "linear") -> WeightConfig:
        """The same with one scale per token; `layers` as in the dynamic configuration."""
        return Float8DynamicActivationFloat8WeightConfig(
            "row", self.weight_dtype, self.activation_dtype, layers=layers
        )

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        dynamic = Float8DynamicActivationFloat8WeightConfig(
            self.granularity, self.weight_dtype, self.activation_dtype
        )
        return self._static(dynamic.weight_format(dtype))


@dataclass(frozen=True)
class NVFP4StaticActivationNVFP4WeightConfig(StaticConfig):
    """Weights and activations in NVFP4; calibration finds the global scale of the activations.

    Each block of 16 activations has an e4m3 scale, chosen in each call from its magnitude. Only the global
    float32 scale is static. Rows are therefore quantized independently of each other. Blocks beyond the
    calibrated range are clipped to it.
    """

    weight_only: ClassVar[str] = "nvfp4_weight_only"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observer == "mse":
            self._refuse(
                "observer",
                "it weighs errors of one scale for all values, and here each block has its own; use "
                "'minmax' or 'percentile'",
            )

    def dynamic(self, layers: str = "linear") -> WeightConfig:
        """The same with a global scale that each call computes; `layers` as in the dynamic configuration."""
        return NVFP4DynamicActivationNVFP4WeightConfig(layers=layers)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        dynamic = NVFP4DynamicActivationNVFP4WeightConfig().weight_format(dtype)
        act = dynamic.spec.act
        assert act is not None
        assert isinstance(act.scale_dtype, Spec)
        act = replace(act, scale_dtype=replace(act.scale_dtype, static=True))
        spec = replace(dynamic.spec, act=act)
        return WeightFormat(spec, act_scale=self.act_scale, acts_everywhere=True)
