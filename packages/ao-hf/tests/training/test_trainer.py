"""The Trainer with optimizers by name and with conversions: whole runs, and runs that stop and go on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn

import ao_optim
from ao_core import ComputeWeight, Report
from ao_core.ext import ConfigError, UnknownNameError
from ao_hf.training import Conversion, low_precision_training, optimizer
from ao_sparsity import SemiSparseLinear, squash_masks, swap_linear_with_semi_sparse_linear

BY_NAME = {
    "adagrad_8bit": ao_optim.Adagrad8bit,
    "adam_4bit": ao_optim.Adam4bit,
    "adam_8bit": ao_optim.Adam8bit,
    "adam_fp8": ao_optim.AdamFp8,
    "adamw_4bit": ao_optim.AdamW4bit,
    "adamw_8bit": ao_optim.AdamW8bit,
    "adamw_fp8": ao_optim.AdamWFp8,
    "AdEMAMix8bit": ao_optim.AdEMAMix8bit,
    "lamb_8bit": ao_optim.LAMB8bit,
    "Lion8bit": ao_optim.Lion8bit,
    "muon_8bit": ao_optim.Muon8bit,
    "rmsprop_8bit": ao_optim.RMSprop8bit,
    "sgd_8bit": ao_optim.SGD8bit,
    "GaLore": ao_optim.GaLore,
    "CPUOffloadOptimizer": ao_optim.CPUOffloadOptimizer,
}


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    """accelerate keeps the precision of the first `Accelerator` of a process for all."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Tokens(torch.utils.data.Dataset[Any]):
    """Sequences of one token over and over."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((8,), index + 1)
        return {"input_ids": ids, "labels": ids}


def build() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    given: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "seed": 3,
    }
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return transformers.TrainingArguments(output_dir=str(folder), **{**given, **quiet, **options})


def trainer(
    args: transformers.TrainingArguments,
    callbacks: list[Any] | None = None,
    name: str = "adamw_8bit",
    **options: Any,
) -> transformers.Trainer:
    return transformers.Trainer(
        build(),
        args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=callbacks,
        optimizer_cls_and_kwargs=optimizer(name, args, **options),
    )


def losses(done: transformers.Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in done.state.log_history if key in entry]


def check_resumes(
    folder: Path, make: Callable[[Path], transformers.Trainer]
) -> transformers.Trainer:
    """Training falls, and six steps are the same whether or not they stop after three."""
    whole = make(folder / "whole")
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0] - 0.05
    resumed = make(folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    state, other = whole.model.state_dict(), resumed.model.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    return resumed


# -- optimizers ----------------------------------------------------------------------------------------


def test_every_optimizer_has_a_name(tmp_path: Path) -> None:
    args = arguments(tmp_path, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7)
    for name, cls in BY_NAME.items():
        found, options = optimizer(name, args)
        assert found is cls
        assert options["lr"] == 1e-2
        adam = name.startswith("adam")
        assert options.get("betas") == ((0.8, 0.9) if adam else None)
        assert options.get("eps") == (1e-7 if adam else None)
        assert "weight_decay" not in options
        inspect.signature(cls).bind([], **options)
    exported = {n for n in ao_optim.__all__ if n.endswith(("bit", "Fp8"))}
    assert exported <= {cls.__name__ for cls in BY_NAME.values()}


def test_options_come_first(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    _, options = optimizer("adamw_8bit", args, lr=1.0, betas=(0.1, 0.2), rounding="stochastic")
    assert options == {"lr": 1.0, "betas": (0.1, 0.2), "eps": 1e-8, "rounding": "stochastic"}
    assert optimizer("GaLore", args, rank=4, min_quantized_numel=8)[1]["rank"] == 4


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
def test_resumes(name: str, tmp_path: Path) -> None:
    """With a schedule, groups with and without weight decay, and clipping."""
    done = check_resumes(tmp_path, lambda folder: trainer(arguments(folder), name=name))
    inner = done.optimizer.optimizer  # accelerate's wraps it
    assert type(inner) is BY_NAME.get(name, ao_optim.Lion8bit)
    assert [group["weight_decay"] for group in inner.param_groups] == [0.1, 0.0]
    norms = {id(p) for n, p in done.model.named_parameters() if "norm" in n}
    assert {id(p) for p in inner.param_groups[1]["params"]} == norms
    rates = losses(done, "learning_rate")
    assert rates[0] == 0
    assert max(rates) == 1e-2
    assert rates[-1] < rates[1]


def test_unknown_names_and_options(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean 'adamw_8bit'"):
        optimizer("adamw_8bits", args)
    with pytest.raises(ConfigError, match=r"roundin='up': AdamW8bit has lr, .*rounding"):
        optimizer("adamw_8bit", args, roundin="up")
    with pytest.raises(ConfigError, match="name=8"):
        optimizer(8, args)  # type: ignore[arg-type]


# -- conversions ---------------------------------------------------------------------------------------


def is_low(model: nn.Module) -> bool:
    return any(isinstance(p, ComputeWeight) for p in model.parameters())


def converting(folder: Path, **options: Any) -> transformers.Trainer:
    callback = low_precision_training("float8/rowwise", restore=True)
    made = trainer(arguments(folder, **options), [callback])
    assert is_low(made.model)
    assert isinstance(callback.result, Report)
    assert len(callback.result.with_status("changed")) == 8
    return made


def test_low_precision(tmp_path: Path) -> None:
    """Accumulated gradients, evaluation in between, and afterwards an ordinary model."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "steps"}
    options["eval_steps"] = 3
    done = check_resumes(tmp_path, lambda folder: converting(folder, **options))
    assert not is_low(done.model)
    assert len(losses(done, "eval_loss")) == 2
    dense = trainer(arguments(tmp_path / "dense", **options))
    dense.train()
    ours, theirs = losses(done), losses(dense)
    # another computation, and not a much worse one
    assert ours != theirs
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.1
    saved = load_file(tmp_path / "resumed" / "checkpoint-6" / "model.safetensors")
    assert saved.keys() == build().state_dict().keys()
    plain = build()
    plain.load_state_dict(saved)
    ids = Tokens()[3]["input_ids"][None]
    assert torch.equal(plain(input_ids=ids).logits, done.model(input_ids=ids).logits)


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """Under `torch_compile=True` and bfloat16 autocast the numbers are those of eager code."""
    short: dict[str, Any] = {"max_steps": 2, "save_strategy": "no", "bf16": True}
    eager = converting(tmp_path, **short)
    eager.train()
    compiled = converting(tmp_path, torch_compile=True, torch_compile_backend="eager", **short)
    compiled.train()
    assert not is_low(compiled.model)
    assert losses(compiled) == pytest.approx(losses(eager), abs=1e-3)


