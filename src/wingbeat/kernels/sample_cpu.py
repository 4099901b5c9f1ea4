"""Sampling on a CPU without sorting the vocabulary (Numba), rows shared among threads.

top_k and top_p look for a boundary (value, id): bisection on the value over vectorised passes until few tokens are left
between the bounds, then those are put in order. Noise is hashed only where it can matter: a token wins only if
score + g beats the best so far, and g is bounded by the leading bits of its hash, so logarithms are taken for very few.

Legend: n rows, V vocab, R rows that propose, D draft vocab.
"""

# mypy: ignore-errors
from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from wingbeat.kernels.cpu_ir import float_bits, largest
from wingbeat.kernels.cpu_math import exp
from wingbeat.kernels.noise import GOLDEN32, MUL_A, MUL_B
from wingbeat.kernels.sampling import SamplingBatch, SamplingRows, token_logprobs
from wingbeat.types import TokenLogprob

GROUP = 16
MOST_NOISE = np.float32(23.0)
"""Largest Gumbel value a 32-bit uniform can give: -log(2**-33) = 22.9."""
LN2 = np.float32(0.6931472)
FEW = 64
FEWEST_GUESSES = 4
"""Rows a thread must get before drafting wakes one."""
LOWEST = np.float32(-np.inf)


@njit(inline="always")
def _mix(x):
    """Numba widens uint32 arithmetic to 64 bits, hence a cast after each step."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(MUL_A))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(MUL_B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(nogil=True, cache=True)
def _row_keys(key, position):
    """The two words that (key, position) contribute to every token's hash."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)
    first = _mix(np.uint32(np.uint32(np.uint32(position & 0xFFFFFFFF) * np.uint32(GOLDEN32)) ^ low))
    first = _mix(np.uint32(first + high))
    return first, _mix(np.uint32(first ^ np.uint32(GOLDEN32)))


@njit(inline="always")
def _bits(first, second, token):
    word = np.uint32(np.uint32(np.uint32(token) * np.uint32(GOLDEN32)) ^ first)
    return _mix(np.uint32(_mix(word) + second))


@njit(inline="always")
def _gumbel(bits):
    return -np.log(-np.log((np.float64(bits) + 0.5) / 4294967296.0))


@njit(inline="always")
def _most(bits):
    """Upper bound of the Gumbel value of a hash: -log(1-u), from the exponent of 1-u."""
    left = np.float32(np.uint32(np.uint32(0xFFFFFFFF) - bits)) + np.float32(1.0)
    exponent = np.int32(float_bits(left) >> np.uint32(23)) - np.int32(127)
    return np.float32(np.int32(33) - exponent) * LN2


@njit(nogil=True, cache=True)
def _has_nan(z):
    bad = 0
    for i in range(z.shape[0]):
        bad += z[i] != z[i]
    return bad > 0


@njit(nogil=True, cache=True)
def _largest(z):
    """Largest of z, which is contiguous and without NaN."""
    best, start = LOWEST, z.shape[0] - z.shape[0] % 64
    if start:
        best = largest(z.ctypes.data, start)
    for i in range(start, z.shape[0]):
        best = max(best, z[i])
    return best


@njit(nogil=True, cache=True)
def _first_at(z, value):
    for i in range(z.shape[0]):
        if z[i] == value:
            return i
    return -1


@njit(nogil=True, cache=True)
def _penalise(z, history, length, prompt_len, path, repetition, frequency, presence, counts):
    """Penalties over history[:length] and the in-flight path. counts [V] int32 is zero before and after."""
    for i in range(length):  # first visit: repetition, over prompt and output alike
        token = history[i]
        if counts[token] == 0:
            counts[token] = 1
            if repetition != 1.0:
                z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
    for token in path:
        if token >= 0 and counts[token] == 0:
            counts[token] = 1
            if repetition != 1.0:
                z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
    for i in range(length):
        counts[history[i]] = 0
    for token in path:
        if token >= 0:
            counts[token] = 0
    if frequency != 0.0 or presence != 0.0:
        for i in range(prompt_len, length):
            counts[history[i]] += 1
        for token in path:
            if token >= 0:
                counts[token] += 1
        for i in range(prompt_len, length):
            _subtract(z, history[i], frequency, presence, counts)
        for token in path:
            if token >= 0:
                _subtract(z, token, frequency, presence, counts)


