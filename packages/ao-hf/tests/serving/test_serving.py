"""Folders of ao in engines, by stubs of what vLLM and SGLang publish: no engine is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core import FqnToConfig, QTensor, open_checkpoint, quantize_, save_model
from ao_core.ext import CheckpointError, QuantizationError, UnsupportedOp
from ao_hf.serving import sglang as sglang_plugin
from ao_hf.serving import vllm as vllm_plugin
from ao_hf.serving.formats import formats_of, unservable

RECIPES = [
    "int8_weight_only",
    "int4_weight_only/g32-asymmetric",
    "float8_weight_only",
    "float8_dynamic_activation_float8_weight",
    "int8_dynamic_activation_int8_weight",
    "mx_weight_only",
]
#: layers of an engine: rows of the layers that they join, columns
LAYERS = {"qkv_proj": ([128, 64, 64], 64), "o_proj": ([64], 128), "gate_up_proj": ([96, 96], 64)}


class Block(nn.Module):
    """Names and sizes of a layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 128, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(128, 64, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.lm_head = nn.Linear(64, 67, bias=False)


@pytest.fixture
def block() -> nn.Module:
    return Block()


def folder_of(block: nn.Module, config: Any, path: Path) -> dict[str, Tensor]:
    """Quantize and save; all tensors of the folder by name."""
    quantize_(block, config)
    save_model(block, path)
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.slots}


def load(
    layers: dict[str, Any], weights: Iterable[tuple[str, Tensor]], joined: dict[str, list[str]]
) -> None:
    """As the models of the engines do: by name, with the number of the layer among those joined."""
    parameters = {
        f"{name}.{own}": p for name, layer in layers.items() for own, p in layer.named_parameters()
    }
    for name, tensor in weights:
        for wide, members in joined.items():
            member = name.split(".")[0]
            if member in members:
                target = parameters[name.replace(member, wide)]
                target.weight_loader(target, tensor, members.index(member))
                break
        else:
            if name in parameters:
                parameters[name].weight_loader(parameters[name], tensor)
    for layer in layers.values():
        layer.quant_method.process_weights_after_loading(layer)


def vllm_config(registered: dict[str, type], path: Path, joined: dict[str, list[str]]) -> Any:
    vllm_plugin.register()
    vllm_plugin.register()  # engines call it in every process, and more than once
    config: Any = registered["ao"].from_config({"quant_method": "ao"})  # type: ignore[attr-defined]
    config.packed_modules_mapping = joined
    config.maybe_update_config(str(path), hf_config=None)
    return config


def sglang_config(stub: Any, methods: dict[str, type], path: Path) -> Any:
    sglang_plugin.register()
    sglang_plugin.register()
    given = {"quant_method": "ao", "packed_modules_mapping": stub.JOINED}
    config: Any = methods["ao"].from_config(given)  # type: ignore[attr-defined]
    hook, kind = stub.HookRegistry.hooks["sglang.srt.model_loader.weight_utils.get_quant_config"]
    assert kind is stub.HookType.AFTER
    return hook(config, SimpleNamespace(model_path=str(path)), "load", stub.JOINED)


