"""A slow link between GPUs is reported once, and only when it is not the start or a small write that was slow."""

from __future__ import annotations

from baton.transfer.mover import Completion, Incarnation
from baton.transfer.slow_link import NUM_SLOW, SlowLinks

MIB = 2**20


def write(num_bytes: int, gb_per_s: float, peer: str = "d1") -> Completion:
    return Completion(1, Incarnation(peer), b"", num_bytes, num_bytes / gb_per_s / 1e9, None)


def test_a_slow_link_is_told_once_for_each_peer() -> None:
    links = SlowLinks(is_gpu=True)
    told = [links.note(write(64 * MIB, 2.0)) for _ in range(3 * NUM_SLOW)]
    assert [text is not None for text in told] == [number == NUM_SLOW - 1 for number in range(3 * NUM_SLOW)]
    assert "KV goes to d1 at 2.0 GB/s" in str(told[NUM_SLOW - 1])
    assert any(links.note(write(64 * MIB, 2.0, "d2")) for _ in range(NUM_SLOW))


def test_a_single_slow_write_a_small_one_and_host_memory_are_no_news() -> None:
    links, host = SlowLinks(is_gpu=True), SlowLinks(is_gpu=False)
    for _ in range(NUM_SLOW):
        assert links.note(write(64 * MIB, 0.1)) is None
        assert links.note(write(64 * MIB, 150.0)) is None
        assert links.note(write(MIB, 0.1)) is None
        assert host.note(write(64 * MIB, 0.1)) is None
