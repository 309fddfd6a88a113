"""lm-eval on quantized models, offline, with a task of its own; `nox -s evaluate` installs lm-eval.

Not among the tests of the package: lm-eval brings datasets, pandas, pyarrow and more, 0.4 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

import ao_hf  # noqa: F401 - so that transformers knows ao here
from ao_core import QTensor, quantize_
from ao_core.ext import ConfigError
from ao_hf.generation import Loaded, score_tasks
from ao_quant import quantize_checkpoint

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


def dense() -> Any:
    """A small random language model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=32, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the description of the task, which names the file of questions in full."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    task = (HERE / "capitals.yaml").read_text()
    questions = str(HERE / "capitals.jsonl")
    (folder / "capitals.yaml").write_text(task.replace("capitals.jsonl", questions))
    return folder


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


def accuracy(expected: list[list[float]]) -> float:
    """How often the likeliest choice is the right one."""
    pairs = zip(expected, DOCS, strict=True)
    return sum(s.index(max(s)) == doc["answer"] for s, doc in pairs) / len(DOCS)


@pytest.mark.parametrize("recipe", ["int8_weight_only", "nf4_weight_only"])
def test_a_model_object(recipe: str, tasks: Path) -> None:
    """Its accuracy, and the likelihood of every choice."""
    model, words = dense(), tokenizer()
    quantize_(model, recipe)
    assert any(isinstance(p, QTensor) for p in model.parameters())
    expected = log_likelihoods(model, words)
    done = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=words, batch_size=4),
        tasks=["capitals"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    assert done["results"]["capitals"]["acc,none"] == pytest.approx(accuracy(expected))
    check_samples(done["samples"]["capitals"], expected)


def check_samples(samples: list[Any], expected: list[list[float]]) -> None:
    """Every choice of every question has its likelihood."""
    assert sorted(sample["doc_id"] for sample in samples) == list(range(len(DOCS)))
    for sample in samples:
        made = [float(response[0]) for response in sample["filtered_resps"]]
        assert made == pytest.approx(expected[sample["doc_id"]], abs=1e-4)


@pytest.mark.parametrize("recipe", ["int8_weight_only", None])
def test_the_tasks_of_ao_eval(recipe: str | None, tasks: Path) -> None:
    """They are those of lm-eval on the model; a task that is not there is refused."""
    model, words = dense(), tokenizer()
    if recipe is not None:
        quantize_(model, recipe)
    loaded = Loaded(model, words, tasks)
    found = score_tasks(loaded, ["capitals"], folder=str(tasks))
    expected = accuracy(log_likelihoods(model, words))
    assert found["capitals"]["acc"] == pytest.approx(expected)
    with pytest.raises(ConfigError, match="tasks='absent': lm-eval has none"):
        score_tasks(loaded, ["capitals", "absent"], folder=str(tasks))


def command_line(folder: Path, tasks: Path, out: Path, autoload: str) -> Any:
    """The program `lm_eval`, with or without what ao-hf-autoload does."""
    command = [
        str(Path(sys.executable).with_name("lm_eval")), "--model", "hf",
        "--model_args", f"pretrained={folder},dtype=float32", "--tasks", "capitals",
        "--include_path", str(tasks), "--device", "cpu", "--batch_size", "4",
        "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as `ao quantize` writes it."""
    dense().save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "int4", "int4_weight_only/g32-asymmetric")
    return tmp_path / "int4"


def test_the_command_line_on_a_folder(folder: Path, tasks: Path, tmp_path: Path) -> None:
    """It gives what the model gives that Python loads, and other values than the dense model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert any(isinstance(p, QTensor) for p in model.parameters())
    expected = log_likelihoods(model, tokenizer())
    off = torch.tensor(expected) - torch.tensor(log_likelihoods(dense(), tokenizer()))
    assert 1e-3 < float(off.abs().max()) < 0.1

    done = command_line(folder, tasks, tmp_path / "out", autoload="1")
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["capitals"]["acc,none"]
    assert found == pytest.approx(accuracy(expected))
    (lines,) = (tmp_path / "out").rglob("samples_capitals_*.jsonl")
    check_samples([json.loads(line) for line in lines.read_text().splitlines()], expected)


def test_the_command_line_without_autoload(folder: Path, tasks: Path, tmp_path: Path) -> None:
    """It stops, and evaluates no random weights."""
    done = command_line(folder, tasks, tmp_path / "out", autoload="0")
    assert done.returncode != 0
    assert "ValueError: Unknown quantization type, got ao" in done.stderr
    assert not list((tmp_path / "out").rglob("*"))
