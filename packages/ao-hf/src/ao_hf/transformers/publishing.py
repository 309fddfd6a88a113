"""What is saved and uploaded with a quantized model of transformers: its model card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ao_hf.cards import ANYWHERE, CARD, card_of
from ao_hf.folders import kind_of

__all__ = ["publishes"]

#: in the card that transformers uploads for a model that has none
_FILLER = "This model card has been automatically generated"


def publishes(model: nn.Module) -> None:
    """Let a model write its card when it is saved or uploaded.

    transformers has no hook for that, so these are methods of the object, which follow it through deepcopy.
    """
    model.__dict__["save_pretrained"] = _Save(model)
    model.__dict__["_upload_modified_files"] = _Upload(model)


class _Save:
    """`save_pretrained`, and then the card."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        done = type(self.model).save_pretrained(
            self.model, save_directory, is_main_process, *args, **kwargs
        )
        # what is uploaded has its card already
        if not kwargs.get("push_to_hub") and self.model.should_save_on_this_rank(is_main_process):
            _write_card(self.model, Path(save_directory))
        return done


class _Upload:
    """What `push_to_hub` and `save_pretrained(push_to_hub=True)` upload a folder with, after the card."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def __call__(
        self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        _write_card(self.model, Path(working_dir), repo_id)
        upload = type(self.model)._upload_modified_files
        return upload(self.model, working_dir, repo_id, *args, **kwargs)


def _write_card(model: Any, folder: Path, name: str | None = None) -> None:
    """Write or renew the card, where the folder has weights that ao quantized."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    adapters = getattr(model, "_hf_peft_config_loaded", False)
    if adapters or not hasattr(quantizer, "base_model"):
        return  # only adapters are saved, or it was dequantized meanwhile
    path, tags = folder / CARD, list[str]()
    if name is not None and path.exists() and _FILLER in (filler := path.read_text("utf-8")):
        from huggingface_hub import ModelCard

        tags = ModelCard(filler).data.get("tags") or []
        path.unlink()
    report = quantizer.report or ()
    reasons = {record.fqn: record.reason for record in report if record.status != "changed"}
    text = card_of(
        folder,
        quantizer.quantization_config.config,
        reasons,
        "transformers",
        kind_of(folder),
        name=name or ANYWHERE,
        base=quantizer.base_model,
        tags=tags,
    )
    if text is not None:
        path.write_text(text, "utf-8")
