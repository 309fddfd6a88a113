"""Loading holds the model once."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from ao_core.tensor.saving import write_checkpoint


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_meta_model_is_loaded_without_a_second_copy(tmp_path):
    """Peak of resident memory in a new process, against the size of the checkpoint."""
    layers = {str(i): torch.full((1024, 4096), float(i)) for i in range(8)}
    write_checkpoint(layers.items(), tmp_path)
    script = f"""
        import torch
        from torch import nn
        from ao_core import load_model
        with torch.device("meta"):
            model = nn.ParameterDict({{str(i): torch.empty(1024, 4096) for i in range(8)}})
        load_model(nn.Linear(1, 1), {str(tmp_path)!r}, strict=False)
        peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
        before = peak()
        load_model(model, {str(tmp_path)!r})
        print(peak() - before)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True
    )
    grown, size = int(out.stdout), 8 * 16 * 1024
    assert 0.8 * size < grown < 1.25 * size
