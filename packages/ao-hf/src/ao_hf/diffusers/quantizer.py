"""What diffusers asks of a quantization method while it loads, saves and dequantizes a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ao_core import QTensor, Report, dequantize_
from ao_core.ext import STOCHASTIC, ConfigError, check_quantizable, give_back
from ao_core.ext.quantizing import Decision, convert, needs_data
from ao_core.ext.reports import ParameterRecord
from ao_core.ext.saving import state_dict_to_flat
from ao_hf.config import AoConfig
from ao_hf.decisions import decisions_of, report_of, size_of
from ao_hf.diffusers.devices import counted_as
from ao_hf.diffusers.loading import Loading
from ao_hf.diffusers.models import mark

__all__ = ["AoDiffusersQuantizer"]


class AoDiffusersQuantizer(DiffusersQuantizer):
    """Quantizes one parameter at a time, loads what was quantized, and saves it in ao's format.

    `report` says of each parameter what was done to it while the model was loaded, as that of `quantize_`
    does; None for a model that was loaded quantized.
    """

    quantization_config: AoConfig
    #: modules that diffusers keeps in float32 stay so, as without quantization
    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: AoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: Report | None = None
        self._loading: Loading | None = None
        self._decisions: dict[str, Decision] = {}
        self._records: dict[str, ParameterRecord] = {}
        #: how much larger parameters are than accelerate is told
        self._excess = 1.0

    # -- before loading --------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise `ConfigError` for what cannot work, before anything is read."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ConfigError(
                'device_map has "disk": diffusers writes dense arrays there, and quantized weights are '
                'none; use "cpu", where they take little memory'
            )
        if self.pre_quantized:
            return
        config = self.quantization_config.resolved()
        if needs_data(config):
            name = self.quantization_config.config["name"]
            raise ConfigError(
                f"config={name!r} needs calibration data, which from_pretrained has none of: load the model "
                "without it, then call quantize_(model, config, data=batches)"
            )
        config.check()

    def maybe_update_loaded_keys(
        self, loaded_keys: list[str], checkpoint_files: Sequence[Any]
    ) -> list[str]:
        """Names of the weights that the files have, parts left out."""
        if not self.pre_quantized:
            return loaded_keys
        self._loading = Loading(checkpoint_files)
        return self._loading.names(loaded_keys)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            self._decisions = decisions_of(
                model,
                self.quantization_config.resolved(),
                self.quantization_config.modules_to_not_convert,
            )

    def get_special_dtypes_update(
        self, model: nn.Module, torch_dtype: torch.dtype
    ) -> dict[str, Any]:
        """What each parameter counts as when devices are chosen for `device_map="auto"`."""
        sizes = {name: self._element_size(name, p) for name, p in model.named_parameters()}
        counted, self._excess = counted_as(sizes)
        return counted

    def _element_size(self, name: str, parameter: Tensor) -> float:
        """Bytes per element."""
        if self._loading is not None:
            nbytes = self._loading.nbytes(name)
            return (
                float(parameter.element_size())
                if nbytes is None
                else nbytes / max(parameter.numel(), 1)
            )
        decision = self._decisions.get(name)
        return float(parameter.element_size()) if decision is None else size_of(decision, parameter)

    def adjust_max_memory(self, max_memory: Mapping[Any, int]) -> dict[Any, int]:
        """The memory of each device, in the units of `get_special_dtypes_update`."""
        return {device: int(nbytes / self._excess) for device, nbytes in max_memory.items()}

    # -- loading ---------------------------------------------------------------------------------

    def maybe_update_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one file, parts put together."""
        return state_dict if self._loading is None else self._loading.tensors(state_dict)

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether a parameter is to be quantized, or is."""
        if isinstance(param_value, QTensor):
            return True
        decision = self._decisions.get(param_name)
        return decision is not None and decision.config is not None

    @torch.no_grad()
    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Put a quantized parameter into the model; the report gets its record."""
        tensor = param_value.to(target_device)
        parameter: nn.Parameter | None = None
        if isinstance(tensor, QTensor):
            parameter = nn.Parameter(tensor, requires_grad=STOCHASTIC in tensor.spec.options)
        else:
            decision = self._decisions[param_name]
            check_quantizable(tensor, param_name)
            # what was read requires no gradient, and a parameter that is loaded does
            parameter, self._records[decision.fqn] = convert(decision, nn.Parameter(tensor))
            give_back()
        path, _, name = param_name.rpartition(".")
        made = nn.Parameter(tensor) if parameter is None else parameter
        model.get_submodule(path)._parameters[name] = made

    def check_quantized_param_shape(
        self, param_name: str, current_param: Tensor, loaded_param: Tensor
    ) -> bool:
        """Raise `ConfigError`: a quantized parameter has the shape of the dense one."""
        raise ConfigError(
            f"{param_name} is {tuple(loaded_param.shape)} in the files and {tuple(current_param.shape)} in "
            "the model: the folder is of another model"
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            config = self.quantization_config.resolved()
            self.report = report_of(config, self._decisions, self._records)
        self._loading, self._decisions, self._records = None, {}, {}
        mark(model)
        return model

    # -- afterwards ------------------------------------------------------------------------------

    @property
    def is_serializable(self) -> bool:
        """Every format of ao can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained on the quantized weights, which have no gradient themselves."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Quantized tensors compile in one graph."""
        return True

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Tensor], safe_serialization: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Plain tensors, and a header that says what they are together.

        Raises:
            ConfigError: a pickle is asked for, or there are adapters among the weights.
        """
        if not safe_serialization:
            raise ConfigError(
                "safe_serialization=False: quantized weights are saved as safetensors only"
            )
        if adapted := next((name for name in state_dict if ".base_layer." in name), None):
            raise ConfigError(
                f"{adapted} has adapters, which from_pretrained would not find: save them with "
                "save_lora_adapter, and call delete_adapters or unload_lora before the model is saved"
            )
        return state_dict_to_flat(state_dict, checksums=True)

    def _dequantize(self, model: Any) -> Any:
        dequantize_(model)
        return model
