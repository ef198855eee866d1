"""Whether a request could be served now: a connected worker that is idle must give a token to be believed.

A busy worker needs no probe: one whose engine hangs closes its streams by itself.
"""

from __future__ import annotations

import asyncio
import uuid

from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Submit
from baton.router.membership import Membership
from baton.router.worker_stream import StreamLost, WorkerStream


class Health:
    """A probe's good word holds for `fresh_s`, so that frequent checks cost the workers nothing."""

    def __init__(self, membership: Membership, *, fresh_s: float = 2.0, timeout_s: float = 5.0) -> None:
        self._membership = membership
        self._fresh_s = fresh_s
        self._timeout_s = timeout_s
        self._proven_at: dict[str, float] = {}  # by incarnation
        self._probes: dict[str, asyncio.Task[bool]] = {}

    async def why_unusable(self) -> str | None:
        """Say why no request can be served now; None if one can."""
        decoders = self._membership.decoders()
        if not decoders:
            return self._membership.why_unusable()
        self._forget_the_gone()
        for check in asyncio.as_completed([self._makes_progress(stream) for stream in decoders]):
            if await check:
                return None
        return f"none of the {len(decoders)} connected decode workers gave a token within {self._timeout_s:g} s"

    async def _makes_progress(self, stream: WorkerStream) -> bool:
        now = asyncio.get_running_loop().time()
        if stream.num_requests or now - self._proven_at.get(stream.incarnation, -self._fresh_s) < self._fresh_s:
            return True
        probe = self._probes.get(stream.incarnation)
        if probe is None:
            probe = self._probes[stream.incarnation] = asyncio.create_task(self._probe(stream))
            probe.add_done_callback(lambda _: self._probes.pop(stream.incarnation))
        return await asyncio.shield(probe)

    async def _probe(self, stream: WorkerStream) -> bool:
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        request = Request(id=f"probe-{uuid.uuid4().hex}", tokens=(0,), sampling=sampling, deadline_s=self._timeout_s)
        try:
            mailbox = stream.submit(Submit(request))
            async with asyncio.timeout(self._timeout_s):
                output = await mailbox.get()
        except (StreamLost, TimeoutError):
            return False
        finally:
            stream.end(request.id)
        if isinstance(output, Exception) or output.finish == "error":
            return False
        self._proven_at[stream.incarnation] = asyncio.get_running_loop().time()
        return True

    def _forget_the_gone(self) -> None:
        present = {stream.incarnation for stream in self._membership.decoders()}
        self._proven_at = {life: at for life, at in self._proven_at.items() if life in present}
