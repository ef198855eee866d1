# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What sampling must remember of each sequence, in rows that stay put for the sequence's life.

Parameters and penalty counts live on the device; the host keeps only what decides which features a step needs. All of
it is rebuilt from an Admission, so a sequence may come and go (preemption, migration) without handing state over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag

import numpy as np
import torch

from baton.actors.engine.batch import Admission, Row
from baton.actors.engine.grammar import GrammarStore, SampledIds, SlotGrammars
from baton.actors.engine.request import SamplingParams
from baton.kernels.sampling import LogitBias, Penalties, SamplingTensors

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class _Feature(IntFlag):
    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    REPETITION = 16
    PRESENCE = 32
    FREQUENCY = 64
    PENALTY = REPETITION | PRESENCE | FREQUENCY


@dataclass(frozen=True, slots=True)
class _Slot:
    features: int
    bias: dict[int, float]
    banned_ids: tuple[int, ...]  # until `min_position`
    min_position: int  # the first position where a stop id may be sampled
    num_logprobs: int | None


_EMPTY = _Slot(0, {}, (), 0, None)


class SlotStates:
    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        device: torch.device,
        grammars: GrammarStore | None = None,
    ) -> None:
        self._device = device
        self._grammars = SlotGrammars(grammars, vocab_size, eos_ids)
        self._eos_ids = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._slots = [_EMPTY] * num_slots
        # A parameter's values lie one after another, as kernels read them.
        self._floats = torch.zeros(len(_FLOATS), num_slots, device=device)
        self._integers = torch.zeros(2, num_slots, dtype=torch.int64, device=device)  # seed, top_k
        # Allocated when the first sequence with a penalty comes.
        self._counts: torch.Tensor | None = None  # [num_slots, vocab] int32, of output tokens
        self._prompt_mask: torch.Tensor | None = None  # [num_slots, vocab] bool
        # One more than the slots: where the padding rows of a CUDA graph write.
        self.last_sampled = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def num_logprobs(self, slot: int) -> int | None:
        return self._slots[slot].num_logprobs

    def is_plain(self, rows: Sequence[Row]) -> bool:
        """Whether the greedy choice on the raw logits is all that every row asks for."""
        return all(_is_plain(self._slots[row.slot], row.end) and row.slot not in self._grammars for row in rows)

    def admit(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        slots = self._tensor([admission.slot for admission in admissions])
        params = [admission.request.sampling for admission in admissions]
        floats = torch.tensor([[getattr(p, name) for p in params] for name in _FLOATS])
        integers = torch.tensor([[_signed64(p.seed) for p in params], [p.top_k for p in params]])
        self._floats.index_copy_(1, slots, self._to_device(floats))
        self._integers.index_copy_(1, slots, self._to_device(integers))
        for admission in admissions:
            self._slots[admission.slot] = slot = _host_state(admission, self._eos_ids)
            self._grammars.admit(admission)
            if slot.features & _Feature.PENALTY:
                self._load_history(admission)

    def tensors(self, rows: Sequence[Row], slots: torch.Tensor, positions: torch.Tensor) -> SamplingTensors:
        """Parameters of the rows to sample; a feature that none of them uses is None.

        `slots` and `positions` ([num_rows] int64, on the device) are the rows' slots and the positions to be sampled.
        """
        states = [self._slots[row.slot] for row in rows]
        features = 0
        for state in states:
            features |= state.features
        bias = self._bias(rows, states)
        mask = self._grammars.mask(rows)
        allowed = None if mask is None else self._to_device(mask)
        if not features:
            return SamplingTensors(bias=bias, allowed=allowed)
        columns = self._floats.index_select(1, slots).unbind(0)
        penalties = self._penalties(features, columns, slots) if features & _Feature.PENALTY else None
        draws = self._draws(features, columns, slots, positions)
        return replace(draws, penalties=penalties, bias=bias, allowed=allowed)

    def note(self, rows: Sequence[Row], ids: SampledIds) -> None:
        """Remember where the host will find what these rows have sampled."""
        self._grammars.note(rows, ids)

    def record(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Note what was sampled: the next step's input, and one more occurrence for the penalties."""
        self.last_sampled.index_copy_(0, slots, ids)
        if self._counts is not None:
            one = torch.ones((), dtype=torch.int32, device=self._device)
            self._counts.index_put_((slots, ids), one, accumulate=True)

    def record_chains(self, slots: torch.Tensor, ids: torch.Tensor, is_last: torch.Tensor) -> None:
        """Note several ids a slot, in order: those below 0 were not accepted, `is_last` marks each slot's last."""
        nobody, accepted = len(self._slots), ids.clamp(min=0)
        self.last_sampled.index_copy_(0, torch.where(is_last, slots, nobody), accepted)
        if self._counts is not None:
            self._counts.index_put_((slots, accepted), (ids >= 0).int(), accumulate=True)

    def draws(self, rows: Sequence[Row], slots: torch.Tensor, positions: torch.Tensor) -> SamplingTensors:
        """As `tensors`, without what depends on the text so far: penalties, biases, grammars."""
        features = 0
        for row in rows:
            features |= self._slots[row.slot].features
        return self._draws(features, self._floats.index_select(1, slots).unbind(0), slots, positions)

    def _load_history(self, admission: Admission) -> None:
        if self._counts is None or self._prompt_mask is None:
            shape = (len(self._slots), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        prompt_len = admission.request.prompt_len
        output = np.asarray(admission.tokens[prompt_len:], dtype=np.int64)
        counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        self._counts[admission.slot].copy_(torch.from_numpy(counts))
        self._prompt_mask[admission.slot].zero_()[self._tensor(admission.tokens[:prompt_len])] = True

    def _draws(
        self, features: int, columns: Sequence[torch.Tensor], slots: torch.Tensor, positions: torch.Tensor
    ) -> SamplingTensors:
        if not features & _Feature.RANDOM:
            return SamplingTensors()  # then no filter is asked for either
        temperature, top_p, min_p, *_ = columns
        seeds, top_k = self._integers.index_select(1, slots).unbind(0)
        return SamplingTensors(
            temperature=temperature,
            seeds=seeds,
            positions=positions,
            top_k=top_k.int() if features & _Feature.TOP_K else None,
            top_p=top_p if features & _Feature.TOP_P else None,
            min_p=min_p if features & _Feature.MIN_P else None,
        )

    def _penalties(self, features: int, columns: Sequence[torch.Tensor], slots: torch.Tensor) -> Penalties:
        assert self._counts is not None and self._prompt_mask is not None
        _, _, _, repetition, presence, frequency = columns
        repeats = bool(features & _Feature.REPETITION)
        return Penalties(
            output_counts=self._counts.index_select(0, slots),
            prompt_mask=self._prompt_mask.index_select(0, slots) if repeats else None,
            repetition=repetition if repeats else None,
            presence=presence if features & _Feature.PRESENCE else None,
            frequency=frequency if features & _Feature.FREQUENCY else None,
        )

    def _bias(self, rows: Sequence[Row], states: Sequence[_Slot]) -> LogitBias | None:
        triplets: list[tuple[int, int, float]] = []
        for index, (row, state) in enumerate(zip(rows, states, strict=True)):
            triplets += [(index, token, value) for token, value in state.bias.items()]
            if row.end < state.min_position:
                triplets += [(index, token, float("-inf")) for token in state.banned_ids]
        if not triplets:
            return None
        indices, ids, values = zip(*triplets, strict=True)
        return LogitBias(self._tensor(indices), self._tensor(ids), self._to_device(torch.tensor(values)))

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.int64))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":  # pinned, so that the copy does not wait for what the device still has to do
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def _is_plain(slot: _Slot, position: int) -> bool:
    return not slot.features and not slot.bias and slot.num_logprobs is None and position >= slot.min_position


def _host_state(admission: Admission, eos_ids: tuple[int, ...]) -> _Slot:
    params = admission.request.sampling
    return _Slot(
        features=_features(params),
        bias=params.logit_bias,
        banned_ids=params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_ids),
        min_position=admission.request.prompt_len + params.min_tokens,
        num_logprobs=params.logprobs,
    )


def _features(params: SamplingParams) -> int:
    used = {
        _Feature.REPETITION: params.repetition_penalty != 1.0,
        _Feature.PRESENCE: params.presence_penalty != 0.0,
        _Feature.FREQUENCY: params.frequency_penalty != 0.0,
    }
    if params.temperature > 0:  # a greedy row's choice survives every filter
        used |= {
            _Feature.RANDOM: True,
            _Feature.TOP_K: params.top_k > 0,
            _Feature.TOP_P: params.top_p < 1.0,
            _Feature.MIN_P: params.min_p > 0.0,
        }
    return sum(int(feature) for feature, is_used in used.items() if is_used)


def _signed64(seed: int) -> int:
    """The same 64 bits, as torch's int64 takes them."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
