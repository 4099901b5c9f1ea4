"""Which kernels run: chosen once when a model is built, by device and dtype, or forced by name in tests."""

from __future__ import annotations

import torch

from wingbeat.errors import unknown_name
from wingbeat.kernels.interface import KernelFactory
from wingbeat.kernels.torch_kernels import TorchKernels

BACKENDS = ("torch", "cpu")


def backend_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Name of the fastest backend that fits, and why it is that one."""
    if device.type != "cpu":
        return "torch", f"no kernels of our own for {device.type} yet"
    if dtype != torch.bfloat16:
        return "torch", f"the cpu kernels compute in bfloat16, this model is {str(dtype).removeprefix('torch.')}"
    return "cpu", "bfloat16 on a CPU: packed weights, K/V read in place from pages"


def kernel_factory(
    device: torch.device, dtype: torch.dtype, num_threads: int, backend: str | None = None
) -> KernelFactory:
    """The kernels for a model of `dtype` on `device`. Raises ConfigError for an unknown backend."""
    name = backend or backend_for(device, dtype)[0]
    if name == "torch":
        return TorchKernels()
    if name == "cpu":
        from wingbeat.kernels.cpu_kernels import CpuKernels

        return CpuKernels(num_threads)
    raise unknown_name("kernels", name, BACKENDS)
