"""Which calls the CUDA kernels take, how they are launched, and what they say where they cannot run."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ao_core import Call, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import candidates
from ao_kernels.cpu import library
from ao_kernels.cuda import records

LINEAR = registry.kernels.get("cuda_plane16_linear")
INT4 = Spec("int4", (1, 128), "bfloat16", layout="plane16")


def call(
    spec: Spec = INT4, m: int = 1, n: int = 4096, k: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> Call:
    return Call("linear", spec, (n, k), (m, k), dtype, "cuda")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call(m=33), "is for up to 32 rows, found 33"),
        (call(Spec("int8", (1, -1), layout="plane16_bytes"), m=65), "is for up to 64 rows, found 65"),
        (
            call(Spec("uint4", (1, 64), zero_point="float", layout="plane16"), m=33),
            "is for up to 32 rows, found 33",
        ),
        (call(dtype=torch.float32), "needs activations in bfloat16 or float16, found torch.float32"),
        (call(Spec("nf4", (1, 64), layout="plane16")), "is for int4, uint4, int8, f8e4m3, not nf4"),
        (
            call(Spec("int4", (1, 16), layout="plane16")),
            "takes groups of 32, 64, 128, 256 or rows, not of 16",
        ),
        (call(Spec("int8", (1, 32), layout="plane16_bytes")), "takes groups of 64, 128 or rows, not of 32"),
        (
            call(Spec("int4", (1, 32), "e8m0", layout="plane16")),
            "takes scales in float32, bfloat16, float16, not e8m0",
        ),
        (
            call(Spec("uint4", (1, -1), zero_point="int", layout="plane16")),
            "takes zero points in groups, not one for a row",
        ),
    ],
)  # fmt: skip
def test_refuses(refused: Call, reason: str) -> None:
    assert LINEAR.refuses(refused) == reason


def test_says_why_it_cannot_run_beside_triton() -> None:
    """The library of these tests was built without nvcc, or there is no driver: each has its sentence."""
    found = {each.kernel.name: each for each in candidates(call())}
    names = list(found)
    assert names.index("cuda_plane16_linear") < names.index("triton_plane16_linear")
    text = found["cuda_plane16_linear"].refusal or ""
    assert text in (
        "this build of ao-kernels has no CUDA kernels",
        "NVIDIA's driver, libcuda.so.1, is not installed",
        "no CUDA device is available",
    )


@pytest.mark.parametrize(
    ("m", "n", "k", "described"),
    [
        # Llama-3-8B: o, gate and up, down
        (1, 4096, 4096, "8 rows and 32 of N, 3 stages"),
        (1, 28672, 4096, "8 rows and 32 of N, 2 stages"),
        (16, 4096, 14336, "16 rows and 128 of N, split-K 4 in clusters, 4 stages"),
        (32, 28672, 4096, "32 rows and 256 of N, split-K 2 in clusters, 2 stages"),
    ],
)  # fmt: skip
def test_describes_the_launch(m: int, n: int, k: int, described: str) -> None:
    """Every SM of an H100 has a CTA, and more than 64 KiB of weights on the way."""
    assert LINEAR.describe(call(m=m, n=n, k=k)) == f"CUDA, tiles of {described}, sums in float32"


def test_a_device_with_little_shared_memory_refuses_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "_device", lambda: (128, 99 * 1024, 100 * 1024, 0))
    assert LINEAR.refuses(call(m=16)) is None
    text = LINEAR.refuses(call(Spec("int8", (1, -1), layout="plane16_bytes"), m=64))
    assert text is not None
    assert text.endswith("bytes of shared memory for 64 rows, and the device has 101376")


def test_fake_keeps_sizes_symbolic() -> None:
    library.load()
    qdata, scale = torch.ones(1, 1, 1, 128, 64, dtype=torch.int16), torch.ones(1, 2, 128)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ao_kernels.cuda_linear(x, qdata, scale, None, None, 100, 256, 128, 0)

    x = torch.ones(7, 256, dtype=torch.bfloat16)
    graph = make_fx(linear, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    (y,) = (node.meta["val"] for node in graph.graph.nodes if "cuda_linear" in node.name)
    assert y.dtype == torch.bfloat16
    assert y.shape[1] == 100
    assert isinstance(y.shape[0], torch.SymInt)
    assert y.shape[0].node.expr.free_symbols


def test_it_is_for_cuda_alone() -> None:
    library.load()
    with pytest.raises(NotImplementedError, match="cuda_linear"):
        torch.ops.ao_kernels.cuda_linear(
            torch.ones(1, 8), torch.ones(1), torch.ones(1), None, None, 1, 8, 8, 0
        )


def test_plan_checks_its_arguments() -> None:
    library.load()
    plan = torch.ops.ao_kernels.cuda_plan
    with pytest.raises(RuntimeError, match="m=65: must be in 1..64"):
        plan(65, 128, 128, 128, 0, 2, 0, [132, 1, 1, 1])
    with pytest.raises(RuntimeError, match="group=48: must be 64, 128"):
        plan(1, 128, 128, 48, 0, 2, 0, [132, 1, 1, 1])
    with pytest.raises(RuntimeError, match="zero_point: is for int4 in groups"):
        plan(1, 128, 128, 128, 1, 2, 1, [132, 1, 1, 1])
