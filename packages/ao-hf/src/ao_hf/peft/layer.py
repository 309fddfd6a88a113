"""`QuantizedLoraLinear`: PEFT's LoRA layer where the weight is quantized, and how PEFT comes to use it."""

from __future__ import annotations

import copy
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import ConfigError, QuantizationError
from ao_hf.peft.variants import QALora, QuantizedDora
from ao_hf.peft.weights import dense, requantized, shifted

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Merged", "QuantizedLoraLinear", "load_adapter", "over_quantized"]


def over_quantized(config: LoraConfig) -> LoraConfig:
    """The same configuration for a model with quantized weights: a copy, for `get_peft_model` and others.

    Linear layers with a quantized weight become `QuantizedLoraLinear`; all others what PEFT makes of them.
    What `save_pretrained` writes is PEFT's own format, which plain PEFT loads too.

    Args:
        config: of any variant of LoRA. `use_qalora=True` works here.

    Raises:
        ConfigError: not a `LoraConfig`.
    """
    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"config={type(config).__name__}: only LoraConfig has layers for quantized weights; "
            "other methods of PEFT take their configuration as it is"
        )
    made = copy.copy(config)
    made._custom_modules = dict(config._custom_modules or {})
    made._register_custom_module({nn.Linear: _layer_for})
    return made


def load_adapter(
    model: nn.Module, folder: str | PathLike[str], adapter_name: str = "default", **options: Any
) -> PeftModel:
    """The saved adapter of a folder on a quantized model: `PeftModel.from_pretrained` with `over_quantized`.

    Args:
        model: the base model, quantized.
        folder: what `save_pretrained` wrote.
        adapter_name: what to call it.
        options: of `PeftModel.from_pretrained`, as ``is_trainable=True``.
    """
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = not options.get("is_trainable", False)
    return PeftModel.from_pretrained(
        model,
        str(folder),
        adapter_name,
        config=over_quantized(config),
        **options,
    )


