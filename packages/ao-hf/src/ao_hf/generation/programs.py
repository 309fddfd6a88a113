"""Programs of AOTInductor for recorded graphs, compiled once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ao_core.ext import cache_folder
from ao_hf.generation.recording import constants_of, written_in

__all__ = ["digest_of", "program_of"]

#: of AOTInductor. The kernels do the work, so what calls them need not be optimized; and an op of torch with
#: fewer elements than these runs in one thread, since waking another takes longer
_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.min_chunk_size": 4096,
    # each op rounds to its dtype, as without a compiler: else texts differ from the first tie on
    "emulate_precision_casts": True,
}

#: elements of a tensor whose values compilers may write into the program
_SMALL = 16


def program_of(
    module: fx.GraphModule, inputs: Mapping[str, Tensor]
) -> Callable[[Sequence[Tensor]], Tensor]:
    """A compiled graph, which reads and writes the buffers of `module` where they are.

    The program is in the folder of users' caches under the digest of everything that it depends on. A file
    that is not whole is compiled again, with a warning.

    Args:
        module: what `record` made, with one result.
        inputs: name -> tensor, with the shapes of all calls.
    """
    path = cache_folder("programs") / f"{digest_of(module, inputs)}.pt2"
    loaded = _loaded(path)
    if loaded is None:
        _compile(module, inputs, path)
        loaded = _opened(path)
    constants = constants_of(module)
    used = {name: constants[name] for name in loaded.get_constant_fqns()}
    loaded.load_constants(used, False, True, True, False)  # all of them, where they are
    run = loaded.boxed_run

    def program(tensors: Sequence[Tensor]) -> Tensor:
        found: Tensor = run(list(tensors))[0]
        return found

    program.constants = used  # type: ignore[attr-defined]  # whose memory the program only borrows
    return program


def digest_of(module: fx.GraphModule, inputs: Mapping[str, Tensor]) -> str:
    """Of the ops and their arguments, the forms of tensors, the versions, the processor and the threads."""
    constants, written = constants_of(module), written_in(module)
    # programs hold the values of tensors that are as small as this
    values = {
        n: x.tolist() for n, x in constants.items() if x.numel() <= _SMALL and n not in written
    }
    tensors = {**inputs, **constants}
    forms = {
        n: (list(x.shape), list(x.stride()), str(x.dtype), str(x.device))
        for n, x in tensors.items()
    }
    about = [
        str(module.graph),
        forms,
        repr(values),
        _OPTIONS,
        torch.get_num_threads(),
        _versions(),
        _processor(),
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _versions() -> dict[str, str]:
    """Of torch, and of the files of all libraries whose ops may be called."""
    found = {"torch": str(torch.__version__)}
    libraries = [Path(path) for path in torch.ops.loaded_libraries]
    return found | {path.name: _of_file(path) for path in libraries if path.is_file()}


def _of_file(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


@cache
def _processor() -> str:
    """Its instruction sets, for which programs are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def _seal(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _loaded(path: Path) -> Any:
    """The program in a file; None if there is none, or none that can be used."""
    if not path.exists():
        return None
    try:
        whole = hashlib.sha256(path.read_bytes()).hexdigest()
        if _seal(path).read_text(encoding="ascii") != whole:
            raise ValueError("its digest is another one")
        return _opened(path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"{path}: this program cannot be used ({reason}), and is compiled again", stacklevel=2
        )
        return None


def _opened(path: Path) -> Any:
    """What `torch._inductor.aoti_load_package` wraps, without the compiler, whose import takes seconds."""
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)


def _compile(module: fx.GraphModule, inputs: Mapping[str, Tensor], path: Path) -> None:
    """Write the program; other processes see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # inputs and buffers may be of inference mode, which nothing can be traced with
    with torch.inference_mode(False), torch.no_grad():
        given = tuple(torch.zeros_like(x) for x in inputs.values())
        exported = torch.export.export(module, given, strict=False)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
            made = Path(folder) / path.name
            # which notes more options in what it is given
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(made), inductor_configs=dict(_OPTIONS)
            )
            whole = hashlib.sha256(made.read_bytes()).hexdigest()
            _seal(made).write_text(whole, encoding="ascii")
            os.replace(_seal(made), _seal(path))
            os.replace(made, path)
