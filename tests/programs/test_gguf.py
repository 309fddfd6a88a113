"""A GGUF file of a Llama gives the logits of transformers' own loader, which dequantizes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from zoo import MODELS, outputs

from ao_core import dequantize_, quantize_
from ao_quant.gguf import read_gguf, write_gguf


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_llama(kind: str, tmp_path: Path) -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    quantize_(model, f"gguf_weight_only/{kind}", filter_fn=lambda module, name: "layers" in name)
    config = model.config
    metadata = {
        "general.architecture": "llama",
        "llama.vocab_size": config.vocab_size,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.context_length": config.max_position_embeddings,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    state = model.state_dict()
    write_gguf(tmp_path / "a.gguf", state, metadata, names="transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    )
    ours = MODELS["llama"].build()
    ours.load_state_dict(read_gguf(tmp_path / "a.gguf", names="transformers").tensors, assign=True)
    dense = MODELS["llama"].build()
    dense.load_state_dict(state, assign=True)
    dequantize_(dense)
    with torch.no_grad():
        expected = outputs(theirs.eval(), inputs)
        torch.testing.assert_close(outputs(ours, inputs), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outputs(dense, inputs), expected, rtol=1e-4, atol=1e-4)