def check_products(layers: dict[str, Any], block: nn.Module, joined: dict[str, list[str]]) -> None:
    for name, layer in layers.items():
        x = torch.randn(3, LAYERS[name][1])
        parts = [block.get_submodule(member)(x) for member in joined.get(name, [name])]
        torch.testing.assert_close(layer(x), torch.cat(parts, -1), rtol=1e-4, atol=1e-4)
        assert isinstance(layer.weight, QTensor)
        assert list(dict(layer.named_parameters())) == ["weight"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_vllm_multiplies_as_the_model(
    recipe: str, vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    tensors = folder_of(block, recipe, tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    layers = {n: stub.LinearBase(config, n, k, rows) for n, (rows, k) in LAYERS.items()}
    mapper = config.get_cache_scale_mapper()
    load(layers, mapper.apply(tensors.items()), stub.JOINED)
    check_products(layers, block, stub.JOINED)
    # vLLM's own names go on working
    assert mapper.apply_list(["a.kv_scale"]) == ["a.attn.k_scale"]


def test_sglang_multiplies_as_the_model(
    sglang: tuple[dict[str, type], list[str]], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    tensors = folder_of(block, "int4_weight_only/g32-asymmetric", tmp_path)
    methods, choices = sglang
    config = sglang_config(stub, methods, tmp_path)
    assert choices == ["awq", "ao"]
    layers = {n: stub.LinearBase(config, n, k, rows) for n, (rows, k) in LAYERS.items()}
    target = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"
    hook, kind = stub.HookRegistry.hooks[target]
    assert kind is stub.HookType.AROUND

    def original(loader: Any, model_config: Any, model: Any) -> Iterable[tuple[str, Tensor]]:
        yield from tensors.items()

    ours, others = (SimpleNamespace(quantization=method) for method in ("ao", "awq"))
    load(layers, hook(original, None, ours, None), stub.JOINED)
    check_products(layers, block, stub.JOINED)
    assert [name for name, _ in hook(original, None, others, None)] == list(tensors)


@pytest.mark.parametrize("recipe", ["int8_weight_only", "int4_weight_only/g32-asymmetric"])
def test_ranks_hold_rows_or_columns(
    recipe: str, vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    tensors = folder_of(block, recipe, tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    x = torch.randn(3, 128)
    found: Any = 0
    for rank in range(2):
        rows, columns = LAYERS["o_proj"]
        layer = stub.LinearBase(
            config, "o_proj", columns, rows, rank=rank, ranks=2, row_parallel=True
        )
        load({"o_proj": layer}, config.get_cache_scale_mapper().apply(tensors.items()), {})
        found = found + layer(x[:, 64 * rank : 64 * (rank + 1)])
    torch.testing.assert_close(found, block.get_submodule("o_proj")(x), rtol=1e-4, atol=1e-4)


def test_ranks_that_end_inside_a_group_are_refused(
    vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    folder_of(block, "int4_weight_only/g32-asymmetric", tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    with pytest.raises(UnsupportedOp, match="16 columns .* inside a group of 32"):
        stub.LinearBase(config, "o_proj", 128, [64], ranks=8, row_parallel=True)


def test_a_quantized_head_with_padded_rows(
    vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    tensors = folder_of(block, "int4_weight_only/g32-asymmetric", tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    head = stub.ParallelLMHead(config, "lm_head", 64, 67)
    load({"lm_head": head}, config.get_cache_scale_mapper().apply(tensors.items()), {})
    x = torch.randn(3, 64)
    y = head.quant_method.apply(head, x)
    assert y.shape == (3, 128)
    torch.testing.assert_close(y[:, :67], block.get_submodule("lm_head")(x), rtol=1e-4, atol=1e-4)
    assert not y[:, 67:].any()


def test_dense_layers_are_the_engines_own(
    vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    folder_of(block, FqnToConfig({"o_proj": None, "*": "int8_weight_only"}), tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    layer = stub.LinearBase(config, "o_proj", 128, [64])
    assert type(layer.quant_method) is stub.UnquantizedLinearMethod
    assert config.get_quant_method(stub.VocabParallelEmbedding(), "embed_tokens") is None


def test_names_of_the_engines_model(
    vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    folder_of(block, "int8_weight_only", tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    config.apply_vllm_mapper(stub.WeightsMapper(orig_to_new_prefix={"o_": "language.o_"}))
    assert stub.LinearBase(config, "language.o_proj", 128, [64]).ao_weight[1] == (64, 128)
    with pytest.raises(CheckpointError, match="no weight of the layer 'o_proj'"):
        stub.LinearBase(config, "o_proj", 128, [64])


def mixed() -> FqnToConfig:
    return FqnToConfig({"q_proj": "int4_weight_only/g32-asymmetric", "*": "int8_weight_only"})


def test_joined_layers_of_different_formats_are_refused(
    vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    folder_of(block, mixed(), tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    with pytest.raises(QuantizationError, match="qkv_proj joins layers of different formats"):
        stub.LinearBase(config, "qkv_proj", 64, [128, 64, 64])


def test_quantized_experts_and_embeddings_are_refused(
    vllm: dict[str, type], stub: Any, tmp_path: Path
) -> None:
    model = nn.ModuleDict({"experts": nn.ModuleDict({"0": nn.Linear(64, 64)})})
    model["embed"] = nn.Embedding(32, 64)
    named = FqnToConfig({"embed": "int8_weight_only", "*": "int8_weight_only"})
    folder_of(model, named, tmp_path)
    config = vllm_config(vllm, tmp_path, stub.JOINED)
    for layer, prefix, kind in (
        (stub.FusedMoE(), "experts", "FusedMoE"),
        (stub.VocabParallelEmbedding(), "embed", "embeddings"),
    ):
        with pytest.raises(UnsupportedOp, match=f"quantized {kind} are not covered"):
            config.get_quant_method(layer, prefix)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("nf4_weight_only", "double quantization"), ("float8_weight_only/tensorwise", "rows share")],
)
def test_formats_that_cannot_be_joined_are_refused(
    recipe: str, reason: str, block: nn.Module, tmp_path: Path
) -> None:
    from ao_core import WHOLE, Spec, quantize_tensor

    if "tensorwise" in recipe:
        dense = block.get_submodule("o_proj").weight
        weight = quantize_tensor(dense, Spec("f8e4m3", (WHOLE, WHOLE)))
        block.get_submodule("o_proj").weight = nn.Parameter(weight, requires_grad=False)
    else:
        quantize_(block, recipe)
    save_model(block, tmp_path)
    spec = formats_of(tmp_path).specs["o_proj.weight"]
    assert reason in (unservable(spec) or "")
    with pytest.raises(UnsupportedOp, match="o_proj"):
        formats_of(tmp_path).of_layer("o_proj", {})


def test_folders_that_are_none(block: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="download the model first"):
        formats_of("owner/model")
    save_model(block, tmp_path)
    with pytest.raises(CheckpointError, match="no tensor is quantized by ao"):
        formats_of(tmp_path)


@pytest.mark.parametrize("plugin", ["vllm", "sglang"])
def test_an_engine_that_does_not_say_the_folder(
    plugin: str, request: pytest.FixtureRequest, stub: Any
) -> None:
    registered: Any = request.getfixturevalue(plugin)
    register: Callable[[], None] = {
        "vllm": vllm_plugin.register,
        "sglang": sglang_plugin.register,
    }[plugin]
    register()
    methods = registered if plugin == "vllm" else registered[0]
    config = methods["ao"].from_config({})
    with pytest.raises(CheckpointError, match="did not say which folder"):
        config.get_quant_method(stub.FusedMoE(), "experts")
    assert config.get_name() == "ao"
    assert torch.bfloat16 in config.get_supported_act_dtypes()
    assert (config.get_min_capability(), config.get_config_filenames()) == (0, [])


def test_a_dense_weight_in_place_of_the_placeholder(
    vllm: dict[str, type], stub: Any, block: nn.Module, tmp_path: Path
) -> None:
    folder_of(block, "int8_weight_only", tmp_path)
    layer = stub.LinearBase(vllm_config(vllm, tmp_path, {}), "o_proj", 128, [64])
    with pytest.raises(CheckpointError, match="quantized in one file is torch.float32"):
        layer.weight.weight_loader(layer.weight, torch.zeros(64, 128), 0)


@pytest.mark.parametrize(
    ("group", "module"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]
)
def test_the_entry_point(group: str, module: str) -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."{group}"]\nao = "ao_hf.serving.{module}:register"' in project
    assert callable(import_module(f"ao_hf.serving.{module}").register)
