"""The registry without plugins: names, providers, built-ins, freezing."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ao_core.config import Config
from ao_core.errors import FrozenError, PluginError, UnknownNameError
from ao_core.folder_records import FolderKind
from ao_core.interchange_records import Interchange
from ao_core.model_records import ModelTransform
from ao_core.records import (
    Algorithm,
    Call,
    DType,
    Kernel,
    Op,
    Recipe,
    ScaleMethod,
    Transform,
)
from ao_core.registry import Registry


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    monkeypatch.setenv("AO_PLUGINS", "")
    monkeypatch.setattr("importlib_metadata.distributions", lambda: ())


def dtype(name):
    return DType(name, 4, "int", encode=lambda x: x, decode=lambda x: x, min=-8, max=7, quant_max=7)


def kernel(name):
    return Kernel(name, "linear", "plain", "cpu", fn=lambda x: x, priority=0)


def op(name):
    return Op(name, Call, lambda x: x, "Returns x.")


class FakeLayout:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def layouts_module(monkeypatch):
    """A stand-in, so that these tests need no layout of the package."""
    monkeypatch.setitem(sys.modules, "ao_core.layouts", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ao_core.layouts.base", SimpleNamespace(Layout=FakeLayout))


class SomeConfig(Config):
    pass


class OtherConfig(Config):
    pass


def transform(name, config_type=SomeConfig):
    return Transform(config_type, name, 1, apply=lambda weight, config, target: weight)


@pytest.fixture
def registry():
    return Registry({"dtypes": lambda: [dtype("int4"), dtype("int8")]})


def test_each_type_goes_to_its_table(registry, layouts_module):
    class MyAdam(torch.optim.SGD):
        pass

    records = {
        "dtypes": (dtype("d"), "d"),
        "layouts": (FakeLayout("l"), "l"),
        "ops": (op("o"), "o"),
        "kernels": (kernel("k"), "k"),
        "scale_methods": (ScaleMethod("s", None), "s"),
        "transforms": (transform("t"), "t"),
        "algorithms": (Algorithm("a", SomeConfig, tuple, tuple), "a"),
        "model_transforms": (ModelTransform("m", SomeConfig, tuple), "m"),
        "recipes": (Recipe("r", SomeConfig()), "r"),
        "folder_kinds": (FolderKind("f", bool, str, dict, str), "f"),
        "interchange": (Interchange("i", str, id, id, dict, "nothing"), "i"),
        "optimizers": (MyAdam, "MyAdam"),
    }
    assert list(registry.tables) == list(records)
    for plural, (record, name) in records.items():
        registry.add(record, provider=f"dist-{plural}")
        table = getattr(registry, plural)
        assert table is registry.tables[plural]
        assert table.get(name) is record
        assert table.provider(name) == f"dist-{plural}"
    for plural, (_, name) in records.items():
        assert [p for p, table in registry.tables.items() if name in table] == [plural]


def test_an_op_brings_its_reference(registry):
    registry.add(op("twice"), "ao-twice")
    kernel = registry.kernels.get("reference_twice")
    assert (kernel.op, kernel.layout, kernel.device, kernel.priority) == ("twice", "*", "*", -100)
    assert kernel.fn is registry.ops.get("twice").reference
    assert registry.kernels.provider("reference_twice") == "ao-twice"


def test_an_op_whose_reference_has_no_free_name_is_left_out_whole(registry):
    registry.add(replace(kernel("x"), name="reference_thrice"), "ao-first")
    with pytest.raises(PluginError, match="'reference_thrice' is provided by ao-first"):
        registry.add(op("thrice"), "ao-thrice")
    assert "thrice" not in registry.ops
    registry.add(op("twice"), "ao-twice")
    with pytest.raises(PluginError, match="op 'twice' is provided by ao-twice"):
        registry.add(op("twice"), "ao-thrice")
    assert registry.kernels.provider("reference_twice") == "ao-twice"


def test_ops_come_before_the_first_selection(registry):
    registry.freeze()
    with pytest.raises(FrozenError, match="op 'twice' of ao-twice comes too late"):
        registry.add(op("twice"), "ao-twice")
    registry.reopen()
    registry.add(op("twice"), "ao-twice")


def test_names_values_items_have_one_order_built_ins_first(registry):
    registry.add(dtype("abc"))
    assert registry.dtypes.names() == ["int4", "int8", "abc"]
    assert [record.name for record in registry.dtypes.values()] == registry.dtypes.names()
    assert registry.dtypes.items() == list(
        zip(registry.dtypes.names(), registry.dtypes.values(), strict=True)
    )
    assert registry.dtypes.provider("int4") == registry.dtypes.provider("abc") == "ao-core"


def test_contains_and_local(registry):
    assert "int4" in registry.dtypes
    assert "int5" not in registry.dtypes
    assert registry.dtypes.local("int8").name == "int8"
    assert registry.dtypes.local("int5") is None


def test_built_ins_come_in_when_their_table_is_touched_and_once():
    calls = []

    def source():
        calls.append(1)
        return (dtype(name) for name in ["int4"])

    registry = Registry({"dtypes": source})
    registry.builtin_sources["kernels"] = lambda: [kernel("k")]
    assert calls == []
    assert registry.kernels.names() == ["k"]
    assert calls == []
    for _ in range(3):
        assert registry.dtypes.names() == ["int4"]
    assert calls == [1]
    assert registry.epoch == 0


def test_a_built_in_source_that_fails_is_asked_again():
    answers = [ImportError("not yet"), [dtype("int4")]]

    def source():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    registry = Registry({"dtypes": source})
    with pytest.raises(ImportError, match="not yet"):
        registry.dtypes.get("int4")
    assert registry.dtypes.get("int4").name == "int4"


def test_built_ins_are_filled_once_by_many_threads():
    calls = []

    def source():
        calls.append(1)
        threading.Event().wait(0.02)
        return [dtype("int4")]

    registry = Registry({"dtypes": source})
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.dtypes.local("int4")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert len(found) == 8
    assert all(record is registry.dtypes.get("int4") for record in found)


@pytest.mark.parametrize("method", ["get", "provider"])
def test_an_unknown_name_gets_a_suggestion_and_the_list(registry, method):
    with pytest.raises(UnknownNameError) as caught:
        getattr(registry.dtypes, method)("itn4")
    assert str(caught.value) == ("unknown dtype 'itn4'. Did you mean 'int4'? Known: int4, int8.")


def test_a_duplicate_names_both_providers_and_keeps_the_first(registry):
    first = registry.dtypes.get("int4")
    epoch = registry.epoch
    with pytest.raises(PluginError, match=r"dtype 'int4' .*ao-core.*ao-marlin.*ao-core stays"):
        registry.add(dtype("int4"), provider="ao-marlin")
    assert registry.dtypes.get("int4") is first
    assert registry.dtypes.provider("int4") == "ao-core"
    assert registry.epoch == epoch


def test_a_duplicate_of_a_built_in_is_seen_before_the_table_was_read(registry):
    with pytest.raises(PluginError, match="ao-core already and claimed by in-process"):
        registry.add(dtype("int8"), provider="in-process")


@pytest.mark.parametrize(
    "record", [5, "int4", None, DType, FakeLayout, object()], ids=lambda r: type(r).__name__
)
def test_what_is_no_record_is_refused(registry, record):
    with pytest.raises(PluginError, match=r"no table holds; give one of: a DType, an instance of"):
        registry.add(record)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_record_needs_a_name(registry, name):
    record = dtype("int5")
    object.__setattr__(record, "name", name)  # which no record can be made with
    with pytest.raises(PluginError, match="must be a string that is not empty"):
        registry.add(record, provider="ao-marlin")
    assert registry.dtypes.names() == ["int4", "int8"]


def test_transform_for_goes_by_the_exact_class(registry):
    class Derived(SomeConfig):
        pass

    record = transform("some")
    registry.add(record)
    assert registry.transform_for(SomeConfig) is record
    with pytest.raises(UnknownNameError) as caught:
        registry.transform_for(Derived)
    assert "unknown configuration class 'Derived'" in str(caught.value)
    assert "Known: SomeConfig." in str(caught.value)
    assert "ao_core.register()" in str(caught.value)


def test_transform_for_sees_built_ins_first_of_all():
    record = transform("some")
    registry = Registry({"transforms": lambda: [record]})
    assert registry.transform_for(SomeConfig) is record


def test_one_transform_for_a_configuration_class(registry):
    registry.add(transform("some"), provider="ao-quant")
    with pytest.raises(
        PluginError, match=r"configuration class 'SomeConfig' .*ao-quant.*ao-marlin"
    ):
        registry.add(transform("other"), provider="ao-marlin")
    assert registry.transforms.names() == ["some"]
    registry.add(transform("other", OtherConfig))
    assert registry.transform_for(OtherConfig).name == "other"


def test_a_transform_whose_name_is_taken_does_not_claim_its_class(registry):
    registry.add(transform("some"))
    with pytest.raises(PluginError, match="transform 'some'"):
        registry.add(transform("some", OtherConfig))
    with pytest.raises(UnknownNameError):
        registry.transform_for(OtherConfig)


def test_frozen_tables_take_no_kernel_and_no_layout(registry, layouts_module):
    registry.freeze()
    assert registry.frozen
    for record in (kernel("late"), FakeLayout("late")):
        with pytest.raises(FrozenError, match=r"'late' of in-process .*ao_core\.reopen\(\)"):
            registry.add(record, provider="in-process")
    assert "late" not in registry.kernels
    assert "late" not in registry.layouts
    registry.add(dtype("late"))
    registry.add(transform("late"))
    registry.add(Recipe("late", SomeConfig()))
    assert "late" in registry.dtypes
    assert "late" in registry.transforms
    assert "late" in registry.recipes


def test_built_in_kernels_are_there_even_if_first_read_after_freezing():
    registry = Registry({"kernels": lambda: [kernel("k")]})
    registry.freeze()
    assert registry.kernels.names() == ["k"]


def test_reopen_lets_kernels_in_and_resets_dynamo_if_it_is_loaded(registry, monkeypatch):
    resets = []
    fake = SimpleNamespace(reset=lambda: resets.append(1))
    monkeypatch.setitem(sys.modules, "torch._dynamo", fake)
    registry.freeze()
    registry.reopen()
    assert not registry.frozen
    assert resets == [1]
    registry.add(kernel("late"))
    assert registry.kernels.get("late").name == "late"

    monkeypatch.delitem(sys.modules, "torch._dynamo")
    registry.freeze()
    registry.reopen()
    assert resets == [1]
    assert "torch._dynamo" not in sys.modules


def test_epoch_grows_with_every_addition_and_reopening(registry):
    epochs = [registry.epoch]
    registry.add(dtype("a"))
    epochs.append(registry.epoch)
    registry.add(kernel("b"))
    epochs.append(registry.epoch)
    registry.freeze()
    assert registry.epoch == epochs[-1]
    registry.reopen()
    epochs.append(registry.epoch)
    assert epochs == sorted(set(epochs))


def test_a_lookup_that_hits_takes_no_lock_and_loads_no_plugin(registry, monkeypatch):
    registry.dtypes.fill()
    registry.lock = None
    monkeypatch.setattr(Registry, "load_plugins", lambda self: pytest.fail("loaded plugins"))
    assert registry.dtypes.get("int4").name == "int4"
    assert "int8" in registry.dtypes
    assert registry.dtypes.provider("int4") == "ao-core"


def test_register_and_reopen_act_on_the_registry_of_the_process(monkeypatch):
    import ao_core.registry as module

    fresh = Registry()
    monkeypatch.setattr(module, "registry", fresh)
    module.register(dtype("mine"))
    assert fresh.dtypes.provider("mine") == "in-process"
    fresh.freeze()
    module.reopen()
    assert not fresh.frozen
