# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""The fused sampler: penalties, filters and Gumbel-max over the vocabulary, without a sort.

A token's distance below the row's best, d = (max - logit) / temperature, is never negative, so its float32 bits order
as integers and the top-k and top-p thresholds are found by binary search on bits. Rows are independent and every sum
has a fixed order: what a row samples never depends on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.random_bits import GOLDEN_32, GOLDEN_64, MAX_UNIFORM, MIX_32, MIX_64
from baton.kernels.sampling import LogitBias, Penalties, Sampled, SamplingTensors, are_dense
from baton.kernels.triton_range import tensor_range

_CHUNK = 1024  # vocabulary entries per program, in the kernels that run over (row, chunk)
_SPAN = 4096  # entries per loop turn, in the kernels that run over rows
_CAPACITY = 4096  # candidates kept per row for the threshold search; a row that needs more is searched as a whole

_GOLDEN_32 = tl.constexpr(GOLDEN_32)
_GOLDEN_64 = tl.constexpr(GOLDEN_64)
_MIX_32A, _MIX_32B = tl.constexpr(MIX_32[0]), tl.constexpr(MIX_32[1])
_MIX_64A, _MIX_64B = tl.constexpr(MIX_64[0]), tl.constexpr(MIX_64[1])
_MAX_UNIFORM = tl.constexpr(MAX_UNIFORM)
_KEEP_ALL = tl.constexpr(0x7FFFFFFF)


def sample_triton(logits: torch.Tensor, params: SamplingTensors) -> Sampled:
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return Sampled(torch.empty(0, dtype=torch.int64, device=logits.device))
    assert logits.stride(1) == 1 and are_dense(params)
    logits = _adjusted(logits, params)
    if params.temperature is None:
        return _pick(logits, None, params)
    per_chunk = (num_rows, triton.cdiv(vocab, _CHUNK))
    maxima = torch.empty(per_chunk, dtype=torch.float32, device=logits.device)
    _chunk_max[per_chunk](logits, maxima, logits.stride(0), vocab, CHUNK=_CHUNK)
    distances = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    nearest = torch.empty_like(maxima)
    chunks = triton.next_power_of_2(per_chunk[1])
    _distances[per_chunk](
        logits, maxima, params.temperature, distances, nearest, logits.stride(0), vocab, CHUNK=_CHUNK, CHUNKS=chunks
    )
    return _pick(distances, _thresholds(distances, nearest, params), params)


def _adjusted(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    penalties, bias, allowed = params.penalties, params.bias, params.allowed
    if penalties is None and bias is None and allowed is None:
        return logits
    num_rows, vocab = logits.shape
    adjusted = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    used = Penalties(output_counts=adjusted) if penalties is None else penalties  # `adjusted`: a pointer nobody reads
    pointers = (used.prompt_mask, used.repetition, used.presence, used.frequency, allowed)
    _adjust[(num_rows, triton.cdiv(vocab, _CHUNK))](
        logits,
        adjusted,
        used.output_counts,
        *(adjusted if pointer is None else pointer for pointer in pointers),
        logits.stride(0),
        vocab,
        0 if allowed is None else allowed.shape[1],
        HAS_PROMPT=used.prompt_mask is not None,
        HAS_REPETITION=used.repetition is not None,
        HAS_PRESENCE=used.presence is not None,
        HAS_FREQUENCY=used.frequency is not None,
        HAS_ALLOWED=allowed is not None,
        CHUNK=_CHUNK,
    )
    if bias is not None:
        _add_bias(adjusted, bias)
    return adjusted


def _add_bias(adjusted: torch.Tensor, bias: LogitBias) -> None:
    count = bias.rows.numel()
    if count:
        grid = (triton.cdiv(count, 128),)
        _scatter_add[grid](adjusted, bias.rows, bias.ids, bias.values, adjusted.stride(0), count, BLOCK=128)


def _thresholds(distances: torch.Tensor, nearest: torch.Tensor, params: SamplingTensors) -> torch.Tensor | None:
    """Float bits of the largest distance that each row keeps, [num_rows] int32; None = all are kept."""
    if params.top_k is None and params.top_p is None and params.min_p is None:
        return None
    num_rows, vocab = distances.shape
    num_chunks = nearest.shape[1]
    thresholds, counts = torch.empty(2, num_rows, dtype=torch.int32, device=distances.device)
    masses = torch.empty(num_rows, dtype=torch.float32, device=distances.device)
    candidates = torch.empty(num_rows, _CAPACITY, dtype=torch.float32, device=distances.device)
    top_k = counts if params.top_k is None else params.top_k
    top_p = masses if params.top_p is None else params.top_p
    features = {"HAS_K": params.top_k is not None, "HAS_P": params.top_p is not None}
    sizes = {"SPAN": _SPAN, "CAPACITY": _CAPACITY, "num_warps": 8}
    _gather_candidates[(num_rows,)](
        distances, nearest, top_k, top_p, candidates, counts, masses, vocab, num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks), **features, **sizes,
    )  # fmt: skip
    min_p = masses if params.min_p is None else params.min_p
    _search_thresholds[(num_rows,)](
        distances, top_k, top_p, min_p, candidates, counts, masses, thresholds, vocab,
        HAS_MIN_P=params.min_p is not None, **features, **sizes,
    )  # fmt: skip
    return thresholds


