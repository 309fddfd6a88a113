"""Contenders of llama.cpp: its linear matmul, called in this process through ggml's C interface."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from rotation import Call, Contender, Maker, copies, rolled
from torch import Tensor

#: name -> number of the type in ggml.h, bytes of a block of 32, whether it has a layout for x86
TYPES = {"Q4_0": (2, 18, True), "Q8_0": (8, 34, False)}
BLOCK = 32
_F32 = 0
#: room for the descriptions of a few tensors and a graph
_CONTEXT = 1 << 20


class _Params(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_SILENT = _Log(lambda level, text, data: None)
#: function -> what it returns, and what it takes
_SIGNATURES = {
    "ggml_log_set": (None, [_Log, c_void_p]),
    "ggml_init": (c_void_p, [_Params]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, *[c_int64] * 3, c_void_p]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_get_default_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
}
_CPU_SIGNATURES = {
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_reg": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
}


class Ggml:
    """The library and its CPU backend, whose threads are those of OpenMP: torch's own.

    What it allocates stays allocated, until the process ends.
    """

    def __init__(self, folder: Path) -> None:
        self.base = _load(folder / "libggml-base.so", _SIGNATURES)
        self.base.ggml_log_set(_SILENT, None)
        cpu = _load(folder / "libggml-cpu.so", _CPU_SIGNATURES)
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        registered = cpu.ggml_backend_cpu_reg()
        device = self.base.ggml_backend_reg_dev_get(registered, 0)
        address = self.base.ggml_backend_reg_get_proc_address(
            registered, b"ggml_backend_dev_get_extra_bufts"
        )
        kinds = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
        named = {self.base.ggml_backend_buft_name(kind): kind for kind in takewhile(bool, kinds)}
        self.plain = self.base.ggml_backend_get_default_buffer_type(self.backend)
        self.repacked = named[b"CPU_REPACK"]

    def context(self) -> int:
        """Place for the descriptions of tensors."""
        found: int = self.base.ggml_init(_Params(_CONTEXT, None, True))
        return found

    def weight(self, dense: Tensor, kind: str) -> int:
        """A quantized tensor of a dense (N, K), arranged as llama.cpp does for this machine."""
        number, nbytes, repacks = TYPES[kind]
        n, k = dense.shape
        codes = torch.empty(n * k // BLOCK * nbytes, dtype=torch.uint8)
        self.base.ggml_quantize_chunk(number, dense.data_ptr(), codes.data_ptr(), 0, n, k, None)
        context = self.context()
        tensor: int = self.base.ggml_new_tensor_2d(context, number, k, n)
        place = self.repacked if repacks else self.plain
        self.base.ggml_backend_alloc_ctx_tensors_from_buft(context, place)
        self.base.ggml_backend_tensor_set(tensor, codes.data_ptr(), 0, codes.nbytes)
        return tensor

    def graph(self, weight: int, x: Tensor) -> tuple[Call, int]:
        """A call that multiplies x (M, K), float32, by a weight, and the tensor of the result."""
        m, k = x.shape
        context = self.context()
        given = self.base.ggml_new_tensor_2d(context, _F32, k, m)
        result: int = self.base.ggml_mul_mat(context, weight, given)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, result)
        self.base.ggml_backend_alloc_ctx_tensors_from_buft(context, self.plain)
        self.base.ggml_backend_tensor_set(given, x.data_ptr(), 0, x.nbytes)
        return partial(self.base.ggml_backend_graph_compute, self.backend, graph), result

    def value(self, tensor: int, m: int, n: int) -> Tensor:
        """The numbers of a result (M, N)."""
        found = torch.empty(m, n)
        self.base.ggml_backend_tensor_get(tensor, found.data_ptr(), 0, found.nbytes)
        return found


def ggml_linear(folder: Path) -> dict[str, Maker]:
    """Name -> what makes the contender for a weight, with the libraries in a folder."""
    library = Ggml(folder)
    return {
        f"llama.cpp {kind}, fp32": partial(contender, library=library, kind=kind) for kind in TYPES
    }


def contender(weight: Tensor, *, library: Ggml, kind: str) -> Contender:
    """The matmul with one type of ggml; activations are quantized to its Q8_0 in each call."""
    n, k = weight.shape
    nbytes = n * k // BLOCK * TYPES[kind][1]
    rotated = [library.weight(rolled(weight, number), kind) for number in copies(nbytes)]

    def calls(m: int) -> Sequence[Call]:
        x = torch.randn(m, k)
        return [library.graph(tensor, x)[0] for tensor in rotated]

    return Contender(f"llama.cpp {kind}, fp32", nbytes, torch.float32, calls)


def _load(path: Path, signatures: dict[str, tuple[object, list[object]]]) -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(path))
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
