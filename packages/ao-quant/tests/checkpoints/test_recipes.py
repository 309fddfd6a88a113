"""Every recipe, from files to files: the bytes of quantizing in memory, within the memory that is stated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import ao_quant
from ao_core import FqnToConfig, config_to_json, quantize_, save_model
from ao_core.ext.saving import write_checkpoint


class Model(nn.Module):
    """A linear layer with ragged groups, experts, attention."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(200, 140)
        self.experts_proj = nn.Parameter(torch.empty(2, 40, 136))
        self.attention = nn.MultiheadAttention(48, 4)


def test_the_bytes_of_quantizing_in_memory(recipe, tmp_path):
    model = Model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    save_model(model, tmp_path / "dense")
    report = ao_quant.quantize_checkpoint(
        tmp_path / "dense", tmp_path / "out", recipe, max_shard_size=20_000
    )
    assert len(report.with_status("changed")) >= 3
    in_memory = quantize_(model, recipe)
    save_model(model, tmp_path / "in_memory", max_shard_size=20_000)
    for file in (tmp_path / "in_memory").iterdir():
        other = tmp_path / "out" / file.name
        if file.name == "ao.lock.json":  # of files it has their source, too
            locks = [json.loads(path.read_text()) for path in (file, other)]
            assert locks[0]["tensors"] == locks[1]["tensors"]
        else:
            assert other.read_bytes() == file.read_bytes(), file.name
    assert {r.fqn: r.status for r in report} == {r.fqn: r.status for r in in_memory}


# The memory of a process that may hold no more than was stated: what the system counts, and a limit that it
# enforces on what the process has allocated.
LIMITED = """
    import json, os, resource, torch
    os.fsync = lambda file: None  # this is not about the disk
    torch.set_num_threads(1)
    from ao_core import config_from_json, plan_checkpoint, quantize_checkpoint

    def now(field):
        return int(open("/proc/self/status").read().split(field + ":")[1].split()[0]) * 1024

    config = config_from_json({config!r})
    quantize_checkpoint({warm!r}, {warm_out!r}, config)  # libraries are loaded
    stated = plan_checkpoint({source!r}, config).peak_memory
    open("/proc/self/clear_refs", "w").write("5")
    before, data = now("VmRSS"), now("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (data + stated, data + stated))
    try:
        torch.ones(stated + 10**8, dtype=torch.uint8)
        raise SystemExit("the limit does not hold")
    except RuntimeError:
        pass
    report = quantize_checkpoint({source!r}, {out!r}, config)
    print(json.dumps([stated, now("VmHWM") - before, len(report.with_status("changed"))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_what_was_stated(tmp_path, monkeypatch):
    """In the reference kernels, which need the most: four weights of 75 MB, of which one is kept."""
    rows = torch.randn(128, 6144).bfloat16()
    names = ["a.weight", "b.weight", "c.weight", "embed.weight"]
    monkeypatch.setattr(os, "fsync", lambda file: None)
    write_checkpoint(((name, rows.repeat(48, 1)) for name in names), tmp_path / "source")
    write_checkpoint(((name, rows[:, :64]) for name in names), tmp_path / "warm")
    config = FqnToConfig(
        {
            "a.weight": "nf4_weight_only",
            "b.weight": "int4_weight_only",
            "c.weight": "float8_weight_only/tensor",
            "*": "int8_weight_only",
        }
    )
    script = LIMITED.format(
        config=config_to_json(config),
        source=str(tmp_path / "source"),
        out=str(tmp_path / "out"),
        warm=str(tmp_path / "warm"),
        warm_out=str(tmp_path / "warm_out"),
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, check=False, env={**os.environ, "AO_KERNELS": "reference"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    stated, peak, count = json.loads(done.stdout)
    assert stated == 2 * 6144 * 6144 * 2 + 256 * 10**6
    assert count == 3
    # one weight is read as a whole; of all four, nothing but one
    assert 6144 * 6144 * 2 < peak < stated, (peak, stated)