def test_sparse(tmp_path: Path) -> None:
    """Any function of a model can convert it, and another one convert it back."""

    def swap(model: nn.Module) -> None:
        names = [n for n, m in model.named_modules() if n.endswith(("gate_proj", "up_proj"))]
        swap_linear_with_semi_sparse_linear(model, dict.fromkeys(names, SemiSparseLinear))

    def make(folder: Path) -> transformers.Trainer:
        made = trainer(arguments(folder), [Conversion(swap, squash_masks)])
        assert any(isinstance(m, SemiSparseLinear) for m in made.model.modules())
        return made

    done = check_resumes(tmp_path, make)
    weight = done.model.model.layers[0].mlp.gate_proj.weight
    assert type(done.model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert ((weight.reshape(-1, 4) != 0).sum(1) == 2).all()


def test_a_model_that_was_not_converted_is_not_trained(tmp_path: Path) -> None:
    late = trainer(arguments(tmp_path))
    late.add_callback(low_precision_training("float8/rowwise"))
    with pytest.raises(ConfigError, match=r"not converted: .*Trainer\(callbacks"):
        late.train()
    args = arguments(tmp_path)
    again = transformers.Trainer(
        model_init=build,
        args=args,
        train_dataset=Tokens(),
        callbacks=[low_precision_training("float8/rowwise")],
    )
    with pytest.raises(ConfigError, match="model_init"):
        again.train()


def test_an_unknown_recipe_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean"):
        trainer(arguments(tmp_path), [low_precision_training("float8/rowise")])
