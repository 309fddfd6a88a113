"""Where a program first meets ao does not matter: below a mode, while it is traced, in many threads."""

from __future__ import annotations

import os

import pytest

from ao_core.testing.warm import run_python

#: contexts in which something of ao is first looked up, each in a process of its own
STATES = {
    "meta": "torch.device('meta')",
    "fake": "FakeTensorMode(allow_non_fake_inputs=True)",
    "inference": "torch.inference_mode()",
    "float64": "default(torch.set_default_dtype, torch.float64, torch.float32)",
    "device": "default(torch.set_default_device, 'meta', None)",
    "autocast": "torch.autocast('cpu', torch.bfloat16)",
    "function mode": "Everything()",
    "disabled": "torch._C.DisableTorchFunction()",
}

#: the lookup inside, whatever comes of it there, and then what must work: a layer of each format, its bits
PROGRAM = """
import sys, warnings
from contextlib import contextmanager
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch._subclasses.fake_tensor import FakeTensorMode

warnings.simplefilter("error")

class Everything(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return torch.zeros(1)

@contextmanager
def default(set_default, value, back):
    set_default(value)
    try:
        yield
    finally:
        set_default(back)

def outputs():
    found = []
    for recipe in ("int4_weight_only", "nf4_weight_only", "int8_dynamic_activation_int8_weight"):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(128, 64))
        quantize_(layer, recipe)
        found.append(layer(torch.ones(1, 128)).tolist())
    from ao_optim import AdamW8bit
    from ao_core import Spec, quantize_tensor
    values = quantize_tensor(torch.linspace(-1, 1, 256), Spec("dynamic8", (256,), layout="flat"))
    return [*found, values.dequantize().tolist()]

if sys.argv[1:]:
    try:
        with STATE:
            from ao_core import QTensor, quantize_
            from ao_core.ext import registry
            from ao_core.ext.kernels import fingerprint
            registry.recipes.names()
            "dynamic8" in registry.dtypes
            fingerprint("cpu")
            layer = nn.Linear(128, 64)
            quantize_(layer, "int4_weight_only")
            layer(torch.ones(1, 128))
    except (Exception, RecursionError):
        pass
from ao_core import quantize_
from ao_core.ext import problems
assert problems() == [], problems()
assert torch.get_default_dtype() is torch.float32, torch.get_default_dtype()
assert torch.zeros(1).device.type == "cpu"
print(outputs())
"""


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("AO_")}


@pytest.fixture(scope="module")
def expected() -> str:
    """What the program prints where nothing is looked up in advance."""
    return run_python("-c", PROGRAM, env=_environment(), check=True).stdout


@pytest.mark.parametrize("state", STATES)
def test_a_first_lookup_in_any_state_leaves_nothing_behind(state: str, expected: str) -> None:
    program = PROGRAM.replace("STATE", STATES[state])
    assert run_python("-c", program, "early", env=_environment(), check=True).stdout == expected


def test_a_first_lookup_inside_a_dispatch_rule_and_a_transform(expected: str) -> None:
    states = (
        "torch.vmap(torch.func.grad(lambda x: (body(), x.sum())[1]))(torch.ones(2, 3))",
        "make_fx(lambda x: (body(), x + 1)[1], tracing_mode='fake')(torch.ones(2))",
        "Own() + 1",
    )
    for state in states:
        program = PROGRAM.replace("        with STATE:\n", "        def body():\n").replace(
            "    except (Exception", f"        {state}\n    except (Exception"
        )
        program = (
            "import torch\n"
            "from torch.fx.experimental.proxy_tensor import make_fx\n"
            "class Own(torch.Tensor):\n"
            "    @staticmethod\n"
            "    def __new__(cls): return torch.Tensor._make_wrapper_subclass(cls, (1,))\n"
            "    @classmethod\n"
            "    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):\n"
            "        body()\n"
            "        return torch.zeros(1)\n"
        ) + program.replace("def body():", "global body\n        def body():")
        assert run_python("-c", program, "early", env=_environment(), check=True).stdout == expected


COMPILE = """
import sys, torch
from torch import nn
import ao_core
layer = nn.Sequential(nn.Linear(128, 64))
layer.load_state_dict(torch.load(sys.argv[1], weights_only=True), assign=True)
with torch.no_grad():
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(1, 128))
    eager = layer(torch.ones(1, 128))
assert torch.equal(compiled, eager), (compiled, eager)
from ao_core.ext import problems
assert problems() == []
"""


def test_compiling_what_was_loaded_is_the_first_that_meets_ao(tmp_path: object) -> None:
    save = (
        "import sys, torch; from torch import nn; from ao_core import quantize_\n"
        "layer = nn.Sequential(nn.Linear(128, 64)); quantize_(layer, 'int4_weight_only')\n"
        "torch.save(layer.state_dict(), sys.argv[1])\n"
    )
    path = f"{tmp_path}/layer.pt"
    run_python("-c", save, path, env=_environment(), check=True)
    run_python("-c", COMPILE, path, env=_environment(), check=True)


THREADS = """
import threading, torch
from torch import nn
from ao_core import quantize_
torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(128, 64)) for _ in range(8)]
for model in models[1:]:
    model.load_state_dict(models[0].state_dict())
barrier, errors = threading.Barrier(8), []
def work(model):
    barrier.wait()
    try:
        quantize_(model, "int4_weight_only")
        with torch.no_grad():
            model.out = model(torch.ones(2, 128))
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(model,)) for model in models]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert errors == [], errors
assert all(torch.equal(model.out, models[0].out) for model in models)
"""


def test_eight_threads_meet_ao_at_once() -> None:
    for _ in range(3):
        run_python("-c", THREADS, env=_environment(), check=True)


IMPORTS = """
import sys, torch, importlib
from pathlib import Path
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
import torch._dynamo, torch.utils._device
from contextlib import ExitStack

import traceback
seen = []
def note(func):
    frames = [f for f in traceback.extract_stack() if "/ao_" in f.filename]
    if frames: seen.append((str(func), frames[-1].filename, frames[-1].lineno))
class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        note(func)
        return func(*args, **(kwargs or {}))
class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        note(func)
        return func(*args, **(kwargs or {}))
with Functions(), Ops():
    for package in ("ao_core", "ao_quant", "ao_float8", "ao_optim", "ao_sparsity", "ao_kernels"):
        module = importlib.import_module(package)
        root = Path(module.__path__[0])
        for path in sorted(root.rglob("*.py")):
            name = ".".join([package, *path.relative_to(root).with_suffix("").parts])
            # suites, gates and programs are for developers, who import them on purpose
            if ".testing" in name or ".gates" in name or name.endswith(("__main__", "__init__")):
                continue
            try:
                importlib.import_module(name)
            except (ImportError, RuntimeError):
                pass  # an optional dependency, or what follows a library that is loaded where it is used
assert not seen, seen
"""


def test_no_module_of_ao_computes_anything_while_it_is_imported() -> None:
    done = run_python("-c", IMPORTS, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]
