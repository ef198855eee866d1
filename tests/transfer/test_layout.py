"""Layouts and settings: what is refused, and whether the refusal names the field and both values."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import ValidationError

from baton.transfer.config import TransferConfig
from baton.transfer.layout import LayoutMismatch, check_layout
from baton.transfer.wire import KVLayout, WriteTag, decode_tag, encode_tag

LAYOUT = KVLayout(
    model="m",
    weights_version="1",
    dtype="bfloat16",
    block_size=16,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    attention_scale=0.125,
    rope="theta=10000",
)


@pytest.mark.parametrize("field", KVLayout.__struct_fields__)
def test_a_difference_in_any_field_is_refused_by_name_with_both_values(field: str) -> None:
    ours = msgspec.structs.replace(LAYOUT, tensor_parallel=2)
    value = getattr(ours, field)
    changed = value * 1.5 if isinstance(value, float) else value + 1 if isinstance(value, int) else value + "x"
    with pytest.raises(LayoutMismatch) as caught:
        check_layout(ours, msgspec.structs.replace(ours, **{field: changed}))
    assert [tuple(d) for d in caught.value.differences] == [(field, value, changed)]
    assert f"{field}: ours is {value!r}, the peer's is {changed!r}" in str(caught.value)


def test_equal_layouts_pass() -> None:
    check_layout(LAYOUT, msgspec.structs.replace(LAYOUT))


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_a_writer_may_recut_tokens_and_heads_of_which_one_divides_the_other(
    block_size: int, tensor_parallel: int
) -> None:
    ours = msgspec.structs.replace(LAYOUT, tensor_parallel=4)
    check_layout(ours, msgspec.structs.replace(ours, block_size=block_size, tensor_parallel=tensor_parallel))


def test_blocks_that_cannot_be_recut_are_refused_with_both_sizes() -> None:
    with pytest.raises(LayoutMismatch, match="block_size: ours is 16, the peer's is 24"):
        check_layout(LAYOUT, msgspec.structs.replace(LAYOUT, block_size=24))
    with pytest.raises(LayoutMismatch, match=r"in dtype: ours is 'bfloat16', the peer's is 'int8'\. Start"):
        check_layout(LAYOUT, msgspec.structs.replace(LAYOUT, block_size=32, dtype="int8"))


def test_a_tag_is_canonical() -> None:
    tag = WriteTag("r1", 3, 4)
    assert encode_tag(tag) == encode_tag(decode_tag(encode_tag(tag))) == msgspec.msgpack.encode(["r1", 3, 4])


@pytest.mark.parametrize("field", ["lease_s", "stall_s"])
def test_a_bound_that_a_lost_beat_would_break_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field} = 2.0 must be at least 3 \* beat_s"):
        TransferConfig.model_validate({field: 2.0})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="leese_s"):
        TransferConfig.model_validate({"leese_s": 20.0})
