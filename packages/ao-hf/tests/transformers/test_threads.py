"""Loading in two threads: `from_pretrained` behind a lock, `load_model` without one."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from ao_core import load_model
from ao_hf import AoConfig

TIMES = 6


@pytest.fixture
def folder(dense, tmp_path):
    config = AoConfig("int8_weight_only")
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.save_pretrained(tmp_path / "q")
    return tmp_path / "q"


def in_two_threads(load):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: load(), range(TIMES)))


def test_from_pretrained_behind_a_lock(folder, dense, tokens):
    """transformers sets the default dtype of the process meanwhile, so the program takes turns."""
    lock, config = threading.Lock(), AoConfig("int8_weight_only")

    def load():
        with lock:
            quantized = AutoModelForCausalLM.from_pretrained(folder)
        with lock:
            return quantized, AutoModelForCausalLM.from_pretrained(
                dense, quantization_config=config
            )

    for pair in in_two_threads(load):
        first, second = (model(tokens).logits for model in pair)
        assert torch.equal(first, second)
    assert torch.get_default_dtype() == torch.float32


def test_load_model_without_one(folder, tokens, llama):
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    empty = llama()

    def load():
        load_model(model := copy.deepcopy(empty), folder)
        return model

    for model in in_two_threads(load):
        assert torch.equal(model(tokens).logits, expected)
