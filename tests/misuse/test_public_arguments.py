"""Every public function and class, each of its parameters given what cannot work: one error that names it."""

from __future__ import annotations

import inspect
import re
import shutil
from contextlib import AbstractContextManager
from importlib import import_module
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import nn
from working_arguments import VALID, folder, model

import ao_core
from ao_core.ext import AoError
from ao_core.ext.saving import write_checkpoint
from ao_quant.gguf import write_gguf

PACKAGES = (
    "ao_core", "ao_quant", "ao_float8", "ao_sparsity", "ao_optim", "ao_kernels", "ao_quant.gguf",
    "ao_core.tensor.saving", "ao_hf", "ao_hf_autoload",
)  # fmt: skip
#: what ao makes and hands out, what subclasses fill in, and a tuple of fields that the configuration which
#: takes it checks
MADE_BY_AO = {
    "AutoquantReport", "CachePlan", "Calibration", "Call", "ChannelGroup", "Compared", "Layout",
    "PrecisionRecord", "PrecisionTelemetry", "PruneReport", "Pruning", "QuantizationPlan", "Recommendation",
    "RemovalReport",
    "OpCall", "Report", "Sensitivity", "Float8Matmul", "hookimpl",
    "FuseReport", "StateReport", "StepCall", "GGUFFile", "GGUFHeader", "GGUFInfo", "Checkpoint", "Entry",
    "Loaded", "Provider", "Imatrix", "LowRank",
}  # fmt: skip
#: hot constructors, which look only at what would crash later: tensors, and the dtype of a wrapper
UNCHECKED = {
    "QTensor": {"shape", "dtype", "strides", "order", "flat_from", "requires_grad"},
    "ComputeWeight": {"transposed", "requires_grad"},
}

#: names in annotations -> the types that they stand for
ALIASES = {
    "FilterFn": "Callable | None", "Progress": "bool | Callable | None", "GroupSize": "int | str",
    "ConfigLike": "Config | str | Mapping", "Config": "Config", "Sample": "Tensor | tuple | Mapping",
    "Inputs": "Tensor | tuple | Mapping", "Data": "Iterable", "Timer": "Callable", "Loss": "Callable",
    "Method": "Callable", "Channels": "Mapping", "Parts": "Mapping", "dict": "Mapping",
    "PathLike": "str", "Record": "Config", "Choice": "Callable", "Float8Matmul": "tuple",
    "device": "device | int", "SupportsInt": "int", "Recipes": "None | str | Sequence | Mapping",
}  # fmt: skip
#: values, and the types in annotations that they are, or might be, of
POOL = [
    (None, {"None"}),
    (True, {"bool"}),
    (3, {"int", "float"}),
    (-1, {"int", "float"}),
    (2.5, {"float"}),
    (nan, {"float"}),
    (inf, {"float"}),
    ("no such thing", {"str"}),
    ("", {"str"}),
    (b"x", set()),
    (["x"], {"Sequence", "Iterable", "list"}),
    ([object()], {"Sequence", "Iterable", "list"}),
    ((), {"Sequence", "Iterable", "tuple"}),
    ({}, {"Mapping", "Iterable"}),
    ({"x": object()}, {"Mapping", "Iterable"}),
    (object(), set()),
    (int, {"type"}),
    (torch.tensor([[1, 2], [3, 4]]), {"Tensor", "Iterable"}),
    (torch.full((8, 8), nan), {"Tensor", "Iterable"}),
]


#: without arguments, or changing what other tests see, or tried below
ELSEWHERE = {
    "register", "reopen", "save_model", "quantize_checkpoint", "write_checkpoint", "write_gguf",
    "write_imatrix", "replay_checkpoint",
    "attach",
}  # fmt: skip


def is_rule(thing):
    """Whether it is an optimizer with a rule, whose options have no annotations; ao-optim tries them."""
    return hasattr(thing, "known") or thing.__name__ == "LowBitOptimizer"


def public():
    """(name, what it is) of what takes arguments of a user's; what two packages export comes once."""
    found = {}
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            raised = isinstance(thing, type) and issubclass(thing, BaseException)
            if raised or name in MADE_BY_AO | ELSEWHERE:
                continue
            if callable(thing) and not is_rule(thing):
                found.setdefault(id(thing), (thing.__name__, thing))
    return sorted(found.values(), key=lambda pair: pair[0])


PUBLIC = public()


def types_of(annotation):
    """The names of the types in an annotation, aliases replaced."""
    names = set(re.findall(r"\w+", re.sub(r"\[.*\]", "", str(annotation))))
    for _ in range(2):
        names = {w for n in names for w in re.findall(r"\w+", ALIASES.get(n, n))}
    return names


def state(arguments):
    """What may not change in the models among the arguments."""
    return [
        (
            [(name, id(module), type(module), module.training) for name, module in m.named_modules()],
            [(name, id(p), p._version) for name, p in m.named_parameters()],
            sorted(vars(m)),
        )
        for m in arguments.values()
        if isinstance(m, nn.Module)
    ]  # fmt: skip


