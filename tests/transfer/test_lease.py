"""Leases: renewal by group, and a sweep that trusts no order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.transfer.lease import LeaseTable


def test_a_sweep_finds_every_lease_that_is_over_whatever_the_order() -> None:
    table: LeaseTable[str, str] = LeaseTable(10.0)
    table.grant("renewed", "busy", 0.0)
    table.grant("forgotten", "silent", 1.0)
    table.renew("busy", 5.0)
    assert table.sweep(11.0) == ["forgotten"]
    assert table.sweep(14.9) == []
    assert table.sweep(15.0) == ["renewed"]
    assert len(table) == 0 and table.groups() == []


def test_ending_a_lease_twice_is_harmless_and_leaves_its_group() -> None:
    table: LeaseTable[str, str] = LeaseTable(10.0)
    table.grant("a", "g", 0.0)
    table.grant("b", "g", 0.0)
    table.end("a")
    table.end("a")
    assert table.groups() == ["g"]
    assert table.sweep(10.0) == ["b"]


@given(st.lists(st.tuples(st.sampled_from(["grant", "renew", "end", "sweep"]), st.integers(0, 5), st.integers(0, 9))))
def test_the_table_agrees_with_a_plain_dictionary(steps: list[tuple[str, int, int]]) -> None:
    table: LeaseTable[int, int] = LeaseTable(10.0)
    ends: dict[int, float] = {}
    now = 0.0
    for verb, key, wait in steps:
        now += wait
        if verb == "grant" and key not in ends:
            table.grant(key, key % 2, now)
            ends[key] = now + 10.0
        elif verb == "renew":
            table.renew(key % 2, now)
            ends = {k: now + 10.0 if k % 2 == key % 2 else end for k, end in ends.items()}
        elif verb == "end":
            table.end(key)
            ends.pop(key, None)
        elif verb == "sweep":
            over = {k for k, end in ends.items() if end <= now}
            assert set(table.sweep(now)) == over
            ends = {k: end for k, end in ends.items() if k not in over}
        assert len(table) == len(ends)
        assert set(table.groups()) == {k % 2 for k in ends}
