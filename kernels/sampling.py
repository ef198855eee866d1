"""Choose the next token of each row: filtered Gumbel-max with counter-based randomness, and log-probabilities.

logits: [num_rows, vocab], any float dtype, not modified; the work is done in float32. Order of filters: repetition,
presence and frequency penalties, logit bias, allowed mask, temperature, top-k, top-p, min-p. Each of the last three
keeps the tokens at or above a threshold, so equal logits stand or fall together. A row must keep at least one token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from baton.kernels.random_bits import gumbel

# How many of the best candidates top-p looks at before it sorts the whole vocabulary; the first nearly always does.
_HEADS = (256, 4096)


class LogitBias(NamedTuple):
    """Added to single logits, as triplets; a value of -inf bans the id (e.g. EOS while min_tokens is not reached)."""

    rows: torch.Tensor  # [n] int64
    ids: torch.Tensor  # [n] int64
    values: torch.Tensor  # [n] float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties on what was said already; each of the three is [num_rows] float32, or None where no row uses it."""

    output_counts: torch.Tensor  # [num_rows, vocab] int32: occurrences in the output so far
    prompt_mask: torch.Tensor | None = None  # [num_rows, vocab] bool: ids in the prompt; needed by repetition
    repetition: torch.Tensor | None = None  # 1 = off; divides positive and multiplies negative logits
    presence: torch.Tensor | None = None  # 0 = off; subtracted once from every id in the output
    frequency: torch.Tensor | None = None  # 0 = off; subtracted per occurrence in the output


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters, one entry per row ([num_rows]); None where no row of the batch uses the feature.

    The common greedy batch is `SamplingTensors()`: one argmax.
    """

    temperature: torch.Tensor | None = None  # float32; 0 = greedy. None = every row is greedy
    seeds: torch.Tensor | None = None  # int64; required with temperature
    positions: torch.Tensor | None = None  # int64, of the token being sampled; required with temperature
    top_k: torch.Tensor | None = None  # int32; 0 = off
    top_p: torch.Tensor | None = None  # float32; 1 = off
    min_p: torch.Tensor | None = None  # float32; 0 = off
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    allowed: torch.Tensor | None = None  # [num_rows, ceil(vocab / 32)] int32: the grammar's mask, id i = bit i


def are_dense(params: SamplingTensors) -> bool:
    """Whether every parameter's rows lie one after another, which is how kernels read them."""
    parts = [getattr(group, field.name) for group in (params, params.penalties) if group for field in fields(group)]
    return all(part.is_contiguous() for part in parts if isinstance(part, torch.Tensor))


class Sampled(NamedTuple):
    ids: torch.Tensor  # [num_rows] int64


class Logprobs(NamedTuple):
    """Natural logs of the model's own probabilities (no penalty, mask or temperature), float32."""

    chosen: torch.Tensor  # [num_rows]
    top_ids: torch.Tensor  # [num_rows, num_top] int64, most likely first
    top: torch.Tensor  # [num_rows, num_top]


def sample(logits: torch.Tensor, params: SamplingTensors) -> Sampled:
    """Sample one id per row: a pure function of the row's logits, parameters, seed and position."""
    if logits.is_cuda:
        from baton.kernels.sampling_triton import sample_triton

        return sample_triton(logits, params)
    return sample_reference(logits, params)


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> Logprobs:
    log_sum = torch.logsumexp(logits.float(), dim=-1)
    chosen = logits.gather(1, ids[:, None])[:, 0].float() - log_sum
    top = torch.topk(logits, min(num_top, logits.shape[1]), dim=-1)
    return Logprobs(chosen, top.indices, top.values.float() - log_sum[:, None])


def sample_reference(logits: torch.Tensor, params: SamplingTensors) -> Sampled:
    logits = adjust_logits(logits, params)
    if params.temperature is None:
        return Sampled(logits.argmax(dim=-1))
    assert params.seeds is not None and params.positions is not None
    hot = params.temperature[:, None] > 0
    scores = _filtered(logits, params, params.temperature[:, None])
    scores.add_(gumbel(params.seeds, params.positions, logits.shape[1]).mul_(hot))
    return Sampled(scores.argmax(dim=-1))


