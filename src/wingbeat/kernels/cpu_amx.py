"""Matrix tiles of Intel AMX: 16 rows x 16 outputs x 32 of K per instruction.

The packed weight block of cpu_math.pack is AMX's operand as it stands. A row's sum depends on that row and on K alone,
so results are bitwise the same in any batch here too.

Legend: chunk = 32 neighbouring bf16 along K (64 bytes), strip = up to 16 rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I64 = ir.IntType(8), ir.IntType(64)
STRIP = 16
MOST_ROWS = 2 * STRIP


def _config(num_rows: int) -> np.ndarray:
    """Palette 1. Tiles 0-3: sums, 4-5: inputs (even ones of the first strip, odd ones of the second); 6-7: weights."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64  # bytes per tile row
    first, second = min(num_rows, STRIP), max(num_rows - STRIP, 1)
    config[48:56] = [first, second, first, second, first, second, STRIP, STRIP]
    return config


TILE_CONFIGS = np.stack([_config(rows) for rows in range(MOST_ROWS + 1)])
"""[33, 64] uint8: the configuration for so many rows."""


def _call(b, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), arguments)


def _tile(index):
    return ir.Constant(I8, index)


def _pointer(b, address):
    return b.inttoptr(address, I8.as_pointer())


@intrinsic
def configure(typingctx, config):
    """Sets this thread's tile shapes from the 64 bytes at an address."""

    def codegen(context, b, signature, arguments):
        _call(b, "llvm.x86.ldtilecfg", _pointer(b, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typingctx):
    """Gives the tiles up, so that switching threads does not save them."""

    def codegen(context, b, signature, arguments):
        _call(b, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def amx_tile(num_strips, num_blocks):
    """Intrinsic: y = x . packed weights for 1-2 strips of rows and 1-2 blocks of 16 outputs; rows as configured.

    Arguments, all int64: weight address, bytes between blocks, x address, bytes between rows of x, y address, bytes
    between rows of y, number of chunks (>= 1).
    """
    pairs = [(n, m) for n in range(num_blocks) for m in range(num_strips)]

    @intrinsic
    def tile(typingctx, w, w_step, x, x_step, y, y_step, num_chunks):
        def codegen(context, b, signature, arguments):
            w_, w_step_, x_, x_step_, y_, y_step_, chunks = arguments

            def strip(base, step, m):
                return b.add(base, b.mul(step, ir.Constant(I64, STRIP * m)))

            for n, m in pairs:
                _call(b, "llvm.x86.tilezero", _tile(2 * n + m))
            before, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
            b.branch(loop)
            b.position_at_end(loop)
            k = b.phi(I64)
            k.add_incoming(ir.Constant(I64, 0), before)
            for m in range(num_strips):
                place = b.add(strip(x_, x_step_, m), b.shl(k, ir.Constant(I64, 6)))
                _call(b, "llvm.x86.tileloadd64", _tile(4 + m), _pointer(b, place), x_step_)
            for n in range(num_blocks):
                place = b.add(b.add(w_, b.mul(w_step_, ir.Constant(I64, n))), b.shl(k, ir.Constant(I64, 10)))
                _call(b, "llvm.x86.tileloadd64", _tile(6 + n), _pointer(b, place), ir.Constant(I64, 64))
            for n, m in pairs:
                _call(b, "llvm.x86.tdpbf16ps", _tile(2 * n + m), _tile(4 + m), _tile(6 + n))
            following = b.add(k, ir.Constant(I64, 1))
            k.add_incoming(following, b.block)
            b.cbranch(b.icmp_signed("<", following, chunks), loop, done)
            b.position_at_end(done)
            for n, m in pairs:
                place = b.add(strip(y_, y_step_, m), ir.Constant(I64, 64 * n))
                _call(b, "llvm.x86.tilestored64", _tile(2 * n + m), _pointer(b, place), y_step_)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile
