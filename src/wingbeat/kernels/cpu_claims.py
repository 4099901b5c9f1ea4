"""Work shared by threads without barriers: units are claimed one by one, and a phase is over when all are finished.

A phase is a line of two int64 counters, [claimed, finished]. Whoever comes claims the next unit; whoever finds none
left waits for the ones under way. So any number of workers can take part, one that the system schedules late joins
where the others are, and none waits for a thread that has not even started.
"""

# mypy: ignore-errors
from __future__ import annotations

import os

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from wingbeat.kernels.jit import IS_X86

I32, I64 = ir.IntType(32), ir.IntType(64)
SPINS = 2048
"""Looks at a counter before the processor is offered to other threads."""
CAN_YIELD = hasattr(os, "sched_yield")
LINE = 8
"""int64 per phase: a cache line, so that phases do not disturb one another."""


def new_phases(*shape: int) -> np.ndarray:
    """Zeroed counters, one line per phase: [*shape, LINE]."""
    return np.zeros((*shape, LINE), np.int64)


def _add_one(b, address, order):
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), ir.Constant(I64, 1), order)


@intrinsic
def _claim(typingctx, counter):
    def codegen(context, b, signature, arguments):
        return _add_one(b, arguments[0], "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def _finish(typingctx, counter):
    def codegen(context, b, signature, arguments):
        return _add_one(b, arguments[0], "release")

    return types.int64(types.int64), codegen


@intrinsic
def _await(typingctx, counter, total):
    """Spins until the int64 at an address has reached total."""

    def codegen(context, b, signature, arguments):
        place, total_ = b.inttoptr(arguments[0], I64.as_pointer()), arguments[1]
        before, look = b.block, b.append_basic_block("look")
        again, offer, done = (b.append_basic_block(name) for name in ("again", "offer", "done"))
        b.branch(look)
        b.position_at_end(look)
        spins = b.phi(I64)
        spins.add_incoming(ir.Constant(I64, 0), before)
        reached = b.load_atomic(place, "acquire", 8)
        b.cbranch(b.icmp_signed("<", reached, total_), again, done)
        b.position_at_end(again)
        if IS_X86:
            b.call(_external(b.module, "llvm.x86.sse2.pause", ir.VoidType()), [])
        spun = b.add(spins, ir.Constant(I64, 1))
        spins.add_incoming(spun, again)
        spins.add_incoming(ir.Constant(I64, 0), offer)
        b.cbranch(b.icmp_signed("<", spun, ir.Constant(I64, SPINS)), look, offer)
        b.position_at_end(offer)
        if CAN_YIELD:
            b.call(_external(b.module, "sched_yield", I32), [])
        b.branch(look)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _external(module, name, result):
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, []), name)


@njit(inline="always")
def claim(phase):
    """Index of the next unit nobody has; there is none when it is not below the phase's total."""
    return _claim(phase.ctypes.data)


@njit(inline="always")
def finish(phase):
    """One claimed unit is done and its results may be read."""
    _finish(phase.ctypes.data + 8)


@njit(inline="always")
def wait_all(phase, total):
    """Returns when all units of the phase are finished."""
    _await(phase.ctypes.data + 8, total)
