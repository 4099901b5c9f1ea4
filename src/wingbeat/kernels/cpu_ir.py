"""Inner loops as vector IR: what Numba's auto-vectoriser will not give reliably.

Each is a Numba intrinsic over raw addresses. Accumulation order depends on the operands' length only, never on how many
rows are computed together, so a row's result is bitwise the same in any batch.

Legend: K inner size (even), pair = two neighbouring bf16 along K.
"""

# mypy: ignore-errors
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from wingbeat.kernels.jit import HAS_BF16_DOT

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
LANES = 16
V_F32, V_I32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class _BFloat(ir.types.Type):
    """llvmlite has no bfloat; LLVM's text form is all that is needed."""

    def _to_string(self) -> str:
        return "bfloat"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


V_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _const(value, kind=I64):
    return ir.Constant(kind, value)


def _zero():
    return ir.Constant(V_F32, [0.0] * LANES)


def _load(b, kind, address, align):
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _store(b, value, address, align):
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def _splat(b, scalar, kind):
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, scalar, _const(0, I32))
    return b.shuffle_vector(first, undefined, ir.Constant(V_I32, [0] * LANES))


def _function(module, name, kind):
    return module.globals.get(name) or ir.Function(module, kind, name)


def _fma(b, x, y, z):
    fma = _function(b.module, "llvm.fma.v16f32", ir.FunctionType(V_F32, [V_F32, V_F32, V_F32]))
    return b.call(fma, [x, y, z])


def _dot_pairs(b, acc, weights, xs):
    """acc + even product + odd product per lane; weights, xs: V_I32 of pairs."""
    if HAS_BF16_DOT:
        kind = ir.FunctionType(V_F32, [V_F32, V_PAIRS, V_PAIRS])
        dot = _function(b.module, "llvm.x86.avx512bf16.dpbf16ps.512", kind)
        return b.call(dot, [acc, b.bitcast(weights, V_PAIRS), b.bitcast(xs, V_PAIRS)])
    shift, high = ir.Constant(V_I32, [16] * LANES), ir.Constant(V_I32, [0xFFFF0000] * LANES)
    low_w, low_x = b.bitcast(b.shl(weights, shift), V_F32), b.bitcast(b.shl(xs, shift), V_F32)
    high_w, high_x = b.bitcast(b.and_(weights, high), V_F32), b.bitcast(b.and_(xs, high), V_F32)
    return _fma(b, high_w, high_x, _fma(b, low_w, low_x, acc))


