"""Leases with an injected clock. A lease belongs to a group (a stream's peer) and any sign of life renews the group.

Renewal breaks every order of expiry, so a sweep looks at all leases.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Group = TypeVar("Group", bound=Hashable)


class LeaseTable(Generic[Key, Group]):
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._ends: dict[Key, float] = {}
        self._groups: dict[Group, set[Key]] = {}
        self._group_of: dict[Key, Group] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def groups(self) -> list[Group]:
        return list(self._groups)

    def grant(self, key: Key, group: Group, now: float) -> None:
        self._ends[key] = now + self._lease_s
        self._group_of[key] = group
        self._groups.setdefault(group, set()).add(key)

    def renew(self, group: Group, now: float) -> None:
        for key in self._groups.get(group, ()):
            self._ends[key] = now + self._lease_s

    def end(self, key: Key) -> None:
        """End a lease early; fine when there is none."""
        if self._ends.pop(key, None) is None:
            return
        group = self._group_of.pop(key)
        self._groups[group].discard(key)
        if not self._groups[group]:
            del self._groups[group]

    def sweep(self, now: float) -> list[Key]:
        """End and return every lease whose time is over."""
        over = [key for key, end in self._ends.items() if end <= now]
        for key in over:
            self.end(key)
        return over