@njit(inline="always")
def _subtract(z, token, frequency, presence, counts):
    if counts[token]:
        z[token] -= frequency * np.float32(counts[token]) + presence
        counts[token] = 0


@njit(nogil=True, cache=True)
def _shape(z, s, path, num_path, history, history_lens, prompt_lens, repetition, frequency, presence, min_tokens,
           stop_ids, bias_ids, bias_values, allowed, counts):  # fmt: skip
    """Everything before temperature, in place, for a row of sequence s."""
    length, prompt_len = history_lens[s], prompt_lens[s]
    if repetition[s] != 1.0 or frequency[s] != 0.0 or presence[s] != 0.0:
        _penalise(z, history[s], length, prompt_len, path, repetition[s], frequency[s], presence[s], counts)
    for k in range(bias_ids.shape[1]):
        if 0 <= bias_ids[s, k] < z.shape[0]:  # clients name these ids: outside the vocabulary they must not write
            z[bias_ids[s, k]] += bias_values[s, k]
    if length - prompt_len + num_path < min_tokens[s]:
        for k in range(stop_ids.shape[1]):
            if 0 <= stop_ids[s, k] < z.shape[0]:
                z[stop_ids[s, k]] = LOWEST
    for word in range(allowed.shape[0]):
        if allowed[word] != -1:
            for bit in range(32):
                i = word * 32 + bit
                if i < z.shape[0] and not (allowed[word] >> bit) & 1:
                    z[i] = LOWEST


@njit(nogil=True, cache=True, fastmath=True)
def _scale(z, best, inverse, e):
    """z = (z - best) / temperature, e = exp(z)."""
    for i in range(z.shape[0]):
        z[i] = max((z[i] - best) * inverse, np.float32(-1e30))
        e[i] = exp(z[i])


@njit(nogil=True, cache=True, fastmath=True)
def _mass(s, e, bound):
    """(sum of e, count) where s >= bound."""
    total, count = np.float64(0.0), 0
    for i in range(s.shape[0]):
        inside = s[i] >= bound
        total += np.float64(e[i]) if inside else 0.0
        count += inside
    return total, count


@njit(nogil=True, cache=True)
def _boundary(s, e, by_count, target, low):
    """(value, id) of the token at which the ordered sum of e (or count) over s >= low reaches `target`.

    Order: larger s first, lower id on ties.
    """
    high, reached, reached_count = np.float32(1.0), 0.0, 0  # nothing is >= high
    _, low_count = _mass(s, e, low)
    for _ in range(40):
        if low_count - reached_count <= FEW:
            break
        middle = np.float32(0.5) * (max(low, np.float32(-60.0)) + min(high, np.float32(0.0)))
        if not (low < middle < high):
            break
        mass, count = _mass(s, e, middle)
        if (count if by_count else mass) >= target:
            low, low_count = middle, count
        else:
            high, reached, reached_count = middle, mass, count
    values, ids = np.empty(low_count - reached_count, np.float32), np.empty(low_count - reached_count, np.int64)
    found = 0
    for i in range(s.shape[0]):
        if low <= s[i] < high:
            values[found], ids[found] = -s[i], i
            found += 1
    order = np.argsort(values, kind="mergesort")
    total = np.float64(reached_count) if by_count else reached
    for i in order:
        total += 1.0 if by_count else np.float64(e[ids[i]])
        if total >= target:
            return -values[i], ids[i]
    return low, np.int64(s.shape[0])


@njit(nogil=True, cache=True)
def _keep(s, e, top_k, top_p, min_p):
    """The boundary of what survives min_p, top_k, top_p: tokens with larger s, or equal s and an id not above."""
    value, last = np.float32(-1e29), np.int64(s.shape[0])
    if min_p > 0.0:
        value = max(value, np.float32(np.log(np.float64(min_p))))
    if 0 < top_k < s.shape[0]:
        _, count = _mass(s, e, value)
        if top_k < count:
            value, last = _boundary(s, e, True, top_k, value)
    if top_p < 1.0:
        for i in range(s.shape[0]):  # ties beyond the top_k boundary must not count
            if s[i] == value and i > last:
                s[i] = np.float32(-1e30)
        mass, _ = _mass(s, e, value)
        value, last = _boundary(s, e, False, np.float64(top_p) * mass, value)
    return value, last