def _loop(b, count, initial, body):
    """for k in range(count): values = body(k, values); count >= 1. Returns the final values."""
    before, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(I64)
    k.add_incoming(_const(0), before)
    values = []
    for start in initial:
        value = b.phi(start.type)
        value.add_incoming(start, before)
        values.append(value)
    results = body(k, values)
    following = b.add(k, _const(1))
    k.add_incoming(following, b.block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return results


def gemm_tile(num_rows, num_blocks):
    """Intrinsic: y[m, 16*n:16*n+16] = sum over K of x[m] * packed weights, for num_rows x num_blocks accumulators.

    Arguments, all int64: weight address, bytes between blocks, x address, bytes between rows of x, y address, bytes
    between rows of y, number of pairs. Packed block: [pairs][16 outputs][2] bf16, 64-byte lines.
    """

    @intrinsic
    def tile(typingctx, w, w_step, x, x_step, y, y_step, num_pairs):
        def codegen(context, b, signature, arguments):
            w_, w_step_, x_, x_step_, y_, y_step_, pairs = arguments
            blocks = [b.add(w_, b.mul(w_step_, _const(n))) for n in range(num_blocks)]
            rows = [b.add(x_, b.mul(x_step_, _const(m))) for m in range(num_rows)]

            def body(k, accs):
                line, pair = b.shl(k, _const(6)), b.shl(k, _const(2))
                weights = [_load(b, V_I32, b.add(block, line), 64) for block in blocks]
                results = []
                for m, row in enumerate(rows):
                    xs = _splat(b, _load(b, I32, b.add(row, pair), 4), V_I32)
                    for n in range(num_blocks):
                        results.append(_dot_pairs(b, accs[m * num_blocks + n], weights[n], xs))
                return results

            results = _loop(b, pairs, [_zero()] * (num_rows * num_blocks), body)
            for m in range(num_rows):
                out = b.add(y_, b.mul(y_step_, _const(m)))
                for n in range(num_blocks):
                    _store(b, results[m * num_blocks + n], b.add(out, _const(64 * n)), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def _interleave(b, first, second, high):
    """Pairs (first[i], second[i]) of 16 of the 32 bf16: the lower or the upper half. V_I32 in and out."""
    halves = ir.VectorType(I16, 2 * LANES)
    start = LANES if high else 0
    order = [index for i in range(LANES) for index in (start + i, 2 * LANES + start + i)]
    mask = ir.Constant(ir.VectorType(I32, 2 * LANES), order)
    return b.bitcast(b.shuffle_vector(b.bitcast(first, halves), b.bitcast(second, halves), mask), V_I32)


def _transpose(b, rows):
    """Rows of 16 lanes -> columns, swapping ever smaller off-diagonal blocks."""
    size = LANES // 2
    while size:
        swapped = list(rows)
        for i in range(LANES):
            if i & size:
                continue
            upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
            lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
            for place, order in ((i, upper), (i + size, lower)):
                swapped[place] = b.shuffle_vector(rows[i], rows[i + size], ir.Constant(V_I32, order))
        rows, size = swapped, size // 2
    return rows


@intrinsic
def pack_keys(typingctx, keys, out, num_chunks):
    """Lays 16 keys out as a packed weight block, so that scores are a gemm tile with keys as outputs.

    Arguments, all int64: address of 16 key addresses, out address, chunks of 32 elements per head.
    """

    def codegen(context, b, signature, arguments):
        keys_, out_, chunks = arguments
        rows = [_load(b, I64, b.add(keys_, _const(8 * i)), 8) for i in range(LANES)]

        def body(k, _):
            columns = _transpose(b, [_load(b, V_I32, b.add(row, b.shl(k, _const(6))), 2) for row in rows])
            place = b.add(out_, b.shl(k, _const(10)))
            for i, column in enumerate(columns):
                _store(b, column, b.add(place, _const(64 * i)), 4)
            return []

        _loop(b, chunks, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def value_tile(num_queries):
    """Intrinsic: acc[q, 0:32] += weight[q, key] * value[key, 0:32] for each key, two by two.

    Arguments, all int64: address of the value addresses, byte offset of the 32 elements, weights address (bf16, rows
    `weights_step` bytes apart), weights_step, acc address (fp32, rows acc_step bytes apart), acc_step, number of pairs.
    """

    @intrinsic
    def tile(typingctx, values, offset, weights, weights_step, acc, acc_step, num_pairs):
        def codegen(context, b, signature, arguments):
            values_, offset_, weights_, weights_step_, acc_, acc_step_, pairs = arguments
            rows = [b.add(weights_, b.mul(weights_step_, _const(q))) for q in range(num_queries)]
            starts = [b.add(acc_, b.mul(acc_step_, _const(q))) for q in range(num_queries)]
            outs = [b.add(start, _const(64 * half)) for start in starts for half in range(2)]

            def body(k, accs):
                where = b.add(values_, b.shl(k, _const(4)))
                loaded = [
                    _load(b, V_I32, b.add(_load(b, I64, b.add(where, _const(8 * i)), 8), offset_), 2) for i in range(2)
                ]
                low, high = _interleave(b, *loaded, False), _interleave(b, *loaded, True)
                results = []
                for q, row in enumerate(rows):
                    weight = _splat(b, _load(b, I32, b.add(row, b.shl(k, _const(2))), 2), V_I32)
                    results.append(_dot_pairs(b, accs[2 * q], low, weight))
                    results.append(_dot_pairs(b, accs[2 * q + 1], high, weight))
                return results

            results = _loop(b, pairs, [_load(b, V_F32, out, 4) for out in outs], body)
            for result, out in zip(results, outs, strict=True):
                _store(b, result, out, 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def _exp(b, x):
    """e**x of 16 lanes for |x| <= 87, relative error below 3e-7; the polynomial of cpu_math.exp."""

    def const(value):
        return ir.Constant(V_F32, [value] * LANES)

    floor = _function(b.module, "llvm.floor.v16f32", ir.FunctionType(V_F32, [V_F32]))
    n = b.call(floor, [_fma(b, x, const(1.44269504), const(0.5))])
    r = _fma(b, n, const(2.12194440e-4), _fma(b, n, const(-0.693359375), x))
    p = const(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(b, p, r, const(factor))
    p = b.fadd(_fma(b, b.fmul(p, r), r, r), const(1.0))
    exponent = b.add(b.fptosi(n, V_I32), ir.Constant(V_I32, [127] * LANES))
    return b.fmul(p, b.bitcast(b.shl(exponent, ir.Constant(V_I32, [23] * LANES)), V_F32))


def _round_bf16(b, values):
    """16 fp32 -> bf16 bits as 16 x i16, round to nearest even."""
    bits = b.bitcast(values, V_I32)
    odd = b.and_(b.lshr(bits, ir.Constant(V_I32, [16] * LANES)), ir.Constant(V_I32, [1] * LANES))
    rounded = b.add(b.add(bits, ir.Constant(V_I32, [0x7FFF] * LANES)), odd)
    return b.trunc(b.lshr(rounded, ir.Constant(V_I32, [16] * LANES)), ir.VectorType(I16, LANES))


def _larger(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@intrinsic
def silu_mul(typingctx, gate, up, out):
    """out [16] bf16 = silu(gate [16] fp32) * up [16] fp32; all int64 addresses."""

    def codegen(context, b, signature, arguments):
        gate_, up_ = (_load(b, V_F32, address, 4) for address in arguments[:2])
        low, high = ir.Constant(V_F32, [-87.0] * LANES), ir.Constant(V_F32, [87.0] * LANES)
        away = _larger(b, b.fsub(_zero(), gate_), low)
        away = b.select(b.fcmp_ordered("<", away, high), away, high)
        silu = b.fdiv(gate_, b.fadd(_exp(b, away), ir.Constant(V_F32, [1.0] * LANES)))
        _store(b, _round_bf16(b, b.fmul(silu, up_)), arguments[2], 2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def largest(typingctx, values, count):
    """Largest fp32 of `count` (a multiple of 64, at least 64) at an address; NaN compare as smallest."""

    def codegen(context, b, signature, arguments):
        values_, count_ = arguments

        def body(k, bests):
            place = b.add(values_, b.shl(k, _const(8)))
            return [_larger(b, _load(b, V_F32, b.add(place, _const(64 * i)), 4), best) for i, best in enumerate(bests)]

        lowest = ir.Constant(V_F32, [float("-inf")] * LANES)
        first, second, third, fourth = _loop(b, b.ashr(count_, _const(6)), [lowest] * 4, body)
        best = _larger(b, _larger(b, first, second), _larger(b, third, fourth))
        result = b.extract_element(best, _const(0, I32))
        for lane in range(1, LANES):
            result = _larger(b, b.extract_element(best, _const(lane, I32)), result)
        return result

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def float_bits(typingctx, value):
    """The bits of an fp32 as uint32."""

    def codegen(context, b, signature, arguments):
        return b.bitcast(arguments[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, bits):
    """The fp32 with these uint32 bits."""

    def codegen(context, b, signature, arguments):
        return b.bitcast(arguments[0], F32)

    return types.float32(types.uint32), codegen
