"""Lets transformers know ao in every program that imports torch, without an import of ao_hf.

torch calls `register` when it is imported, through an entry point of the group `torch.backends`. That costs
a millisecond: ao_hf imports no library itself, and waits until transformers is imported.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from ao_hf_autoload.__about__ import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Import ao_hf; where that fails, warn, since an error here would make `import torch` fail."""
    try:
        import_module("ao_hf")
    except (Exception, SystemExit) as error:
        with_name = f"{type(error).__name__}: {error}"
        try:
            warnings.warn(f"ao_hf_autoload: ao_hf cannot be imported ({with_name})", stacklevel=2)
        except Warning:  # warnings are errors in this program
            return
