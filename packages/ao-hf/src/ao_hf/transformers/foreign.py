"""Folders that other projects quantized, loaded by `from_pretrained` into ao's kernels.

transformers hands such a folder to the package that its method names. Where that is not installed, or needs a
GPU and there is none, the folder is ao's: weights are read as they are, by ao-quant.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import CheckpointError
from ao_hf.config import AoConfig

__all__ = ["FOREIGN", "Foreign", "ForeignConfig", "open_foreign", "take_over"]

#: begins the name of the configuration of what other projects quantized
FOREIGN = "interchange/"

#: method, as transformers has it -> the packages that its own loader needs
_NEEDS = {
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "bitsandbytes_4bit": ("bitsandbytes",),
    "bitsandbytes_8bit": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "fbgemm_fp8": ("fbgemm_gpu",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "torchao": ("torchao",),
}
#: methods that transformers dequantizes without a GPU
_ON_GPUS = ("fp8", "mxfp4", "mxfp8")
#: methods that transformers does not know, and would leave out
_UNKNOWN = ("modelopt",)


class ForeignConfig(AoConfig):
    """Makes an `AoConfig` of the label of another project."""

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The configuration of a model that is loaded from such a folder: what the label says is kept."""
        method = str(config_dict.get("quant_method", "bitsandbytes"))
        label = {key: value for key, value in config_dict.items() if value is not None}
        found = cls.of_dict({"name": f"{FOREIGN}{method}", "label": label})
        return (found, kwargs) if return_unused_kwargs else found


def take_over(configs: MutableMapping[str, Any]) -> None:
    """Let ao load the folders of methods that transformers could not, where ao-quant is installed.

    Args:
        configs: of transformers, the class of the configuration by method.
    """
    if find_spec("ao_quant") is None:
        return
    for method, packages in _NEEDS.items():
        if any(find_spec(package) is None for package in packages):
            configs[method] = ForeignConfig
    if not torch.cuda.is_available():
        configs.update(dict.fromkeys(_ON_GPUS, ForeignConfig))
    for method in _UNKNOWN:
        configs.setdefault(method, ForeignConfig)


class Foreign:
    """A folder of another project; has what a loader needs of a `Checkpoint`."""

    def __init__(self, path: Path, opened: Any) -> None:
        self.path, self._opened = path, opened
        #: weight of each plain tensor that is a part of one
        self.owner_of: dict[str, str] = {
            leaf: name for name, weight in opened.reading.weights.items() for leaf in weight.names
        }

    @property
    def names(self) -> list[str]:
        """Of the quantized weights, in the files."""
        return list(self._opened.reading.weights)

    def make(self, name: str, read: Mapping[str, Tensor]) -> Any:
        """A weight, read from its files."""
        return self._opened.reading.weights[name].make()

    def nbytes(self, name: str) -> int | None:
        """Bytes of a weight on disk; None: it is none of these."""
        weight = self._opened.reading.weights.get(name)
        if weight is None:
            return None
        slots = self._opened.checkpoint.slots
        return int(sum(slots[leaf].nbytes for leaf in weight.names))


def open_foreign(folder: Path) -> Foreign:
    """A folder that ao did not write.

    Raises:
        CheckpointError: it is of no known format, or has weights that are not read.
    """
    opened: Any = import_module("ao_quant.interchange.sources").open_foreign(folder)
    if opened.reading.refused:
        name, reason = next(iter(opened.reading.refused.items()))
        raise CheckpointError(f"{folder}: {name}: {reason}")
    if opened.format is None:
        raise CheckpointError(
            f"{folder}: config.json says that it is quantized, and {opened.why}: ao reads none of its tensors"
        )
    return Foreign(folder, opened)
