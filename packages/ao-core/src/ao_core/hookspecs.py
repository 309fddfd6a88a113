"""What a plugin can add to ao: read this file first.

A plugin is a module of functions marked `@hookimpl`, named by an entry point of the group
`ao.plugins` in its package's pyproject.toml:

    [project.entry-points."ao.plugins"]
    marlin = "ao_marlin.plugin"

    # ao_marlin/plugin.py
    from ao_core import hookimpl, int_dtype

    @hookimpl
    def ao_api():
        return (0, 1)

    @hookimpl
    def ao_dtypes():
        return [int_dtype("int3x", bits=3)]

Only `ao_api` is required. Hooks return records and change nothing; ao stamps each record with the
distribution it came from. All plugins are loaded together and once per process, when a name that is
not built in is first looked up, when all names are listed, or when a kernel is first selected.
Then every hook below but `ao_cli` and `ao_machine` is called once, so importing the module and calling hooks
should be quick: put slow imports into the functions that the records carry.

A plugin that fails does no harm to others: the failure is a warning, it is listed by `ao plugins`,
and it is mentioned by the next lookup that fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import torch
    import typer

    from ao_core.folder_records import FolderKind
    from ao_core.interchange_records import Interchange
    from ao_core.layouts.base import Layout
    from ao_core.model_records import ModelTransform
    from ao_core.records import (
        Algorithm,
        DType,
        Kernel,
        Op,
        Recipe,
        ScaleMethod,
        Transform,
    )

__all__ = ["API_VERSION", "hookimpl", "hookspec"]

#: (major, minor) of the hooks and records. A plugin fits if its major is the same and its minor is
#: not greater. Minor grows when a hook or an optional field is added, major when one changes.
API_VERSION = (0, 1)

hookspec = pluggy.HookspecMarker("ao")
#: marks a function of a plugin as the implementation of the hook of that name
hookimpl = pluggy.HookimplMarker("ao")


@hookspec
def ao_api() -> tuple[int, int]:  # type: ignore[empty-body]
    """The `API_VERSION` that the plugin was written for: two integers, written out.

    Required. Called once, before any other hook. An incompatible plugin is left out completely.
    """


@hookspec
def ao_dtypes() -> Iterable[DType]:  # type: ignore[empty-body]
    """Number formats: how one element of at most 8 bits is encoded.

    Called once. Return `DType` records, for instance from `int_dtype` or `lut_dtype`.
    """


@hookspec
def ao_layouts() -> Iterable[Layout]:  # type: ignore[empty-body]
    """Ways to lay the parts of a quantized tensor out in memory.

    Called once. Return instances of `Layout` subclasses; they hold no state.
    """


@hookspec
def ao_ops() -> Iterable[Op]:  # type: ignore[empty-body]
    """Operations that kernels serve, besides those of ao-core.

    Called once. Return `Op` records; the reference of each is registered with it as a kernel.
    """


@hookspec
def ao_kernels() -> Iterable[Kernel]:  # type: ignore[empty-body]
    """Implementations of an op for a layout on a device.

    Called once, also on machines where the kernel cannot run: say so in `Kernel.unavailable`, which
    is asked later and once. Do not import or build what the kernel needs here. The op may be another
    package's; where that one is not installed, the kernel is not used.
    """


@hookspec
def ao_scale_methods() -> Iterable[ScaleMethod]:  # type: ignore[empty-body]
    """Ways to choose the scales and zero points of a tensor, such as "mse".

    Called once. Return `ScaleMethod` records; configurations name them in their field `scale_method`.
    """


@hookspec
def ao_transforms() -> Iterable[Transform]:  # type: ignore[empty-body]
    """What `quantize_` does for a class of configuration.

    Called once. Return one `Transform` per configuration class; no other may claim that class.
    """


@hookspec
def ao_algorithms() -> Iterable[Algorithm]:  # type: ignore[empty-body]
    """What `quantize_(model, config, data=batches)` does for a class of configuration that needs data.

    Called once. Return one `Algorithm` per configuration class; no other may claim that class.
    """


@hookspec
def ao_model_transforms() -> Iterable[ModelTransform]:  # type: ignore[empty-body]
    """What `quantize_` does to a model before its weights are quantized, for a class of configuration.

    Called once. Return one `ModelTransform` per configuration class; no other may claim that class.
    """


@hookspec
def ao_recipes() -> Iterable[Recipe]:  # type: ignore[empty-body]
    """Named, ready configurations, such as "float8/rowwise".

    Called once. Return `Recipe` records; prefix the name with that of the package.
    """


@hookspec
def ao_folder_kinds() -> Iterable[FolderKind]:  # type: ignore[empty-body]
    """What is written beside quantized weights, for the library that reads the folder.

    Called once. Return `FolderKind` records, for `quantize_checkpoint` and `ao quantize`.
    """


@hookspec
def ao_interchange() -> Iterable[Interchange]:  # type: ignore[empty-body]
    """Checkpoints of other projects: how they are known, read and written.

    Called once. Return `Interchange` records, for `ao convert` and `load_foreign`.
    """


@hookspec
def ao_optimizers() -> Iterable[type[torch.optim.Optimizer]]:  # type: ignore[empty-body]
    """Optimizers, known by their class name.

    Called once. Return subclasses of `torch.optim.Optimizer`, not instances.
    """


@hookspec
def ao_machine() -> Iterable[str]:  # type: ignore[empty-body]
    """What the plugin uses of this machine, such as an instruction set, in a sentence each.

    Called by `ao plugins`, which shows them. May load what the plugin needs to tell.
    """


@hookspec
def ao_cli(app: typer.Typer) -> None:
    """Add sub-commands to the `ao` command.

    Called once for each command line application, with its `typer.Typer`. Return nothing.
    """
