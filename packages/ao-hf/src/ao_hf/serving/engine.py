"""What the plugins of all engines do alike, over the classes that an engine brings."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Spec
from ao_core.ext import CheckpointError, UnsupportedOp
from ao_hf.method import METHOD
from ao_hf.serving.formats import Formats
from ao_hf.serving.linear import add_parameters, multiply, put_together

__all__ = ["Engine", "config_base"]


@dataclass(frozen=True)
class Engine:
    """Where an engine keeps the classes that a plugin needs: "module:class"."""

    name: str
    #: that the plugin was written for
    version: str
    #: how the engine says which folder it loads
    tells: str
    #: base of the configuration
    config: str
    #: base of the methods of linear layers
    method: str
    #: what linear layers without quantization do
    unquantized: str
    #: classes of layers
    linear: str
    head: str
    embedding: str

    def get(self, field: str) -> Any:
        """The class of a field; imports its module."""
        module, _, name = str(getattr(self, field)).partition(":")
        return getattr(import_module(module), name)


def config_base(engine: Engine) -> Any:
    """The base of an engine's configuration for folders of ao, with all that engines ask for alike.

    What a plugin adds is how its engine gives the folder and asks for names.
    """
    linear, head, embedding = (engine.get(field) for field in ("linear", "head", "embedding"))
    method = _linear_method(engine.get("method"))

    class AoConfig(engine.get("config")):  # type: ignore[misc]
        """The formats of a folder that ao wrote."""

        def __init__(self) -> None:
            super().__init__()
            self.formats: Formats | None = None

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

        def rename(self, mapper: Any) -> None:
            """Use the names that the engine's model has."""
            if self.formats is not None:
                self.formats = self.formats.renamed(mapper)

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            """The method of a layer; None where the engine shall do as without quantization.

            Raises:
                CheckpointError: the engine did not say which folder it loads.
                UnsupportedOp: the layer is quantized, and of a kind or in a format that is not covered.
            """
            formats = self.formats
            if formats is None:
                raise CheckpointError(
                    f"{engine.name} did not say which folder it loads ({engine.tells}); its version differs "
                    f"from what this plugin was written for, {engine.version}"
                )
            if isinstance(layer, linear):
                spec = formats.of_layer(prefix, self.packed_modules_mapping)
                return engine.get("unquantized")() if spec is None else method(spec)
            if isinstance(layer, head):
                if f"{prefix}.weight" not in formats.specs:
                    return None
                return method(formats.of_layer(prefix, {}))
            if names := formats.quantized_below(prefix):
                kind = "embeddings" if isinstance(layer, embedding) else type(layer).__name__
                raise UnsupportedOp(
                    f"{names[0]} is quantized, and quantized {kind} are not covered; keep them in high "
                    "precision with an FqnToConfig"
                )
            return None

    return AoConfig


def _linear_method(base: type) -> type:
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
