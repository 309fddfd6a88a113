"""The operator of torch that traced code has in place of `append_`: schema, versions, exported programs."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_quant.kv_cache import append_, kv_config, new_kv
from ao_quant.kv_cache.traced import _OP

#: programs that were exported before hold calls of it: it must not change
SCHEMA = (
    "ao_quant::kv_append(Tensor(a0!)[] state, Tensor key, Tensor value, SymInt size, SymInt window, "
    "bool centered, str key_names, str key_spec, str value_names, str value_spec) -> ()"
)


class Cache(nn.Module):
    """Appends tokens; returns how many there are, from memory that was written in the same program."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = new_kv(kv_config("kv4"), 1, 2, 16, 640, dtype=torch.float32)
        append_(self.kv, *torch.ones(2, 1, 2, 255, 16))
        for place, tensor in enumerate(self.kv.tensors()):
            self.register_buffer(f"kv_{place}", tensor)

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv.with_tensors(list(self.buffers()))
        before = kv.counts * 1
        append_(kv, key, value)
        return before, kv.counts + 0


def given(cache: Cache) -> tuple[Any, ...]:
    kv = cache.kv
    return (
        kv.tensors(), *torch.ones(2, 1, 2, 200, 16), kv.key.shape[2], kv.window, kv.center is not None,
        " ".join(kv.key.names), kv.key.text, " ".join(kv.value.names), kv.value.text,
    )  # fmt: skip


def same(a: Cache, b: nn.Module) -> bool:
    return all(map(torch.equal, a.buffers(), b.buffers()))


def test_schema() -> None:
    assert str(_OP._schema) == SCHEMA


def test_operator() -> None:
    """What torch asks of operators: what is written is in the schema, also where it is functionalized."""
    results = torch.library.opcheck(_OP, given(Cache()))
    assert set(results.values()) == {"SUCCESS"}, results


def test_what_autograd_has_saved_is_known_to_be_written() -> None:
    arguments = given(Cache())
    before = [x._version for x in arguments[0]]
    _OP(*arguments)
    assert all(x._version > old for x, old in zip(arguments[0], before, strict=True))
    with torch.inference_mode():
        _OP(*given(Cache()))  # which has no versions


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    eager, compiled = Cache(), Cache()
    tokens = torch.randn(2, 1, 2, 200, 16)
    torch.compiler.reset()
    found = torch.compile(compiled, fullgraph=True, backend=backend)(*tokens)
    assert all(map(torch.equal, found, eager(*tokens)))
    assert same(eager, compiled)


def test_exported_and_loaded() -> None:
    eager = Cache()
    tokens = tuple(torch.randn(2, 1, 2, 200, 16))
    file = io.BytesIO()
    torch.export.save(torch.export.export(Cache(), tokens), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert "kv_append" in str(loaded.graph)
    module = loaded.module()
    assert all(map(torch.equal, module(*tokens), eager(*tokens)))
    assert same(eager, module)


def test_functionalized() -> None:
    """A program without mutations: it writes into copies, and what it was given gets them at its end."""
    eager = Cache()
    tokens = tuple(torch.randn(2, 1, 2, 200, 16))
    program = torch.export.export(Cache(), tokens).run_decompositions({})
    assert "auto_functionalized" in str(program.graph)
    assert program.graph_signature.buffers_to_mutate
    module = program.module()
    assert all(map(torch.equal, module(*tokens), eager(*tokens)))
    assert same(eager, module)
