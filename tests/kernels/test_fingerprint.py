from __future__ import annotations

import pytest
import torch

from baton.kernels.fingerprint import FACTOR, STEP, fingerprint_blocks, fingerprint_reference
from baton.kernels.fingerprint_triton import fingerprint_triton

BLOCKS = torch.tensor([4, 0, 2])


def rows(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (6, num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def by_hand(words: list[int]) -> int:
    total = 0
    for place, word in enumerate(words):
        word = signed(word + STEP * place)
        word = signed((word ^ (word >> 32)) * FACTOR)
        total += word ^ (word >> 29)
    return signed(total)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("num_bytes", [8, 64, 1000])
def test_the_sum_is_what_the_definition_says(num_bytes: int) -> None:
    kv = rows(num_bytes)
    expected = [by_hand(kv[block].view(torch.int64).tolist()) for block in BLOCKS]
    assert fingerprint_blocks(kv, BLOCKS).tolist() == expected


def test_any_changed_byte_and_any_two_swapped_words_change_it() -> None:
    kv = rows(256)
    [before] = fingerprint_blocks(kv, torch.tensor([1])).tolist()
    seen = {before}
    for place in range(256):
        changed = kv.clone()
        changed[1, place] += 1
        seen.add(int(fingerprint_blocks(changed, torch.tensor([1]))))
    for place in range(31):
        swapped = kv.clone().view(torch.int64)
        swapped[1, [place, place + 1]] = swapped[1, [place + 1, place]]
        seen.add(int(fingerprint_reference(swapped, torch.tensor([1]))))
    assert len(seen) == 1 + 256 + 31
    assert before == int(fingerprint_blocks(torch.roll(kv, 2, 0), torch.tensor([3]))), "where a block lies counts"


def test_the_reference_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint_blocks(rows(1000), BLOCKS)
    monkeypatch.setattr("baton.kernels.fingerprint._WORDS_AT_ONCE", 21)
    assert torch.equal(fingerprint_blocks(rows(1000), BLOCKS), whole)


def test_bytes_that_make_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes = 12 must be divisible by 8"):
        fingerprint_blocks(rows(12), BLOCKS)


@pytest.mark.parametrize("num_bytes", [8, 1000, 70_000])
def test_triton_equals_the_reference(num_bytes: int, device: torch.device) -> None:
    words = rows(num_bytes).to(device).view(torch.int64)
    blocks = BLOCKS.to(device)
    assert torch.equal(fingerprint_triton(words, blocks), fingerprint_reference(words, blocks))
