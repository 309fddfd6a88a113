"""lm-eval on quantized models, offline, with a task of its own; `nox -s evaluate` installs lm-eval.

Not among the tests of the package: lm-eval brings datasets, pandas, pyarrow and more, 0.4 GB.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import lm_eval
import pytest
import tokenizers
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ao_core import QTensor, quantize_

HERE = Path(__file__).parent
DOCS = [json.loads(line) for line in (HERE / "capitals.jsonl").read_text().splitlines()]


def tokenizer() -> Any:
    """One token a word."""
    words = sorted({word for doc in DOCS for word in (doc["question"].split() + doc["choices"])})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<pad>"
    )


@pytest.fixture(params=["int8_weight_only", "nf4_weight_only"])
def model(request: pytest.FixtureRequest) -> Any:
    """A small random language model, quantized."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=32, eos_token_id=1,
    )  # fmt: skip
    built = transformers.LlamaForCausalLM(config).eval()
    quantize_(built, request.param)
    return built


@torch.no_grad()
def log_likelihoods(model: Any, words: Any) -> list[list[float]]:
    """That of each choice after its question, computed without lm-eval."""
    found = []
    for doc in DOCS:
        question = words(doc["question"], return_tensors="pt", add_special_tokens=False).input_ids
        logits = model(input_ids=question).logits[0, -1].double()
        scores = logits.log_softmax(0)
        found.append([float(scores[words.convert_tokens_to_ids(c)]) for c in doc["choices"]])
    return found


def test_a_model_object(model: Any, tmp_path: Path) -> None:
    """Its accuracy, and the likelihood of every choice."""
    assert any(isinstance(p, QTensor) for p in model.parameters())
    words = tokenizer()
    expected = log_likelihoods(model, words)
    shutil.copy(HERE / "capitals.jsonl", tmp_path)
    task = (HERE / "capitals.yaml").read_text()
    data = str(tmp_path / "capitals.jsonl")
    (tmp_path / "capitals.yaml").write_text(task.replace("capitals.jsonl", data))
    os.environ["HF_HOME"] = str(tmp_path / "cache")
    done = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=words, batch_size=4),
        tasks=["capitals"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    right = sum(
        scores.index(max(scores)) == doc["answer"]
        for scores, doc in zip(expected, DOCS, strict=True)
    )
    assert done["results"]["capitals"]["acc,none"] == pytest.approx(right / len(DOCS))
    for sample in done["samples"]["capitals"]:
        made = [float(response[0]) for response in sample["filtered_resps"]]
        assert made == pytest.approx(expected[sample["doc_id"]], abs=1e-4)
