"""A request that a worker answers, with all that would still act for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.actors.gateway_session import GatewaySession
from baton.actors.generation import Generation


@dataclass(slots=True)
class Live:
    generation: Generation
    session: GatewaySession
    fetch: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Let go of what would still act for the request."""
        self.session.request_ids.discard(self.generation.request_id)
        if self.fetch is not None:
            self.fetch.cancel()
        if self.deadline is not None:
            self.deadline.cancel()