@njit(nogil=True, cache=True)
def _draw(s, value, last, first, second):
    """argmax of s + noise over the kept tokens; GROUP tokens are skipped at once where none can win."""
    best, winner = np.float64(-1e300), -1
    for start in range(0, s.shape[0], GROUP):
        stop = min(start + GROUP, s.shape[0])
        top = LOWEST
        for i in range(start, stop):
            top = max(top, s[i])
        if top < value or np.float64(top + MOST_NOISE) < best:
            continue
        for i in range(start, stop):
            if s[i] > value or (s[i] == value and i <= last):
                bits = _bits(first, second, i)
                if np.float64(s[i] + _most(bits)) >= best:
                    score = np.float64(s[i]) + _gumbel(bits)
                    if score > best:
                        best, winner = score, i
    return winner


@njit(nogil=True, cache=True)
def _sample_row(z, s, e, counts, path, allowed, temperature, top_k, top_p, min_p, repetition, frequency,
                presence, noise_key, history, history_lens, prompt_lens, min_tokens, stop_ids, bias_ids,
                bias_values):  # fmt: skip
    num_path = 0
    while num_path < path.shape[0] and path[num_path] >= 0:
        num_path += 1
    if _has_nan(z):
        return -1
    _shape(
        z, s, path[:num_path], num_path, history, history_lens, prompt_lens, repetition, frequency, presence,
        min_tokens, stop_ids, bias_ids, bias_values, allowed, counts,
    )  # fmt: skip
    best = _largest(z)
    if not np.isfinite(best):
        return -1
    if temperature[s] == 0.0:
        return _first_at(z, best)
    _scale(z, best, np.float32(1.0) / temperature[s], e)
    value, last = np.float32(-1e29), np.int64(z.shape[0])
    if top_k[s] > 0 or top_p[s] < 1.0 or min_p[s] > 0.0:
        value, last = _keep(z, e, top_k[s], top_p[s], min_p[s])
    first, second = _row_keys(noise_key[s], history_lens[s] + num_path)
    return _draw(z, value, last, first, second)


@njit(nogil=True, cache=True)
def _sample_share(t, num_workers, logits, seq, paths, allowed, out, settings):
    """Every num_workers-th row from row t on. The vocabulary's scratch is made once per share."""
    e, counts = np.empty(logits.shape[1], np.float32), np.zeros(logits.shape[1], np.int32)
    no_mask = np.zeros(0, np.int32)
    for i in range(t, logits.shape[0], num_workers):
        mask = allowed[i] if allowed.shape[0] else no_mask
        out[i] = _sample_row(logits[i], seq[i], e, counts, paths[i], mask, *settings)


@njit(nogil=True, cache=True, parallel=True)
def _sample(num_workers, logits, seq, paths, allowed, out, settings):
    for t in prange(num_workers):
        _sample_share(t, num_workers, logits, seq, paths, allowed, out, settings)


@njit(nogil=True, cache=True, fastmath=True)
def _sum_exp(z, best, inverse):
    total = np.float32(0.0)
    for i in range(z.shape[0]):
        total += exp((z[i] - best) * inverse)
    return total


@njit(nogil=True, cache=True)
def _insert(score, i, scores, ids):
    """Keeps the best len(scores) in order; equal scores keep the one found first."""
    k = scores.shape[0] - 1
    while k > 0 and scores[k - 1] < score:
        scores[k], ids[k] = scores[k - 1], ids[k - 1]
        k -= 1
    scores[k], ids[k] = score, i


