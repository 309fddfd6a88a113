"""Stand-ins for vLLM and SGLang: the published names, signatures and loaders that the plugins meet."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class QuantizeMethodBase:
    pass


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight: Any = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        weight.output_dim, weight.input_dim = 0, 1
        weight.weight_loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        return WeightsMapper(orig_to_new_regex={re.compile(r"\.kv_scale$"): ".attn.k_scale"})


class WeightsMapper:
    def __init__(
        self,
        orig_to_new_regex: Mapping[re.Pattern[str], str] | None = None,
        orig_to_new_prefix: Mapping[str, str] | None = None,
    ) -> None:
        self.orig_to_new_regex = dict(orig_to_new_regex or {})
        self.orig_to_new_prefix = dict(orig_to_new_prefix or {})

    def _map_name(self, key: str) -> str:
        for pattern, new in self.orig_to_new_regex.items():
            key = pattern.sub(new, key)
        for prefix, new in self.orig_to_new_prefix.items():
            if key.startswith(prefix):
                key = new + key[len(prefix) :]
        return key

    def apply(self, weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        return ((self._map_name(name), value) for name, value in weights)

    def apply_list(self, values: list[str]) -> list[str]:
        return [self._map_name(value) for value in values]

    def apply_dict(self, values: dict[str, Any]) -> dict[str, Any]:
        return {self._map_name(name): value for name, value in values.items()}


class LinearBase(nn.Module):
    """Column- or row-parallel, of several joined layers or one; `rank` of `ranks`."""

    def __init__(
        self,
        config: Any,
        prefix: str,
        columns: int,
        rows: list[int],
        *,
        rank: int = 0,
        ranks: int = 1,
        row_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.row_parallel = rank, row_parallel
        self.quant_method = config.get_quant_method(self, prefix=prefix)
        own_rows = rows if row_parallel else [size // ranks for size in rows]
        self.own_rows = own_rows
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=columns // ranks if row_parallel else columns,
            output_partition_sizes=own_rows,
            input_size=columns,
            output_size=sum(rows),
            params_dtype=torch.float32,
            weight_loader=self.weight_loader,
        )

    def weight_loader(self, param: Any, loaded_weight: Tensor, shard: int | None = None) -> None:
        target = param.data
        dim = getattr(param, "input_dim" if self.row_parallel else "output_dim", None)
        if shard is not None:
            target = target.narrow(0, sum(self.own_rows[:shard]), self.own_rows[shard])
        if dim is not None:
            size = target.shape[dim]
            loaded_weight = loaded_weight.narrow(dim, self.rank * size, size)
        assert target.shape == loaded_weight.shape
        target.copy_(loaded_weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x)


class VocabParallelEmbedding(nn.Module):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    """Rows are padded to a multiple of 64, and zero there."""

    def __init__(self, config: Any, prefix: str, columns: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.quant_method = config.get_quant_method(self, prefix=prefix)
        assert self.quant_method is not None
        padded = -(-rows // 64) * 64
        self.quant_method.create_weights(
            self, columns, [padded], columns, padded, torch.float32, weight_loader=self.load
        )

    def load(self, param: Any, loaded_weight: Tensor) -> None:
        assert loaded_weight.shape[param.output_dim] == self.rows
        param.data[: self.rows].copy_(loaded_weight)
        param.data[self.rows :].fill_(0)


class FusedMoE(nn.Module):
    pass


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: dict[str, tuple[Callable[..., Any], HookType]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        assert target not in cls.hooks
        cls.hooks[target] = (hook, hook_type)


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules with these contents where imports find them, with their parents."""
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
                if end > 1:
                    parent = sys.modules[".".join(parts[: end - 1])]
                    setattr(parent, parts[end - 1], sys.modules[path])
        vars(sys.modules[name]).update(contents)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """A stub of vLLM; what registers itself there, by name."""
    registered: dict[str, type] = {}
    methods = ["awq"]

    def register_quantization_config(quantization: str) -> Callable[[type], type]:
        def wrapper(cls: type) -> type:
            assert quantization not in methods
            assert issubclass(cls, QuantizationConfig)
            registered[quantization] = cls
            methods.append(quantization)
            return cls

        return wrapper

    layers = "vllm.model_executor.layers"
    install(
        monkeypatch,
        {
            f"{layers}.quantization": {
                "QUANTIZATION_METHODS": methods,
                "register_quantization_config": register_quantization_config,
            },
            f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
            f"{layers}.linear": {
                "LinearBase": LinearBase,
                "LinearMethodBase": LinearMethodBase,
                "UnquantizedLinearMethod": UnquantizedLinearMethod,
            },
            f"{layers}.vocab_parallel_embedding": {
                "ParallelLMHead": ParallelLMHead,
                "VocabParallelEmbedding": VocabParallelEmbedding,
            },
            "vllm.model_executor.models.utils": {"WeightsMapper": WeightsMapper},
        },
    )
    return registered


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, type], list[str]]:
    """A stub of SGLang; its methods by name, and the choices of its command line."""
    methods: dict[str, type] = {"awq": object}
    choices = ["awq"]
    HookRegistry.hooks = {}
    srt = "sglang.srt"
    install(
        monkeypatch,
        {
            f"{srt}.server_args": {"add_quantization_method_choices": choices.extend},
            f"{srt}.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
            f"{srt}.layers.quantization": {"QUANTIZATION_METHODS": methods},
            f"{srt}.layers.quantization.base_config": {
                "LinearMethodBase": LinearMethodBase,
                "QuantizationConfig": QuantizationConfig,
            },
            f"{srt}.layers.quantization.unquant": {
                "UnquantizedLinearMethod": UnquantizedLinearMethod
            },
            f"{srt}.layers.linear": {"LinearBase": LinearBase},
            f"{srt}.layers.vocab_parallel_embedding": {
                "ParallelLMHead": ParallelLMHead,
                "VocabParallelEmbedding": VocabParallelEmbedding,
            },
        },
    )
    return methods, choices


@pytest.fixture
def stub() -> Any:
    """The classes of the stubs."""
    return sys.modules[__name__]
