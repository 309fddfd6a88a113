"""`ao generate` as users call it."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from ao_core.testing.warm import run_python
from ao_hf import plan_cache
from ao_hf.generation import generate, load

ARGUMENTS = ("--max-new-tokens", "5", "--device", "cpu")


@pytest.fixture
def terminal(monkeypatch):
    """Lines that a user types; returns how to set them."""

    def lines(*typed: str) -> None:
        left = list(typed)

        def read(shown: str) -> str:
            assert shown == "> "
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("ao_hf.commands.generate._is_terminal", lambda: True)

    return lines


@pytest.mark.slow
def test_as_a_program(folder):
    env = {**os.environ, "COLUMNS": "200", "AO_PLUGINS": "hf,quant"}
    done = run_python("-m", "ao_core.cli", "generate", folder, "Hello", *ARGUMENTS, env=env)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == generate(load(folder, device="cpu"), "Hello", max_new_tokens=5).text + "\n"
    )
    assert done.stderr.startswith("5 tokens; first after ")
    assert done.stderr.count("\n") == 1


def test_prompt_from_the_standard_input(ao, folder):
    result = ao("generate", folder, "-", *ARGUMENTS, input="Hello")
    assert result.exit_code == 0, result.output
    assert (
        result.stdout == generate(load(folder, device="cpu"), "Hello", max_new_tokens=5).text + "\n"
    )


def test_all_options_reach_the_model(ao, folder):
    options = [
        "--recipe",
        "int8_weight_only",
        "--kv",
        "kv8",
        "--draft",
        "int4",
        "--temperature",
        "0.8",
        "--top-k",
    ]
    options += [
        "9",
        "--top-p",
        "0.9",
        "--seed",
        "1",
        "--system",
        "s",
        "--chat",
        "--dtype",
        "float32",
    ]
    first = ao("generate", folder, "Hello", *ARGUMENTS, *options)
    assert first.exit_code == 0, first.output
    assert "drafted tokens accepted" in first.stderr
    again = ao("generate", folder, "Hello", *ARGUMENTS, *options)
    assert again.stdout == first.stdout


def test_a_plan_of_a_cache(ao, folder, tmp_path):
    loaded, path = load(folder, device="cpu"), tmp_path / "plan.json"
    plan = plan_cache(loaded.model, [torch.arange(1, 129)[None]], bits=9.5)
    plan.save(path)
    result = ao("generate", folder, "Hello", "--kv", path, *ARGUMENTS)
    assert result.exit_code == 0, result.output
    assert result.stdout == generate(loaded, "Hello", kv=plan, max_new_tokens=5).text + "\n"
    path.write_text("{}")
    result = ao("generate", folder, "Hello", "--kv", path, *ARGUMENTS)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not a plan of a cache" in result.stderr


def test_a_conversation(ao, folder, terminal):
    terminal("one", "two", "")
    result = ao("generate", folder, *ARGUMENTS)
    assert result.exit_code == 0, result.output
    loaded = load(folder, device="cpu")
    first = generate(loaded, "one", max_new_tokens=5)
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first.text}]
    second = generate(loaded, [*turns, {"role": "user", "content": "two"}], max_new_tokens=5)
    assert result.stdout == f"{first.text}\n{second.text}\n"
    assert result.stderr.count("tokens; first after") == 2


def test_a_conversation_ends_with_the_input(ao, folder, terminal):
    terminal()
    assert ao("generate", folder, *ARGUMENTS).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "PROMPT is missing"),
        (("-",), "the standard input is empty"),
        (("x", "--recipe", "int4_weight_onyl"), "Did you mean 'int4_weight_only'"),
        (("x", "--kv", "kv88"), "Did you mean 'kv8'"),
        (("x", "--kv", "none.json"), "none.json is missing"),
        (("x", "--draft", "int44"), "unknown recipe 'int44'"),
        (("x", "--temperature", "-1"), "temperature=-1.0"),
    ],
)
def test_bad_input_is_one_line(ao, folder, arguments, message):
    result = ao("generate", folder, *arguments, *ARGUMENTS)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_conversation_needs_a_template(ao, folder, terminal):
    terminal("x")
    assert "--no-chat: a conversation" in ao("generate", folder, "--no-chat", *ARGUMENTS).stderr


def test_without_transformers(ao, folder, monkeypatch):
    monkeypatch.setattr("ao_hf.generation.models.find_spec", lambda name: None)
    result = ao("generate", folder, "x")
    assert 'pip install "ao-hf[transformers]"' in result.stderr
    assert "transformers" in sys.modules  # of the tests, not of the command
