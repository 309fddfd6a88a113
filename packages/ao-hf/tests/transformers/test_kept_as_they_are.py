"""What some models need: experts that files hold in halves, and layers that stay in float32."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ao_core import QTensor, quantize_tensor
from ao_hf import AoConfig
from ao_quant import Float8WeightOnlyConfig, NVFP4WeightOnlyConfig, quantize_checkpoint

#: one scale per expert's matrix, or one for the scales of it
RECIPES = {
    "one scale": Float8WeightOnlyConfig(granularity="tensor"),
    "scale of scales": NVFP4WeightOnlyConfig(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_experts_with_one_scale(tmp_path, name):
    """`ao quantize` rounds the halves of gate_up_proj as they are in the files; loading joins them."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.1)).eval()
    model.save_pretrained(tmp_path / "dense")
    config, tokens = RECIPES[name], torch.tensor([[5, 6, 7]])

    quantize_checkpoint(tmp_path / "dense", tmp_path / "q", config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    weight = loaded.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(weight, QTensor)
    dense = model.model.layers[0].mlp.experts.gate_up_proj.detach()
    spec = config.weight_format(dense.dtype).spec
    halves = [quantize_tensor(half, spec) for half in dense[1].chunk(2)]
    assert torch.equal(weight.dequantize()[1], torch.cat([half.dequantize() for half in halves]))

    on_the_fly = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=AoConfig(config)
    )
    for i, each in enumerate((loaded, on_the_fly)):
        each.save_pretrained(tmp_path / f"{i}")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{i}")
        assert torch.equal(again(tokens).logits, each(tokens).logits)


def test_float32_layers_of_float16_models(tmp_path):
    """T5 overflows in float16 where `wo` does; its codes give float32 then, as its weight would."""
    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=96, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "dense")
    ids = {"input_ids": torch.tensor([[5, 6]]), "decoder_input_ids": torch.tensor([[0, 4]])}
    load = T5ForConditionalGeneration.from_pretrained

    for dtype, wo in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        config = AoConfig("int8_weight_only")
        made = load(tmp_path / "dense", dtype=dtype, quantization_config=config)
        made.save_pretrained(tmp_path / "q")
        loaded = load(tmp_path / "q", dtype=dtype)
        for each in (made, loaded):
            dense = each.encoder.block[0].layer[1].DenseReluDense
            assert isinstance(dense.wo.weight, QTensor)
            assert (dense.wi.weight.dtype, dense.wo.weight.dtype) == (dtype, wo)
        assert torch.equal(loaded(**ids).logits, made(**ids).logits)
