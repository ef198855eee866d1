from __future__ import annotations

from baton.actors.engine.block import Block
from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.prefix_cache import CacheEvents, Match, NoCache, PrefixCache


def chain(num_blocks: int, salt: str = "") -> list[BlockHash]:
    return block_hashes(range(4 * num_blocks), 4, root_hash(salt))


def fill(cache: PrefixCache, hashes: list[BlockHash], num_held: int = 0) -> list[Block]:
    blocks = [Block(id, num_refs=int(id < num_held)) for id in range(len(hashes))]
    for hash, block in zip(hashes, blocks, strict=True):
        assert cache.insert(hash, block) is block
    return blocks


def test_a_match_is_the_longest_prefix_present_and_tells_how_much_of_it_nobody_holds() -> None:
    cache, hashes = PrefixCache(), chain(8)
    blocks = fill(cache, hashes[:5], num_held=2)
    assert cache.match(hashes, 8) == Match(num_blocks=5, num_unheld=3)
    assert cache.match(hashes, 3) == Match(num_blocks=3, num_unheld=1)
    assert cache.match(chain(8, "other"), 8) == Match(0, 0)
    assert cache.path(hashes, 5) == blocks


def test_equal_tokens_under_another_salt_do_not_match() -> None:
    cache = PrefixCache()
    fill(cache, chain(3, "alice"))
    assert cache.match(chain(3, "bob"), 3).num_blocks == 0
    assert cache.match(chain(3, "alice"), 3).num_blocks == 3


def test_the_second_block_with_a_hash_is_answered_by_the_first() -> None:
    cache, [hash] = PrefixCache(), chain(1)
    [first] = fill(cache, [hash])
    second = Block(7)
    assert cache.insert(hash, second) is first
    assert second.hash is None


def test_events_tell_the_net_change_since_the_last_take() -> None:
    cache, hashes = PrefixCache(), chain(3)
    blocks = fill(cache, hashes)
    assert cache.take_events() == CacheEvents(stored=hashes, removed=[])
    cache.forget(blocks[2])
    cache.forget(blocks[1])
    cache.insert(hashes[1], Block(9))  # removed and stored again: no news
    assert cache.take_events() == CacheEvents(stored=[], removed=[hashes[2]])
    cache.insert(hashes[2], block := Block(8))
    cache.forget(block)  # stored and removed again: no news either
    assert cache.take_events() == CacheEvents([], [])
    assert cache.snapshot() == hashes[:2]


def test_no_cache_finds_nothing_and_leaves_blocks_without_a_hash() -> None:
    cache, hashes = NoCache(), chain(2)
    blocks = fill(cache, hashes)
    assert cache.match(hashes, 2) == Match(0, 0)
    assert [block.hash for block in blocks] == [None, None]
    assert cache.take_events() == CacheEvents([], [])
