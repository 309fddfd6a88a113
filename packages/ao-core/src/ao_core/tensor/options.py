"""Options of a format: refused where nobody reads them."""

from __future__ import annotations

from ao_core.errors import ConfigError
from ao_core.registry import registry
from ao_core.spec import OPTIONS, Spec

__all__ = ["check_options"]


def check_options(spec: Spec) -> None:
    """Raise `ConfigError` for an option that nobody reads: it would be stored, and change nothing."""
    names = {name for name, _ in spec.options}.difference(OPTIONS) if spec.options else None
    if names:
        lists = [layout.options for layout in registry.layouts.values()]
        lists += [kernel.options for kernel in registry.kernels.values()]
        others = {name for options in lists for name in options}
        if names := names - others:
            raise ConfigError(
                f"options={spec.options!r}: nobody knows {min(names)!r}; there are "
                f"{', '.join((*OPTIONS, *sorted(others)))}, and those of plugins' layouts and kernels"
            )
    for nested in (spec.act, spec.scale_dtype):
        if isinstance(nested, Spec):
            check_options(nested)
