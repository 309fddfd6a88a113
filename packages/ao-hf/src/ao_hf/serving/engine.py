"""What the plugins of all engines do alike, over the classes that an engine brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Spec
from ao_core.ext import UnsupportedOp
from ao_hf.serving.formats import METHOD, Formats
from ao_hf.serving.linear import add_parameters, multiply, put_together

__all__ = ["Classes", "ConfigMethods", "linear_method", "method_for"]


class ConfigMethods:
    """What configurations of all engines answer alike; comes before the engine's base class."""

    def get_name(self) -> str:
        """What `quant_method` is."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any GPU: where no kernel of ao serves, weights are dequantized."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the formats stand in the files of tensors."""
        return []


def linear_method(base: type) -> type:
    """The method of linear layers with a weight in one of ao's formats, a subclass of the engine's `base`."""

    class AoLinearMethod(base):
        """A linear layer with a weight in one of ao's formats."""

        def __init__(self, spec: Spec) -> None:
            self.spec = spec

        def create_weights(
            self,
            layer: nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **extra_weight_attrs: Any,
        ) -> None:
            """Allocate the parts of the weight."""
            add_parameters(
                layer,
                self.spec,
                (input_size_per_partition, input_size),
                output_partition_sizes,
                params_dtype,
                extra_weight_attrs["weight_loader"],
            )

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            """Put the weight together."""
            put_together(layer)

        def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            """The product."""
            return multiply(layer, x, bias)

    return AoLinearMethod


@dataclass(frozen=True)
class Classes:
    """The classes of an engine that decide what a layer is."""

    linear: type
    head: type
    embedding: type
    #: what linear layers without quantization do
    unquantized: type
    #: makes the method of a quantized layer, from its format
    quantized: Any


def method_for(
    layer: nn.Module,
    prefix: str,
    formats: Formats,
    packed: Mapping[str, Sequence[str]],
    classes: Classes,
) -> Any:
    """The method of a layer of an engine; None where the engine shall do as without quantization.

    Raises:
        UnsupportedOp: the layer is quantized, and of a kind or in a format that is not covered.
    """
    if isinstance(layer, classes.linear):
        spec = formats.of_layer(prefix, packed)
        return classes.unquantized() if spec is None else classes.quantized(spec)
    if isinstance(layer, classes.head):
        if f"{prefix}.weight" not in formats.specs:
            return None
        return classes.quantized(formats.of_layer(prefix, {}))
    if names := formats.quantized_below(prefix):
        kind = "embeddings" if isinstance(layer, classes.embedding) else type(layer).__name__
        raise UnsupportedOp(
            f"{names[0]} is quantized, and quantized {kind} are not covered; keep them in high precision "
            "with an FqnToConfig"
        )
    return None
