"""Why a kernel for CUDA devices cannot run on this machine."""

from __future__ import annotations

import torch

__all__ = ["lacks_capability", "lacks_sm89"]


def lacks_capability(least: tuple[int, int], greatest: tuple[int, int] | None = None) -> str | None:
    """Why the current CUDA device cannot run kernels of a compute capability; None where it can.

    Args:
        least: (major, minor) that the kernels need.
        greatest: the last that they are built for; None: all later ones can run them.
    """
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    found = torch.cuda.get_device_capability()
    if found >= least and (greatest is None or found <= greatest):
        return None
    wanted = "sm_{}{}".format(*least)
    wanted = wanted if greatest is None else f"{wanted} to " + "sm_{}{}".format(*greatest)
    return f"needs {wanted}, found " + "sm_{}{}".format(*found)


def lacks_sm89() -> str | None:
    """Why there are no matmuls in float8 on this machine; None where there are."""
    return lacks_capability((8, 9))
