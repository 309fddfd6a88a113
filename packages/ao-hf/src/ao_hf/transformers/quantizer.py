"""What transformers asks of a quantization method while it loads, saves and dequantizes a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer

from ao_core import Report, dequantize_
from ao_core.ext import CheckpointError, ConfigError
from ao_core.ext.quantizing import Decision, NothingConvertedWarning, needs_data, warn_caller
from ao_core.ext.reports import ParameterRecord
from ao_core.ext.saving import Checkpoint, open_files, state_dict_to_flat
from ao_hf.config import AoConfig
from ao_hf.decisions import decisions_of, report_of, size_of
from ao_hf.folders import refuses
from ao_hf.hub import model_of
from ao_hf.transformers.foreign import FOREIGN, Foreign, open_foreign
from ao_hf.transformers.models import learns, mark

if TYPE_CHECKING:
    from ao_hf.transformers.conversions import Own

__all__ = ["AoHfQuantizer"]


class AoHfQuantizer(HfQuantizer):
    """Quantizes one parameter at a time, loads what was quantized, and saves it in ao's format.

    `report` says of each parameter what was done to it while the model was loaded, as that of `quantize_`
    does; None for a model that was loaded quantized. `base_model` is the name on the Hub of the model
    that was quantized here; None where it has none.
    """

    quantization_config: AoConfig

    def __init__(self, quantization_config: AoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: Report | None = None
        self.base_model: str | None = None
        #: whether quantized parameters have gradients
        self.learns = False
        #: name of a weight that stays on disk -> that in the checkpoint
        self.entries: dict[str, str] = {}
        self._device_map: Any = None
        self._checkpoint: Own | Foreign | None = None
        self._decisions: dict[str, Decision] = {}
        self._records: dict[str, ParameterRecord] = {}

    # -- before loading --------------------------------------------------------------------------

    def validate_environment(
        self, *args: Any, device_map: Any = None, weights_only: bool = True, **kwargs: Any
    ) -> None:
        """Raise `ConfigError` for what cannot work, before anything is read."""
        self._device_map = device_map
        if self.pre_quantized:
            return
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ConfigError(
                'device_map has "disk": weights that are quantized while they are loaded are in no file yet; '
                "quantize the folder first, with the command ao quantize, and load the result with "
                "the same device_map"
            )
        config = self.quantization_config.resolved()
        if needs_data(config):
            name = self.quantization_config.config["name"]
            raise ConfigError(
                f"config={name!r} needs calibration data, which from_pretrained has none of: load the model "
                "without it, then call quantize_(model, config, data=batches)"
            )
        config.check()

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            self._checkpoint = self._opened(checkpoint_files)
        else:
            _check_source(checkpoint_files)
            self._decisions = decisions_of(
                model,
                self.quantization_config.resolved(),
                self.quantization_config.modules_to_not_convert,
            )

    def _opened(self, files: Sequence[str] | None) -> Own | Foreign:
        """What is loaded: a checkpoint of ao, or one of another project."""
        from ao_hf.transformers.conversions import Own  # whose base is not loaded yet

        found = _files(files)
        if found.records or not str(self.quantization_config.config.get("name")).startswith(
            FOREIGN
        ):
            if missing := found.missing_providers():
                raise CheckpointError(f"{found.path}: needs {'; and '.join(missing)}")
            if not found.records:
                warn_caller(
                    f"{found.path}: its config.json says ao quantized it, but all its weights are dense; "
                    'take "quantization_config" out of it to have them quantized while they are loaded',
                    NothingConvertedWarning,
                )
            return Own(found)
        if isinstance(self._device_map, dict) and "disk" in self._device_map.values():
            raise ConfigError(
                'device_map has "disk": weights in the format of another project are not read from there one '
                "by one; convert the folder first, with ao convert SRC DST --to ao"
            )
        return open_foreign(found.path if found.path.is_dir() else found.path.parent)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is quantized while it is loaded."""
        decision = self._decisions.get(param_name)
        return decision is not None and decision.config is not None

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes per element, for device_map="auto"."""
        stored = None if self._checkpoint is None else self._checkpoint.nbytes(param_name)
        if stored is not None:
            return stored / max(param.numel(), 1)
        decision = self._decisions.get(param_name)
        return float(param.element_size()) if decision is None else size_of(decision, param)

    # -- loading ---------------------------------------------------------------------------------

    def get_quantize_ops(self) -> Any:
        """The operation that quantizes a parameter that was read."""
        from ao_hf.transformers.conversions import QuantizeOnLoad  # whose base is not loaded yet

        return QuantizeOnLoad(self._decisions, self._records)

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """The conversions of the model, with parts put together first."""
        from ao_hf.transformers.conversions import loading_conversions

        if self._checkpoint is None:
            return weight_conversions
        return loading_conversions(weight_conversions, self._checkpoint)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """None for what is put together from parts: its logical dtype changes, and no part's."""
        if hasattr(converter, "logical_dtype"):
            converter.logical_dtype = dtype
            return None
        return super().get_new_dtype(converter, param, dtype)

    def is_on_disk(self, name: str) -> bool:
        """Whether a parameter stays in the folder that is loaded."""
        if not isinstance(self._device_map, dict) or "disk" not in self._device_map.values():
            return False
        from transformers.integrations.accelerate import get_device

        return bool(get_device(self._device_map, name) == "disk")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            self.base_model = model_of(model.name_or_path)
            config = self.quantization_config.resolved()
            self.report = report_of(config, self._decisions, self._records)
        if self._checkpoint is not None and self.entries:
            from ao_hf.transformers.offload import follow_hooks  # imports accelerate

            assert not isinstance(self._checkpoint, Foreign)
            follow_hooks(model, self._checkpoint.checkpoint, self.entries)
        self._checkpoint, self._decisions, self._records = None, {}, {}
        self.entries, self._device_map = {}, None
        self.learns = learns(model)
        mark(model)
        return model

    # -- afterwards ------------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """Every format of ao can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained on the quantized weights, which have no gradient themselves."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether quantized weights are trained: in `int8_weight_only_training`, or their scales."""
        return self.learns

    @property
    def is_compileable(self) -> bool:
        """Quantized tensors compile in one graph."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """Plain tensors, and a header that says what they are together."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # only the adapters are saved, which are dense
        from ao_hf.transformers.offload import full_state

        ignored = set(model._keys_to_ignore_on_save or ())
        state = {name: t for name, t in full_state(model).items() if name not in ignored}
        return state_dict_to_flat(state, checksums=True)

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        dequantize_(model)
        if isinstance(dtype, str):  # of the configuration of a model that was saved
            dtype = getattr(torch, dtype)
        return model if dtype is None else nn.Module.to(model, dtype)


def _check_source(files: Sequence[str] | None) -> None:
    """Raise `CheckpointError` for a folder of a method that transformers does not know, and leaves out."""
    folder = Path(files[0]).parent if files else None
    if folder is not None and (reason := refuses(folder)):
        raise CheckpointError(f"{folder}: {reason}")


def _files(files: Sequence[str] | None) -> Checkpoint:
    pickles = [file for file in files or () if not file.endswith(".safetensors")]
    if not files or pickles:
        found = f"{pickles[0]} is none" if pickles else "there are no files"
        raise CheckpointError(
            f"a model quantized by ao is loaded from safetensors files, and {found}"
        )
    return open_files(files)
