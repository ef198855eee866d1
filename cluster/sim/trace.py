"""Request traces as arrivals: Mooncake's JSON lines with prefix blocks, Azure's CSV without.

An arrival names its prompt by content ids, one per `ID_TOKENS` tokens: equal ids up to a place mean equal prompts.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TextIO, cast

import msgspec
import numpy as np

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.cluster.errors import ClusterError

ID_TOKENS = 512  # that one of Mooncake's hash ids stands for


class TraceError(ClusterError):
    """A trace file that cannot be read: which line, and what it should hold."""


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float  # from the first arrival on
    prompt_len: int
    output_len: int
    ids: tuple[int, ...]  # of the prompt's blocks of ID_TOKENS tokens; the last may be partial

    def tokens(self) -> tuple[int, ...]:
        """Make up token ids: equal blocks get equal ones, different blocks differ in every token."""
        tokens: list[int] = []
        for id in self.ids:
            tokens += [1 + id] * ID_TOKENS  # a copy in C, as nearly all of a prompt's cost should be
        del tokens[self.prompt_len :]
        return tuple(tokens)

    def hashes(self, block_size: int) -> list[BlockHash]:
        """Hash the full blocks of `tokens()` without making them."""
        tokens = np.repeat(np.array(self.ids, dtype="<i4") + 1, ID_TOKENS)[: self.prompt_len]
        return block_hashes(cast("Sequence[int]", tokens), block_size, root_hash())


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace by its suffix: .jsonl as Mooncake's, .csv as Azure's, either also with .gz."""
    suffix = "".join(path.suffixes).removesuffix(".gz")
    reader = next((reader for end, reader in READERS.items() if suffix.endswith(end)), None)
    if reader is None:
        raise TraceError(f"{path}: the name must end in one of {', '.join(READERS)}, or that and .gz")
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            arrivals = reader(file)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not arrivals:
        raise TraceError(f"{path}: holds no request")
    return arrivals


def spread(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Space requests that share a timestamp evenly up to the next timestamp: Mooncake's clock ticks every 3 s."""
    starts = [i for i, arrival in enumerate(arrivals) if i == 0 or arrival.time_s != arrivals[i - 1].time_s]
    spaced: list[Arrival] = []
    for start, end in zip(starts, [*starts[1:], len(arrivals)], strict=True):
        first = arrivals[start].time_s
        until = arrivals[end].time_s if end < len(arrivals) else first
        gap = (until - first) / (end - start)
        spaced += [replace(arrival, time_s=first + gap * i) for i, arrival in enumerate(arrivals[start:end])]
    return spaced


def scaled(arrivals: Iterable[Arrival], speed: float) -> list[Arrival]:
    """Play the trace `speed` times as fast."""
    return [replace(arrival, time_s=arrival.time_s / speed) for arrival in arrivals]


def repeated(arrivals: Sequence[Arrival], num_requests: int) -> list[Arrival]:
    """Go on with copies of the trace, of other content, until there are `num_requests`."""
    span_s = arrivals[-1].time_s * (1 + 1 / max(len(arrivals) - 1, 1))
    num_ids = 1 + max(max(arrival.ids) for arrival in arrivals)
    copies: list[Arrival] = []
    for i in range(num_requests):
        round, arrival = divmod(i, len(arrivals))
        base = arrivals[arrival]
        ids = base.ids if round == 0 else tuple(id and id + round * num_ids for id in base.ids)
        copies.append(replace(base, time_s=base.time_s + round * span_s, ids=ids))
    return copies


def ideal_hit_rate(arrivals: Iterable[Arrival], block_size: int) -> float:
    """Compute the share of prompt tokens that one endless cache, filled at each arrival, would hold.

    Whole blocks count, and at least a prompt's last token is always computed.
    """
    seen: set[int] = set()
    hit = total = 0
    for arrival in arrivals:
        known = next((i for i, id in enumerate(arrival.ids) if id not in seen), len(arrival.ids)) * ID_TOKENS
        hit += min(known, arrival.prompt_len - 1) // block_size * block_size
        total += arrival.prompt_len
        seen.update(arrival.ids)
    return hit / total


def _read_mooncake(file: TextIO) -> list[Arrival]:
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    arrivals: list[Arrival] = []
    for number, line in enumerate(file, 1):
        try:
            row = decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from error
        if len(row.hash_ids) != -(-row.input_length // ID_TOKENS) or row.output_length < 1:
            raise ValueError(f"line {number}: needs output_length >= 1 and one hash_id per {ID_TOKENS} of input_length")
        arrivals.append(Arrival(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids))
    return arrivals


def _read_azure(file: TextIO) -> list[Arrival]:
    """Give every prompt content of its own: the trace knows no prefixes."""
    arrivals: list[Arrival] = []
    start: datetime | None = None
    next_id = 1
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])  # it has seven decimals
            prompt_len = max(int(row["ContextTokens"]), 1)
            output_len = max(int(row["GeneratedTokens"]), 1)
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"line {number}: needs TIMESTAMP, ContextTokens, GeneratedTokens ({error})") from error
        start = start or time
        num_ids = -(-prompt_len // ID_TOKENS)
        ids = tuple(range(next_id, next_id + num_ids))
        next_id += num_ids
        arrivals.append(Arrival((time - start).total_seconds(), prompt_len, output_len, ids))
    return arrivals


READERS = {".jsonl": _read_mooncake, ".csv": _read_azure}
