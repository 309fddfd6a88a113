"""Adapters on a quantized model, trained by the Trainer and by the model's own methods."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ao_core import QTensor, quantize_
from ao_hf import AoConfig
from ao_quant import Int4WeightOnlyConfig
from ao_quant.qat import store_scales_, train_scales_


@pytest.fixture
def model(dense):
    config = AoConfig("nf4_weight_only")
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)


@pytest.fixture
def arguments(tmp_path):
    return TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=20, learning_rate=2e-2, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip


@pytest.fixture
def rows():
    ids = torch.randint(3, 96, (8, 12))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_trainer_with_adapters(model, arguments, rows):
    before = model.model.layers[0].mlp.up_proj.weight.dequantize()
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trainer = Trainer(peft, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    weight = peft.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert isinstance(weight, QTensor)
    assert torch.equal(weight.dequantize(), before)


def test_without_adapters_the_trainer_refuses(model, arguments, rows):
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(model, arguments, train_dataset=rows)


@pytest.mark.filterwarnings("ignore")
def test_adapters_alone_are_saved(model, tokens, tmp_path):
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_quantized_weights_that_are_trained(dense, arguments, rows, tmp_path):
    """Quantized while they are loaded or loaded so, they have gradients, and the Trainer takes the model."""
    config = AoConfig("int8_weight_only_training")
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.save_pretrained(tmp_path / "q")
    ids = rows[0]["input_ids"][None]
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "q")):
        weight = each.model.layers[0].mlp.up_proj.weight
        assert isinstance(weight, QTensor)
        each(input_ids=ids, labels=ids).loss.backward()
        assert weight.grad.isfinite().all()
        assert weight.grad.any()
        Trainer(each, arguments, train_dataset=rows)


@pytest.mark.filterwarnings("ignore")
def test_scales_that_are_trained(llama, arguments, rows):
    model = llama()
    quantize_(model, Int4WeightOnlyConfig(32))
    codes = model.model.layers[0].mlp.up_proj.weight
    train_scales_(model)
    arguments.learning_rate = 1e-5
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    ids = rows[0]["input_ids"][None]
    trained = model(ids).logits
    store_scales_(model)
    assert torch.equal(model(ids).logits, trained)
    assert not torch.equal(
        model.model.layers[0].mlp.up_proj.weight.dequantize(), codes.dequantize()
    )
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(model, arguments, train_dataset=rows)