def probabilities(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """[num_rows, vocab] float32: what `sample` draws from; a greedy row's best token has all of it."""
    logits = adjust_logits(logits, params)
    certain = torch.zeros(logits.shape, device=logits.device).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    if params.temperature is None:
        return certain
    temperature = params.temperature[:, None]
    return torch.where(temperature > 0, _filtered(logits, params, temperature).softmax(dim=-1), certain)


def _filtered(logits: torch.Tensor, params: SamplingTensors, temperature: torch.Tensor) -> torch.Tensor:
    """Log-probabilities up to a constant of each row, with -inf for what the filters take out."""
    # Scaling after the maximum is subtracted keeps the best token at exactly 0: a tiny temperature sends every other
    # score to -inf and can never make a NaN. Greedy rows are left unscaled and get no noise.
    scores = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    scores.div_(torch.where(temperature > 0, temperature, 1.0))
    threshold = _threshold(scores, params)
    if threshold is not None:
        scores.masked_fill_(scores < threshold, float("-inf"))
    return scores


def adjust_logits(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Apply penalties, bias and the allowed mask; the logits themselves come back when there is none."""
    if params.penalties is not None:
        logits = _penalised(logits.float(), params.penalties)
    if params.bias is not None:
        rows, ids, values = params.bias
        logits = logits.float().index_put((rows, ids), values, accumulate=True)
    if params.allowed is not None:
        logits = logits.masked_fill(~_unpacked(params.allowed, logits.shape[1]), float("-inf"))
    return logits


def _unpacked(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """A bool for each id, [num_rows, vocab]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> bits) & 1).view(mask.shape[0], -1)[:, :vocab].bool()


def _penalised(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    counts = penalties.output_counts
    if penalties.repetition is not None:
        seen = counts > 0 if penalties.prompt_mask is None else (counts > 0) | penalties.prompt_mask
        factor = penalties.repetition[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if penalties.presence is not None:
        logits = logits - penalties.presence[:, None] * (counts > 0)
    if penalties.frequency is not None:
        logits = logits - penalties.frequency[:, None] * counts
    return logits


def _threshold(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor | None:
    """The lowest score that survives top-k, top-p and min-p in each row, [num_rows, 1]; scores have maximum 0."""
    thresholds: list[torch.Tensor] = []
    if params.top_k is not None:
        thresholds.append(_top_k_threshold(scores, params.top_k))
    if params.top_p is not None:
        kept = scores if not thresholds else scores.masked_fill(scores < thresholds[0], float("-inf"))
        thresholds.append(_top_p_threshold(kept, params.top_p))
    if params.min_p is not None:
        thresholds.append(params.min_p.log()[:, None])  # p >= min_p * p_max, and p_max is exp(0) before normalisation
    return torch.stack(thresholds).amax(dim=0) if thresholds else None


def _top_k_threshold(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    k = top_k.clamp(max=scores.shape[1]).long()
    head = torch.topk(scores, max(1, int(k.max())), dim=-1).values
    kth = head.gather(1, (k - 1).clamp_(min=0)[:, None])
    return kth.masked_fill_((k == 0)[:, None], float("-inf"))


def _top_p_threshold(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """A token stays if the tokens strictly above it hold less than top_p of the mass."""
    wanted = (scores.exp().sum(dim=-1) * top_p)[:, None]
    off = (top_p >= 1)[:, None]
    head = mass = scores  # the best scores of each row, descending, and the mass up to each
    for size in (*(size for size in _HEADS if size < scores.shape[1]), scores.shape[1]):
        head = torch.topk(scores, size, dim=-1).values
        mass = head.exp().cumsum_(dim=-1)
        if bool(((mass[:, -1:] >= wanted) | off).all()):
            break
    num_kept = torch.sum(mass[:, :-1] < wanted, dim=-1, keepdim=True)  # beside the first, which always stays
    return head.gather(1, num_kept).masked_fill_(off, float("-inf"))