@njit(nogil=True, cache=True)
def _best_guesses(z, target_ids, inverse, sampled, first, second, scores, ids):
    """The len(scores) best of z * inverse (+ noise), best first."""
    scores[:] = -1e300
    most = MOST_NOISE if sampled else np.float32(0.0)
    for start in range(0, z.shape[0], GROUP):
        stop = min(start + GROUP, z.shape[0])
        top = LOWEST
        for i in range(start, stop):
            top = max(top, z[i])
        if np.float64(top * inverse + most) <= scores[-1]:
            continue
        for i in range(start, stop):
            score = np.float64(z[i]) * np.float64(inverse)
            if sampled:
                bits = _bits(first, second, target_ids[i])
                if score + np.float64(_most(bits)) < scores[-1]:
                    continue
                score += _gumbel(bits)
            if score > scores[-1]:
                _insert(score, i, scores, ids)


@njit(nogil=True, cache=True)
def _propose_share(t, num_workers, logits, target_ids, temperature, noise_key, seq, positions, outs):
    """Every num_workers-th row from row t on."""
    out_ids, out_chance = outs
    topk = out_ids.shape[1]
    scores, ids = np.empty(topk + 1, np.float64), np.zeros(topk + 1, np.int64)
    for r in range(t, logits.shape[0], num_workers):
        heat = temperature[seq[r]]
        sampled = heat > 0.0
        inverse = np.float32(1.0) / heat if sampled else np.float32(1.0)
        first, second = _row_keys(noise_key[seq[r]], positions[r])
        z = logits[r]
        _best_guesses(z, target_ids, inverse, sampled, first, second, scores, ids)
        best = _largest(z)
        total = np.float32(0.0) if sampled else _sum_exp(z, best, inverse)
        left = np.float32(1.0)
        for k in range(topk):
            out_ids[r, k] = target_ids[ids[k]]
            if sampled:
                missed = np.float32(0.5) * exp(np.float32(scores[k + 1] - scores[k]))
                out_chance[r, k] = left * (np.float32(1.0) - missed)
                left *= missed
            else:
                out_chance[r, k] = exp(z[ids[k]] - best) / total


@njit(nogil=True, cache=True, parallel=True)
def _propose(num_workers, logits, target_ids, temperature, noise_key, seq, positions, outs):
    for t in prange(num_workers):
        _propose_share(t, num_workers, logits, target_ids, temperature, noise_key, seq, positions, outs)


def _settings(batch: SamplingBatch) -> tuple[np.ndarray, ...]:
    """The batch as _sample_row takes it."""
    tensors = (
        batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.repetition_penalty, batch.frequency_penalty,
        batch.presence_penalty, batch.noise_key, batch.history, batch.history_lens, batch.prompt_lens,
        batch.min_tokens, batch.stop_ids, batch.bias_ids, batch.bias_values,
    )  # fmt: skip
    return tuple(tensor.numpy() for tensor in tensors)


class CpuSampler:
    """Implements sampling.Sampler for float32 logits on a CPU, with as many threads as the maker's Numba is set to."""

    def __init__(self) -> None:
        self._workers = numba.get_num_threads()  # a setting of the calling thread; the engine samples on another

    def sample(self, logits: Tensor, batch: SamplingBatch, rows: SamplingRows) -> Tensor:
        out = np.empty(logits.shape[0], np.int64)
        allowed = np.zeros((0, 0), np.int32) if rows.allowed is None else rows.allowed.numpy()
        work = (logits.numpy(), rows.seq.numpy(), rows.ancestors.numpy(), allowed, out, _settings(batch))
        workers = min(self._workers, logits.shape[0])
        if workers > 1:
            _sample(workers, *work)
        else:  # waking threads costs more than it gives
            _sample_share(0, 1, *work)
        return torch.from_numpy(out)

    def propose_topk(
        self, logits: Tensor, target_ids: Tensor, batch: SamplingBatch, seq: Tensor, positions: Tensor, topk: int
    ) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        outs = (np.empty((num_rows, topk), np.int64), np.empty((num_rows, topk), np.float32))
        work = (
            logits.numpy(), target_ids.numpy(), batch.temperature.numpy(), batch.noise_key.numpy(), seq.numpy(),
            positions.numpy(), outs,
        )  # fmt: skip
        workers = min(self._workers, num_rows // FEWEST_GUESSES)
        if workers > 1:
            _propose(workers, *work)
        else:
            _propose_share(0, 1, *work)
        return torch.from_numpy(outs[0]), torch.from_numpy(outs[1])

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprob]:
        return token_logprobs(logits, token_ids, num_top)
