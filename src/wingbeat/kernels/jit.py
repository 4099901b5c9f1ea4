"""Numba set-up shared by the cpu kernels: where compiled code is cached and what this CPU can do.

Numba's own cache looks at one source file at a time, so a kernel would survive a change in a kernel it calls. Here the
cache folder is named by a digest of all kernel sources and of the CPU, in the user's cache directory: an installed
package may be read-only, and a cache carried to another CPU must not be used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from pathlib import Path

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba


def cpu_features() -> frozenset[str]:
    """Instruction-set extensions of this CPU, in LLVM's names."""
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


HAS_BF16_DOT = "avx512bf16" in cpu_features() and not os.environ.get("WINGBEAT_NO_BF16_DOT")
"""vdpbf16ps: two bf16 products and an fp32 sum per lane. Without it the same layout is multiplied in fp32."""

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _may_use_amx() -> bool:
    """Linux grants a process the tile registers only when it asks (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA)."""
    if not {"amx-tile", "amx-bf16"} <= cpu_features() or os.environ.get("WINGBEAT_NO_AMX"):
        return False
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


HAS_AMX = HAS_BF16_DOT and _may_use_amx()
"""tdpbf16ps: a tile of 16 rows x 16 outputs x 32 products in one instruction."""


def cache_dir() -> Path:
    """Folder of this version's compiled kernels on this CPU."""
    target = f"{numba.__version__} {llvm.get_host_cpu_name()} {sorted(cpu_features())} {HAS_BF16_DOT} {HAS_AMX}"
    digest = hashlib.sha256(target.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if not source.name.startswith("test_"):
            digest.update(source.read_bytes())
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "wingbeat" / "kernels" / f"{digest.hexdigest()[:16]}-{sys.version_info.minor}"


numba.config.CACHE_DIR = str(cache_dir())  # type: ignore[attr-defined]
