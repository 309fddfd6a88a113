"""Timings on disk, keyed by all that they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ao_core import __version__ as core_version
from ao_core.ext import cache_folder
from ao_core.ext.kernels import fingerprint
from ao_quant.__about__ import __version__

__all__ = ["Cache", "default_folder", "machine"]

_FORMAT = 1
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """The folder of cached timings."""
    return cache_folder("autoquant")


def machine(device: torch.device) -> dict[str, Any]:
    """What timings depend on beside the layer: device, threads, versions, kernels."""
    return {
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "ao-core": core_version,
        "ao-quant": __version__,
        "kernels": fingerprint(device.type),
    }


@dataclass(frozen=True)
class Cache:
    """Seconds of each candidate of a layer; `folder` None: nothing is read or written."""

    folder: Path | None

    def read(self, key: Mapping[str, Any]) -> dict[str, float] | None:
        """What was measured under this key, or None. A damaged file is as good as none."""
        if self.folder is None:
            return None
        try:
            data = json.loads(self._file(key).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT or data["key"] != json.loads(json.dumps(key)):
                return None
            return {str(name): float(seconds) for name, seconds in data["seconds"].items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be used and is measured anew: %s", self._file(key), error)
            return None

    def write(self, key: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Keep what was measured; another process sees all of it or nothing."""
        if self.folder is None:
            return
        text = json.dumps({"format": _FORMAT, "key": key, "seconds": seconds}, indent=1)
        file = self._file(key)
        unfinished = file.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, file)
        except OSError as error:
            _log.warning("timings cannot be kept in %s: %s", self.folder, error)
            with suppress(OSError):
                unfinished.unlink()

    def _file(self, key: Mapping[str, Any]) -> Path:
        assert self.folder is not None
        text = json.dumps(key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {_processor()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)} {torch.version.cuda}"
    return f"{device.type} {platform.machine()}"


def _processor() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
