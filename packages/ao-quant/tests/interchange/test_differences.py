"""`ao diff`: formats, bytes, SQNR, and which of two is nearer to the original."""

from __future__ import annotations

import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext.saving import write_checkpoint
from ao_quant.interchange import convert_checkpoint, diff_checkpoints


def test_two_folders_and_their_original(tmp_path) -> None:
    torch.manual_seed(0)
    dense = {"a.weight": torch.randn(32, 64).half(), "b.weight": torch.randn(32, 64).half()}
    spec = {bits: Spec(f"int{bits}", (1, 32), "float16", layout="packed") for bits in (3, 4)}
    four = {name: quantize_tensor(each, spec[4]) for name, each in dense.items()}
    mixed = four | {"b.weight": quantize_tensor(dense["b.weight"], spec[3])}
    for name, tensors in {"dense": dense, "four": four, "mixed": mixed}.items():
        write_checkpoint(tensors.items(), tmp_path / name)
    found = diff_checkpoints(tmp_path / "four", tmp_path / "mixed", original=tmp_path / "dense")
    same, other = found.tensors
    assert (same.same_bytes, same.equal, same.nearer) == (True, True, "both")
    assert (other.same_bytes, other.equal, other.nearer) == (False, False, "first")
    assert other.sqnr_first > other.sqnr_second > 10
    assert found.exit_code == 1
    assert "b.weight: max difference" in str(found)
    convert_checkpoint(tmp_path / "four", tmp_path / "gptq", "gptq_v2")
    across = diff_checkpoints(tmp_path / "four", tmp_path / "gptq")
    assert across.exit_code == 0
    assert not any(each.same_bytes for each in across.tensors)
    write_checkpoint([("a.weight", four["a.weight"])], tmp_path / "less")
    assert "only in the first" in str(diff_checkpoints(tmp_path / "four", tmp_path / "less"))


def test_the_command(tmp_path) -> None:
    from typer import Typer
    from typer.testing import CliRunner

    from ao_quant.interchange.command import diff

    app = Typer()
    app.command()(diff)
    write_checkpoint([("a", torch.ones(3))], tmp_path / "one")
    write_checkpoint([("a", torch.zeros(3))], tmp_path / "two")
    line = [str(tmp_path / "one"), str(tmp_path / "two"), "--json"]
    result = CliRunner().invoke(app, line)
    assert (result.exit_code, '"equal": false' in result.stdout) == (1, True)