def _layer_for(
    target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any
) -> QuantizedLoraLinear | None:
    """The layer for a target of PEFT; None where PEFT's own serves, as the weight is dense."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if not isinstance(base.weight, QTensor) or kwargs.get("parameter_name") is not None:
        return None
    if config.fan_in_fan_out:  # PEFT sets it for a Conv1D of the same model
        config = copy.copy(config)
        config.fan_in_fan_out = False
    kwargs.pop("parameter_name", None)
    return QuantizedLoraLinear(target, adapter_name, config=config, **kwargs)


class Merged(NamedTuple):
    """A weight and its bias, with adapters."""

    weight: Tensor
    bias: Tensor | None
    #: the exact sum, dense float32, that `weight` stands for
    wanted: Tensor


class QuantizedLoraLinear(Linear):
    """LoRA, rsLoRA, DoRA or QA-LoRA over an `nn.Linear` with a quantized weight.

    As PEFT's own layer, but for this:

    - `merge` adds all adapters to the weight that was quantized at first and rounds once; an adapter of
      QA-LoRA goes into the zero points and changes no code. A weight that is shared stays what it is
      elsewhere.
    - `unmerge` brings back the parameter that there was, codes and all.
    - DoRA keeps ‖W‖² and needs one matmul with the quantized weight for its norms.
    """

    #: the weight and the bias before any adapter was merged
    _unmerged: tuple[nn.Parameter, nn.Parameter | None] | None = None

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Classes of variants by the fields of `LoraConfig` that ask for them."""
        return {**super().lora_variants, ("use_dora",): QuantizedDora}

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        """The variant that a configuration asks for; `use_qalora` is not among the fields that PEFT tags."""
        variant = super().resolve_lora_variant(config=config, **kwargs)
        if not config.use_qalora:
            return variant
        if variant is not None:
            raise ConfigError(
                f"use_qalora=True together with {type(variant).__name__}: QA-LoRA goes with no "
                "other variant"
            )
        return QALora()

    @property
    def unmerged_weight(self) -> nn.Parameter:
        """The weight without any adapter."""
        return self.get_base_layer().weight if self._unmerged is None else self._unmerged[0]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What an adapter adds to the weight, (N, K)."""
        if isinstance(self.lora_variant.get(adapter), QALora):
            return QALora.get_delta_weight(self, adapter)
        return super().get_delta_weight(adapter)  # type: ignore[no-any-return]

    @torch.no_grad()
    def with_adapters(self, names: Sequence[str]) -> Merged:
        """What `merge` would make of the unmerged weight and these adapters, in their order."""
        weight = self.unmerged_weight
        bias = self.get_base_layer().bias if self._unmerged is None else self._unmerged[1]
        wanted = dense(weight)
        for name in names:
            variant = self.lora_variant.get(name)
            if variant is None:
                wanted = wanted + self.get_delta_weight(name).float()
            else:
                wanted = variant.merge_safe(self, name, wanted).float()
            if self.lora_bias[name]:
                if bias is None:
                    raise ConfigError(
                        f"adapter {name!r} has lora_bias=True, and the layer has no bias to add it to"
                    )
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        if not wanted.isfinite().all():
            raise QuantizationError(
                f"adapters {list(names)} give weights with NaN or inf; nothing was merged"
            )
        if all(isinstance(self.lora_variant.get(name), QALora) for name in names):
            made = weight.detach()
            for name in names:
                made = shifted(made, QALora.shift(self, name), self.qalora_group_size[name])
        else:
            made = requantized(weight, wanted)
        return Merged(made, bias, wanted)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight and quantize the sum; see `merge_report` for what that costs.

        Args:
            safe_merge: makes no difference: sums with NaN or inf are never merged.
            adapter_names: those to merge; None: all active ones.

        Raises:
            QuantizationError: the sum has NaN or inf, or zero points cannot take an adapter of QA-LoRA. The
                layer stays as it was.
            ConfigError: an adapter has a bias, and the layer has none.
        """
        base = self.get_base_layer()
        if not isinstance(self.unmerged_weight, QTensor):  # `dequantize_` was here
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        made = self.with_adapters([*self.merged_adapters, *names])
        if self._unmerged is None:
            # a tuple, in which no module looks for parameters
            self._unmerged = base.weight, base.bias
        base.weight = nn.Parameter(made.weight, requires_grad=False)
        if made.bias is not None:
            base.bias = nn.Parameter(made.bias, requires_grad=base.bias.requires_grad)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Take all adapters out of the weight again: the codes are those of before, bit for bit."""
        if self._unmerged is None:
            super().unmerge()
            return
        base, (weight, bias) = self.get_base_layer(), self._unmerged
        now = base.weight
        if (now.device, now.dtype) != (weight.device, weight.dtype):  # moved while it was merged
            weight = nn.Parameter(weight.detach().to(now.device, now.dtype), requires_grad=False)
            bias = None if bias is None else nn.Parameter(bias.detach().to(base.bias))
        base.weight, base.bias = weight, bias
        self._unmerged = None
        self.merged_adapters.clear()

    def pissa_init(self, adapter_name: str, init_lora_weights: str) -> None:
        """PiSSA from the quantized weight; `initialize_adapters_` takes the one of before."""
        from ao_hf.peft.initialize import initialize_layer_

        initialize_layer_(self, adapter_name, dense(self.unmerged_weight), "pissa")

    def loftq_init(self, adapter_name: str, config: LoraConfig) -> None:
        """Refused: the error of the quantized weight is not known here."""
        raise ConfigError(
            "init_lora_weights='loftq': the weights are quantized already, and LoftQ needs those of before; "
            "use init_lora_weights=True, then initialize_adapters_(model, originals, 'loftq')"
        )

    def __repr__(self) -> str:
        return str(super().__repr__()).replace("lora.Linear", type(self).__name__, 1)
