"""The model of diffusers that a folder is of, so that files are quantized as the model is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin

from ao_core import FolderModel

__all__ = ["folder_model"]


def folder_model(folder: Path, name: str, names: Iterable[str]) -> FolderModel | str:
    """The model that `from_pretrained` would make of a folder, or why it cannot be known; runs no code of it.

    Args:
        folder: where it is.
        name: of the class of the model.
        names: of the tensors in its files.
    """
    named = getattr(diffusers, name, None) if name in dir(diffusers) else None
    if not isinstance(named, type) or not issubclass(named, ModelMixin):
        return f"diffusers {diffusers.__version__} has no model class {name!r}"
    kind: Any = named
    try:
        config = kind.load_config(folder)
        config.pop("quantization_config", None)
        with torch.device("meta"):
            model = kind.from_config(config)
    except Exception as error:  # of a model's code: whatever a configuration leads to
        text = " ".join(str(error).split())[:160]
        return f"{kind.__name__} cannot be made from config.json: {type(error).__name__}: {text}"
    files = OrderedDict((name, name) for name in names)
    # attention had other names once, which diffusers changes while it loads
    model._fix_state_dict_keys_on_load(files)
    known = model.state_dict()
    found = {file: parameter for parameter, file in files.items() if parameter in known}
    return FolderModel(model, found, {}, f"{kind.__name__} of diffusers {diffusers.__version__}")
