"""What a rank reads is what rank 0 ran, though only news is sent. (test_engine_random sends every kind of batch.)"""

from __future__ import annotations

import msgspec

from baton.actors.engine.batch import Admission, Batch, Row
from baton.actors.engine.batch_wire import BatchDecoder, BatchEncoder
from baton.actors.engine.request import Request, SamplingParams

SAMPLING = SamplingParams(max_tokens=9, seed=2**64 - 1, logit_bias={3: -1.5}, stop_token_ids=(7,), logprobs=2)
REQUEST = Request(id="r", tokens=tuple(range(40)), sampling=SAMPLING, num_output=3, cache_salt="s")


def send(batches: list[Batch]) -> list[Batch]:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    return [decoder.decode(encoder.encode(batch)) for batch in batches]


def test_a_batch_arrives_whole() -> None:
    rows = (Row(1, 39, 1, (), [4, 9, 2], True), Row(0, 0, 16, tuple(range(16)), [5], False))
    batch = Batch(rows, (Admission(0, REQUEST, REQUEST.tokens), Admission(1, REQUEST, (1, 2))))
    [arrived] = send([batch])
    assert msgspec.json.encode(arrived) == msgspec.json.encode(batch)
    assert arrived.admissions[0].request == REQUEST


def test_a_table_that_grows_is_followed_and_a_new_tenant_starts_afresh() -> None:
    table = [3, 1]
    admission = (Admission(0, REQUEST, REQUEST.tokens),)
    first = Row(0, 0, 16, (), table, True)
    encoder, decoder = BatchEncoder(), BatchDecoder()
    decoder.decode(encoder.encode(Batch((first,), admission)))
    table += [8, 0]
    [grown] = decoder.decode(encoder.encode(Batch((first,)))).rows
    assert grown.blocks == [3, 1, 8, 0]
    [other] = decoder.decode(encoder.encode(Batch((Row(0, 0, 1, (), [6], True),), admission))).rows
    assert other.blocks == [6]
    assert grown.blocks == [3, 1, 8, 0], "rows in flight keep their table"


def test_a_step_with_no_new_blocks_costs_a_few_bytes_a_row() -> None:
    encoder = BatchEncoder()
    admissions = tuple(Admission(slot, REQUEST, ()) for slot in range(256))
    rows = tuple(Row(slot, 8191, 1, (), list(range(512)), True) for slot in range(256))
    encoder.encode(Batch(rows, admissions))
    assert len(encoder.encode(Batch(rows))) < 256 * 12
