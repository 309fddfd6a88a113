"""Loading in two threads at once, and models in processes that were forked after loading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ao_core import load_model, quantize_


@pytest.fixture
def folder(llama, tmp_path):
    model = llama()
    quantize_(model, "int4_weight_only")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def logits(model, tokens):
    return model(tokens).logits


def test_two_threads_load_at_once(folder, tokens, llama):
    expected = logits(AutoModelForCausalLM.from_pretrained(folder), tokens)
    models = [
        llama() for _ in range(4)
    ]  # `from_pretrained` is not made for it, nor of dense models

    def load(model):
        load_model(model, folder, strict=False)
        return model

    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(load, models))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(logits, loaded, [tokens] * 4))
    assert all(torch.equal(each, expected) for each in found)


class Scores(torch.utils.data.Dataset):
    """What a model says of each row, computed by the worker that reads it."""

    def __init__(self, model, tokens):
        self.model, self.tokens = model, tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return logits(self.model, self.tokens[number : number + 1])


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used before"])
def test_forked_workers_of_a_data_loader(folder, tokens, used):
    model = AutoModelForCausalLM.from_pretrained(folder)
    scores = Scores(model, tokens)
    if used:  # its kernels are chosen, and threads may have been started
        logits(model, tokens)
    found = list(DataLoader(scores, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert all(torch.equal(each, scores[number]) for number, each in enumerate(found))