def _pick(scores: torch.Tensor, thresholds: torch.Tensor | None, params: SamplingTensors) -> Sampled:
    """The best token of each row: of logits when every row is greedy, else of distances and noise."""
    num_rows, vocab = scores.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    values = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=scores.device)
    ids = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=scores.device)
    sampled = params.temperature is not None
    _chunk_best[(num_rows, num_chunks)](
        scores,
        params.temperature if sampled else values,
        params.seeds if sampled else ids,
        params.positions if sampled else ids,
        ids if thresholds is None else thresholds,
        values,
        ids,
        scores.stride(0),
        vocab,
        SAMPLED=sampled,
        HAS_THRESHOLD=thresholds is not None,
        CHUNK=_CHUNK,
    )
    best = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    _row_best[(num_rows,)](values, ids, best, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks))
    return Sampled(best)


@triton.jit
def _adjust(
    logits,  # [num_rows, vocab]
    adjusted,  # [num_rows, vocab] float32, contiguous
    output_counts,  # [num_rows, vocab] int32; this and all below are read only if the feature is on
    prompt_mask,  # [num_rows, vocab] bool
    repetition,  # [num_rows] float32
    presence,  # [num_rows] float32
    frequency,  # [num_rows] float32
    allowed,  # [num_rows, num_words] int32: 32 ids a word
    logits_stride,
    vocab,
    num_words,
    HAS_PROMPT: tl.constexpr,
    HAS_REPETITION: tl.constexpr,
    HAS_PRESENCE: tl.constexpr,
    HAS_FREQUENCY: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    cell = row * vocab + token
    value = tl.load(logits + row * logits_stride + token, inside, other=0.0).to(tl.float32)
    if HAS_REPETITION or HAS_PRESENCE or HAS_FREQUENCY:
        count = tl.load(output_counts + cell, inside, other=0)
        if HAS_REPETITION:
            seen = count > 0
            if HAS_PROMPT:
                seen = seen | (tl.load(prompt_mask + cell, inside, other=0) != 0)
            factor = tl.load(repetition + row)
            value = tl.where(seen, tl.where(value > 0, tl.div_rn(value, factor), value * factor), value)
        if HAS_PRESENCE:
            value = tl.where(count > 0, value - tl.load(presence + row), value)
        if HAS_FREQUENCY:
            value -= tl.load(frequency + row) * count.to(tl.float32)
    if HAS_ALLOWED:
        word = tl.load(allowed + row * num_words + (token >> 5), inside, other=0)
        value = tl.where(((word >> (token & 31)) & 1) != 0, value, float("-inf"))
    tl.store(adjusted + cell, value, inside)


@triton.jit
def _scatter_add(adjusted, rows, ids, values, stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    target = adjusted + tl.load(rows + entry, inside, other=0) * stride + tl.load(ids + entry, inside, other=0)
    tl.atomic_add(target, tl.load(values + entry, inside, other=0.0), inside)


@triton.jit
def _chunk_max(logits, maxima, logits_stride, vocab, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * logits_stride + token, token < vocab, other=float("-inf")).to(tl.float32)
    tl.store(maxima + row * tl.num_programs(1) + chunk, tl.max(value, 0))


@triton.jit
def _distances(
    logits,  # [num_rows, vocab]
    maxima,  # [num_rows, num_chunks] float32
    temperature,  # [num_rows] float32
    distances,  # [num_rows, vocab] float32, contiguous
    nearest,  # [num_rows, num_chunks] float32: the least distance of each chunk
    logits_stride,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(maxima + row * num_chunks + lane, lane < num_chunks, other=float("-inf")), 0)
    heat = tl.load(temperature + row)
    heat = tl.where(heat > 0, heat, 1.0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    value = tl.load(logits + row * logits_stride + token, inside, other=float("-inf")).to(tl.float32)
    # Subtracting before scaling keeps the best token at exactly 0, however small the temperature.
    distance = tl.div_rn(best - value, tl.zeros_like(value) + heat)
    tl.store(distances + row * vocab + token, distance, inside)
    tl.store(nearest + row * num_chunks + chunk, tl.min(distance, 0))


@triton.jit
def _gather_candidates(
    distances,  # [num_rows, vocab] float32
    nearest,  # [num_rows, num_chunks] float32
    top_k,  # [num_rows] int32, read if HAS_K
    top_p,  # [num_rows] float32, read if HAS_P
    candidates,  # [num_rows, CAPACITY] float32: the row's least distances, in vocabulary order
    counts,  # [num_rows] int32: how many candidates; -1 = not enough of them, search the whole row
    masses,  # [num_rows] float32: sum of exp(-distance) over the whole row
    vocab,
    num_chunks,
    CHUNKS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    SPAN: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # At least r tokens lie within the r-th least of the chunks' own minima; most chunks but not all, so that a chunk of
    # unused tokens at the end of the vocabulary does not let everything in.
    rank = num_chunks - num_chunks // 8
    k = 0
    if HAS_K:
        k = tl.load(top_k + row)
        rank = tl.maximum(rank, k)
    lane = tl.arange(0, CHUNKS)
    minima = tl.sort(tl.load(nearest + row * num_chunks + lane, lane < num_chunks, other=float("inf")))
    limit = tl.sum(tl.where(lane == rank - 1, minima, 0.0), 0)

    count = 0
    mass = 0.0
    near_mass = 0.0
    for start in tensor_range(0, vocab, SPAN):
        token = start + tl.arange(0, SPAN)
        distance = tl.load(distances + row * vocab + token, token < vocab, other=float("inf"))
        near = (distance <= limit) & (token < vocab)
        place = count + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(candidates + row * CAPACITY + place, distance, near & (place < CAPACITY))
        count += tl.sum(near.to(tl.int32), 0)
        if HAS_P:
            weight = tl.exp(-distance)
            mass += tl.sum(weight, 0)
            near_mass += tl.sum(tl.where(near, weight, 0.0), 0)
    usable = (count <= CAPACITY) & (k <= num_chunks)
    if HAS_P:
        usable = usable & ((k > 0) | (near_mass >= tl.load(top_p + row) * mass))
        tl.store(masses + row, mass)
    tl.store(counts + row, tl.where(usable, count, -1))


@triton.jit
def _search_thresholds(
    distances,  # [num_rows, vocab] float32
    top_k,  # [num_rows] int32, read if HAS_K
    top_p,  # [num_rows] float32, read if HAS_P
    min_p,  # [num_rows] float32, read if HAS_MIN_P
    candidates,  # [num_rows, CAPACITY] float32
    counts,  # [num_rows] int32
    masses,  # [num_rows] float32
    thresholds,  # [num_rows] int32
    vocab,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    SPAN: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(counts + row)
    source = candidates + row * CAPACITY
    if length < 0:
        length = vocab
        source = distances + row * vocab
    threshold = _KEEP_ALL
    if HAS_K:
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocab):
            threshold = _least_bits(source, length, k.to(tl.float32), False, SPAN)
    if HAS_P:
        p = tl.load(top_p + row)
        if p < 1:
            mass = tl.load(masses + row)
            if threshold != _KEEP_ALL:
                mass = _total_within(source, length, threshold, True, SPAN)
            threshold = tl.minimum(threshold, _least_bits(source, length, p * mass, True, SPAN))
    if HAS_MIN_P:
        distance = -tl.log(tl.load(min_p + row))
        threshold = tl.minimum(threshold, tl.maximum(distance, 0.0).to(tl.int32, bitcast=True))
    tl.store(thresholds + row, threshold)


@triton.jit
def _least_bits(source, length, target, MASS: tl.constexpr, SPAN: tl.constexpr):
    """The least float bits such that the distances up to it reach `target`, in number or in mass."""
    bits = 0
    for i in range(31):
        bit = 1 << (30 - i)
        total = _total_within(source, length, bits + (bit - 1), MASS, SPAN)
        bits = tl.where(total >= target, bits, bits + bit)
    return bits


@triton.jit
def _total_within(source, length, limit, MASS: tl.constexpr, SPAN: tl.constexpr):
    """How many distances have float bits up to `limit`, or their mass, as float32 (exact for a vocabulary's counts)."""
    total = 0.0
    for start in tensor_range(0, length, SPAN):
        entry = start + tl.arange(0, SPAN)
        distance = tl.load(source + entry, entry < length, other=float("inf"))
        within = (distance.to(tl.int32, bitcast=True) <= limit) & (entry < length)
        total += tl.sum(tl.where(within, tl.exp(-distance) if MASS else 1.0, 0.0), 0)
    return total


@triton.jit
def _chunk_best(
    scores,  # [num_rows, vocab]: float32 distances if SAMPLED, else logits
    temperature,  # [num_rows] float32; this, seeds and positions are read if SAMPLED
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int64
    thresholds,  # [num_rows] int32, read if HAS_THRESHOLD
    values,  # [num_rows, num_chunks] float32: the best score of each chunk
    ids,  # [num_rows, num_chunks] int64: and whose it is
    scores_stride,
    vocab,
    SAMPLED: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    if SAMPLED:
        distance = tl.load(scores + row * scores_stride + token, inside, other=float("inf"))
        score = -distance
        if HAS_THRESHOLD:
            kept = distance.to(tl.int32, bitcast=True) <= tl.load(thresholds + row)
            score = tl.where(kept, score, float("-inf"))
        if tl.load(temperature + row) > 0:
            score += _gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    else:
        score = tl.load(scores + row * scores_stride + token, inside, other=float("-inf")).to(tl.float32)
    place = row * tl.num_programs(1) + chunk
    tl.store(values + place, tl.max(score, 0))
    tl.store(ids + place, (chunk * CHUNK + tl.argmax(score, 0, tie_break_left=True)).to(tl.int64))


@triton.jit
def _row_best(values, ids, best, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNKS)
    value = tl.load(values + row * num_chunks + lane, lane < num_chunks, other=float("-inf"))
    chunk = tl.argmax(value, 0, tie_break_left=True)
    tl.store(best + row, tl.load(ids + row * num_chunks + chunk))


@triton.jit
def _gumbel(seed, position, token):
    """`baton.kernels.random_bits.gumbel` for one row, number for number."""
    key = _splitmix64(seed.to(tl.uint64, bitcast=True))
    key = _splitmix64(key + (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN_64)
    bits = token.to(tl.uint32) * _GOLDEN_32 + key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * _MIX_32A ^ (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 15)) * _MIX_32B
    bits = bits ^ (bits >> 16)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _MAX_UNIFORM)
    # log1p(-u), which Triton lacks: its series below 1/32, where 1 - u would lose the digits that matter.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform / 5))))
    return -tl.log(tl.where(uniform < 0.03125, series, -tl.log(1 - uniform)))


@triton.jit
def _splitmix64(state):
    state = (state ^ (state >> 30)) * _MIX_64A
    state = (state ^ (state >> 27)) * _MIX_64B
    return state ^ (state >> 31)
