"""The Trainer of transformers with every training recipe and optimizer: checkpoints and resuming."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from zoo import language_model

from ao_core import quantize_
from ao_core.ext import stochastic_rounding
from ao_optim import AdamW8bit, AdamWFp8

RECIPES = (
    "float8/rowwise",
    "float8/tensorwise",
    "float8/mxfp8",
    "int8_mixed_precision_training",
    "bitnet_training",
    "mx_training/mxfp4",
    "nvfp4_training",
)


class Tokens(torch.utils.data.Dataset):
    """Sixteen sequences, each one token over and over."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((8,), index + 1)
        return {"input_ids": ids, "labels": ids}


def trainer(
    model: nn.Module,
    folder: Path,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    **options: object,
) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        learning_rate=5e-3,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        lr_scheduler_type="constant",
        **options,
    )
    chosen = (
        (optimizer([p for p in model.parameters() if p.requires_grad]), None)
        if optimizer
        else (None, None)
    )
    return transformers.Trainer(model, arguments, train_dataset=Tokens(), optimizers=chosen)


def losses(done: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


def check_resumes(build: Callable[[], nn.Module], folder: Path, **options: object) -> None:
    """Training falls, and four steps are the same whether or not they stop after two."""
    whole = trainer(build(), folder / "whole", **options)
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0] - 0.05
    checkpoint = folder / "whole" / "checkpoint-2"
    resumed = trainer(build(), folder / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)
    state, other = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state)


def converted(recipe: str) -> nn.Module:
    model = language_model()
    quantize_(model, recipe)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    check_resumes(partial(converted, recipe), tmp_path)
    saved = load_file(tmp_path / "whole" / "checkpoint-4" / "model.safetensors")
    # what is saved is a dense model, which loads where ao is not installed
    language_model().load_state_dict(saved, strict=False)


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_recipe_in_mixed_precision_and_with_checkpointing(
    options: dict[str, bool], tmp_path: Path
) -> None:
    check_resumes(partial(converted, "float8/rowwise"), tmp_path, **options)


@pytest.mark.parametrize("optimizer", [AdamW8bit, AdamWFp8])
def test_optimizer(optimizer: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    check_resumes(language_model, tmp_path, optimizer=partial(optimizer, lr=5e-3))
    check_resumes(
        partial(converted, "float8/rowwise"),
        tmp_path / "float8",
        optimizer=partial(optimizer, lr=5e-3),
    )


def test_weights_in_eight_bits(tmp_path: Path) -> None:
    """Weights without a copy in high precision, and moments in eight bits: what saves most memory."""
    generator = torch.Generator().manual_seed(0)
    model = converted("int8_weight_only_training")
    with stochastic_rounding(generator):
        done = trainer(model, tmp_path, optimizer=partial(AdamW8bit, lr=5e-3), save_strategy="no")
        done.train()
    assert losses(done)[-1] < losses(done)[0] - 0.05


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_adapter_over_four_bits(bf16: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = language_model()
        quantize_(model, "nf4_weight_only")
        torch.manual_seed(5)
        config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    check_resumes(build, tmp_path, bf16=bf16)
