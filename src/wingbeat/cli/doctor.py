"""`wingbeat doctor`: what this machine has, and what will therefore be used (and why nothing faster)."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wingbeat import __version__

PACKAGES = ("torch", "numba", "transformers", "tokenizers", "safetensors", "gguf", "llguidance", "fastapi", "uvicorn")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """What this machine has, and what will therefore be used."""

    json: bool = False
    """Print one JSON list to stdout instead of a table."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: `ok` is None for a plain fact, False where something is missing or slower than it could be."""

    name: str
    value: str
    ok: bool | None = None


def run(config: Doctor) -> int:
    facts = [*machine_facts(), *package_facts(), *engine_facts()]
    if config.json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2))
    else:
        print("\n".join(_line(fact) for fact in facts))
    return 0


def _line(fact: Fact) -> str:
    mark = {None: " ", True: "+", False: "!"}[fact.ok]
    return f"{mark} {fact.name:<20} {fact.value}"


def machine_facts() -> list[Fact]:
    """Interpreter, platform, processor."""
    features = cpu_features(Path("/proc/cpuinfo"))
    shown = " ".join(f for f in CPU_FEATURES if f in features) or "none of " + " ".join(CPU_FEATURES)
    return [
        Fact("wingbeat", __version__),
        Fact("python", f"{platform.python_version()} ({sys.executable})"),
        Fact("platform", platform.platform()),
        Fact("cpu", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} threads usable"),
        Fact("cpu features", shown, "avx512_bf16" in features),
    ]


def cpu_features(cpuinfo: Path) -> frozenset[str]:
    """The processor's feature flags as Linux names them; empty elsewhere."""
    if not cpuinfo.is_file():
        return frozenset()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, ":").split(":", 1)[1].split())


def package_facts() -> list[Fact]:
    """Versions of what the engine needs; without them only the lab works."""
    return [_package(name) for name in PACKAGES]


def _package(name: str) -> Fact:
    try:
        return Fact(name, version(name))
    except PackageNotFoundError:
        return Fact(name, "not installed: pip install 'wingbeat[engine]'", False)


def engine_facts() -> list[Fact]:
    """Threads, model, drafter and kernels; one line with the reason for each that is not to be had."""
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("torch threads", _torch_threads),
        ("numba threading", _numba_threading),
        ("embedded model", _embedded_model),
        ("default drafter", _default_drafter),
        ("kernels, bfloat16", lambda: _kernels("bfloat16")),
        ("kernels, float32", lambda: _kernels("float32")),
        ("gpu", _gpu),
    )
    return [_checked(name, check) for name, check in checks]


def _checked(name: str, check: Callable[[], str]) -> Fact:
    try:
        return Fact(name, check(), True)
    except Exception as error:  # whatever is broken here is the finding
        return Fact(name, (str(error) or repr(error)).splitlines()[0], False)


def _torch_threads() -> str:
    import torch

    return str(torch.get_num_threads())


def _numba_threading() -> str:
    import numba
    from numba.np.ufunc import threading_layer

    @numba.njit(parallel=True)
    def spin(n: int) -> int:
        total = 0
        for i in numba.prange(n):
            total += i
        return total

    spin(2)  # the layer is chosen by the first parallel call
    shown = f"{threading_layer()}, {numba.get_num_threads()} threads"
    if threading_layer() == "workqueue":  # numba's last resort, taken where neither TBB nor OpenMP is found
        raise ValueError(f"{shown}; installing OpenMP's library (Debian package libgomp1) makes the engine faster")
    return shown


def _embedded_model() -> str:
    from wingbeat.models.resolve import smollm2_file

    file = smollm2_file()
    return f"{file.name}, {file.stat().st_size / 2**20:.0f} MiB"


def _default_drafter() -> str:
    from wingbeat.models.resolve import resolve_drafter

    directory = resolve_drafter("default")
    weights = directory / "model.safetensors"
    return f"{directory.name}, {weights.stat().st_size / 2**20:.0f} MiB"


def _kernels(dtype: str) -> str:
    import torch

    from wingbeat.kernels.dispatch import backend_for

    chosen, reason = backend_for(torch.device("cpu"), getattr(torch, dtype))
    return f"{chosen} ({reason})"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("none visible to torch; everything runs on the CPU")
    return torch.cuda.get_device_name(0)
