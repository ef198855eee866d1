"""A prompt's KV from a prefill worker to a decode worker: the protocol's course, with times and without failures.

D asks P; D reserves its blocks when P begins; each finished chunk travels while the next one computes; D adopts the
blocks when the last has landed. What leases, quarantines and lost peers change is left out.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.actors.engine.engine import Engine
from baton.actors.engine.errors import EngineError
from baton.actors.engine.request import Request
from baton.actors.engine.updates import Update
from baton.cluster.sim.clock import EventLoop
from baton.cluster.sim.worker import OUTPUT_TOKEN, Profile, SimWorker


class Handover:
    """`start` once, on the decode worker's side. `on_first_token(cached_tokens)` is called when D hears of P's end."""

    def __init__(
        self,
        request: Request,
        prefill: SimWorker,
        decode: SimWorker,
        profile: Profile,
        loop: EventLoop,
        on_first_token: Callable[[int], None],
    ) -> None:
        self._request = request
        self._prefill = prefill
        self._decode = decode
        self._profile = profile
        self._loop = loop
        self._on_first_token = on_first_token
        self._num_sent = 0  # blocks of the prompt that D has, or that are on their way
        self._num_blocks = 0  # of the prompt
        self._num_ready = 0  # whose KV is complete on P
        self._landed_at = 0.0
        self._has_place = self._is_prefilled = False

    def start(self) -> None:
        self._decode.post(self._open)

    def _open(self, engine: Engine) -> None:
        try:
            opened = engine.open_import(self._request)
        except EngineError:
            engine.submit(self._request)  # which says what is wrong, as an update
            return
        if opened.num_blocks - opened.skip_blocks <= 1:
            engine.abandon_import(self._request.id, quarantine=False)
            engine.submit(self._request)
            return
        self._decode.num_importing += 1
        self._num_sent, self._num_blocks = opened.skip_blocks, opened.num_blocks
        self._loop.after(self._profile.hop_s, self._ask)

    def _ask(self) -> None:
        self._prefill.on_update[self._request.id] = self._on_progress
        self._prefill.post(lambda engine: engine.submit(self._request, export=True))

    def _on_progress(self, update: Update) -> None:
        """Hear of P's first chunk being scheduled, of each finished chunk, and of the first token."""
        if update.num_computed <= update.cached_tokens and update.finish is None:
            self._loop.after(self._profile.hop_s, lambda: self._decode.post(self._reserve))
        if update.finish is not None:
            self._is_prefilled = True
            self._num_ready = self._num_blocks
            del self._prefill.on_update[self._request.id]
            self._loop.after(self._profile.hop_s, lambda: self._on_first_token(update.cached_tokens))
        else:
            self._num_ready = update.num_computed // self._prefill.info.block_size
        self._send()

    def _reserve(self, engine: Engine) -> None:
        id = self._request.id
        if engine.reserve_import(id) is None:
            self._decode.on_step[id] = lambda: self._decode.post(self._reserve)
            return
        self._decode.on_step.pop(id, None)
        self._loop.after(self._profile.hop_s, self._on_placed)

    def _on_placed(self) -> None:
        self._has_place = True
        self._send()

    def _send(self) -> None:
        """Write what is ready and has a place; P's link takes one write after the other."""
        if not self._has_place:
            return
        num_new = self._num_ready - self._num_sent
        if num_new > 0:
            num_bytes = num_new * self._prefill.info.block_size * self._profile.kv_bytes_per_token
            starts_at = max(self._loop.now, self._prefill.link_free_at)
            self._prefill.link_free_at = self._landed_at = starts_at + num_bytes / self._profile.link_bytes_s
            self._num_sent = self._num_ready
        if self._is_prefilled:
            self._loop.at(max(self._landed_at, self._loop.now) + self._profile.hop_s, self._land)

    def _land(self) -> None:
        id = self._request.id
        self._decode.num_importing -= 1
        self._decode.post(lambda engine: engine.adopt_import(id, (OUTPUT_TOKEN,)))
        self._prefill.post(lambda engine: engine.release(id))
