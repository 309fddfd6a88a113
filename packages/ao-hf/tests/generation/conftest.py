"""A small Llama with random weights, a tokenizer of bytes, and the command `ao` with what ao-hf adds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from ao_core.ext.cli import make_group
from ao_hf.generation import Loaded, load
from ao_hf.plugin import ao_cli

sys.path.insert(0, str(Path(__file__).parent))

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def make_folder(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Sizes that are no multiples of a group; float32, so that chunks and steps agree but for roundings."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=0, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None  # random weights would stop anywhere
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make_folder(tmp_path_factory.mktemp("generation") / "dense")


@pytest.fixture(scope="session")
def no_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make_folder(tmp_path_factory.mktemp("generation") / "plain", template=None)


@pytest.fixture
def loaded(folder: Path) -> Loaded:
    return load(folder, device="cpu")


@pytest.fixture
def ao():
    """Call the command with arguments; returns its result."""
    app = make_group("ao", "")
    app.callback()(lambda: None)  # as `ao` has options of its own
    ao_cli(app)
    return lambda *args, **options: CliRunner().invoke(app, [str(arg) for arg in args], **options)