def call(thing, arguments, parameter):
    """Call, enter what is a context, and leave it."""
    arguments = dict(arguments)
    if parameter is not None and parameter.kind is parameter.VAR_POSITIONAL:
        rest = [arguments.pop(parameter.name)]
        made = thing(*arguments.values(), *rest)
    elif "patterns" in arguments:
        made = thing(arguments["model"], arguments["patterns"])
    else:
        made = thing(**arguments)
    if isinstance(made, AbstractContextManager) and not inspect.isclass(thing):
        with made:
            pass
    return made


def misuses(name, thing):
    """(parameter, value, whether its type alone is wrong) of each misuse."""
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD or parameter.name in UNCHECKED.get(name, ()):
            continue
        words = types_of(parameter.annotation)
        for value, kinds in POOL:
            if (
                "Any" in words
                or (value is int and "Callable" in words)
                or (parameter.default is not parameter.empty and value is parameter.default)
            ):
                continue
            yield parameter, value, not (words & kinds)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Files that are written to a folder whose name works after all."""
    monkeypatch.chdir(tmp_path)


COUNTS: dict[str, int] = {}


def test_all_packages_are_tried():
    """What they export, without exception; `test_arguments_are_known_for_all` names what is new."""
    found = Path(__file__).parents[2].glob("packages/*/src/*/__init__.py")
    assert {path.parent.name for path in found} <= set(PACKAGES)


def test_arguments_are_known_for_all():
    """A new public function needs an entry; what has no required parameters needs none."""
    lacking = [
        name
        for name, thing in PUBLIC
        if name not in VALID
        and any(
            p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(thing).parameters.values()
        )
    ]
    assert not lacking, f"VALID has no arguments for {lacking}"


@pytest.mark.parametrize(("name", "thing"), PUBLIC, ids=[name for name, _ in PUBLIC])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_misuse_is_one_error_that_names_the_parameter(name, thing, tmp_path):
    valid = VALID.get(name, dict)
    call(thing, valid(), None)  # or nothing could be concluded
    wrong = []
    for parameter, value, alien in misuses(name, thing):
        COUNTS[name] = COUNTS.get(name, 0) + 1
        arguments = {**valid(), parameter.name: value}
        before = state(arguments)
        text = f"{name}({parameter.name}={value!r:.40})"
        try:
            call(thing, arguments, parameter)
        except AoError as error:
            items = value if isinstance(value, (list, dict)) else [value]
            named = parameter.name in str(error) or (
                not alien and any(str(item) in str(error) for item in items)
            )
            if not named:
                wrong.append(f"{text}: not named in: {error}")
            if state(arguments) != before:
                wrong.append(f"{text}: the model was changed")
            if written := [path.name for path in tmp_path.iterdir()]:
                wrong.append(f"{text}: wrote {written}")
        except Exception as error:
            wrong.append(f"{text}: {type(error).__name__}: {error}")
        else:
            if alien:
                wrong.append(f"{text}: taken")
            # a name that works: it is there, and nothing beside it
            for path in tmp_path.iterdir():
                if path.name != value:
                    wrong.append(f"{text}: wrote {path.name}")
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not wrong, "\n".join(["", *wrong])


def test_they_were_many():
    """Of one process: where tests are spread over several, each has a part."""
    if set(COUNTS) == {name for name, thing in PUBLIC if inspect.signature(thing).parameters}:
        assert sum(COUNTS.values()) >= 6000


@pytest.mark.parametrize("value", [value for value, kinds in POOL if "str" not in kinds])
def test_saving_and_jobs(value, tmp_path, tmp_path_factory):
    """What writes files: nothing is written."""
    source, locked = folder(), tmp_path_factory.mktemp("locked")
    ao_core.quantize_checkpoint(source, locked, "int8_weight_only")
    names = {
        ao_core.save_model: {"model": model(), "dir": tmp_path / "a"},
        ao_core.quantize_checkpoint: {
            "src": folder(), "dst": tmp_path / "b", "config": "int8_weight_only"},
        ao_core.replay_checkpoint: {"lock": locked, "src": source, "dst": tmp_path / "e"},
        write_checkpoint: {"tensors": [("x", torch.ones(2))], "dir": tmp_path / "c"},
        write_gguf: {"path": tmp_path / "d", "tensors": {"x": torch.ones(2)}},
    }  # fmt: skip
    for function, arguments in names.items():
        for parameter in inspect.signature(function).parameters.values():
            words = types_of(parameter.annotation)
            if words & next(kinds for v, kinds in POOL if v is value) or "Callable" in words:
                continue
            with pytest.raises(AoError, match=parameter.name):
                function(**{**arguments, parameter.name: value})
    assert not list(tmp_path.iterdir())
