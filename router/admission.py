"""Who may wait at this gateway, and who goes next: the queue in front of the workers.

Requests are held back here while the workers have enough to do, because here their order can still be decided.
What cannot be served in time is refused before any prefill is spent on it. Synchronous but for `Place.wait`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.router.errors import Overloaded, RouterError
from baton.router.fair_queue import FairQueue

MAX_RETRY_AFTER_S = 60
PACE_S = 10.0  # how far back the measured pace looks
NOTE_S = 0.1  # between two measurements
MARGIN = 0.6  # share of its time that a request may be expected to wait: a refusal should come at once, not late
MIN_MEASURED_S = 0.5  # of backlog, before the pace says anything
SMOOTHING = 0.1  # weight of the newest request in averages over requests
CAUTION_S = 60.0  # for how long refusals that came late make others come early
MAX_CAUTION = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_requests: int = 1024  # sequences without a first token
    max_tokens: int = 2_000_000  # their prompt tokens
    max_wait_s: float = 30.0  # in the queue


class Admission:
    """`has_room` says if workers should get a prompt of so many tokens now; call `pump` when that may change.

    `has_seat` says if any of them could run one more sequence.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        has_room: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
        has_seat: Callable[[], bool] = lambda: True,
    ) -> None:
        self._limits = limits
        self._has_room = has_room
        self._has_seat = has_seat
        self._clock = clock
        self._queue = FairQueue()
        self._pace = _Pace()
        self._turnover = _Turnover()
        self._caution = _Caution()
        self._service_s = 0.0  # from a request's turn to its first token, on average
        self._released: Place | None = None  # its request is not charged to a worker yet, so `has_room` is stale
        self.num_requests = 0
        self.num_tokens = 0

    @property
    def num_queued(self) -> int:
        """Sequences that no worker knows of yet."""
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        return self._queue.num_tokens

    def enter(
        self, prompt_lens: Sequence[int], *, key: str = "", priority: int = 0, deadline_s: float | None = None
    ) -> list[Place]:
        """Take a place for each sequence of one call, all or none. An idle gateway takes any one call.

        `key` shares fairly with other keys; lower `priority` goes first; `deadline_s` is for the first token.
        Raises Overloaded when they do not fit, or would not be served in time.
        """
        limits, num_tokens = self._limits, sum(prompt_lens)
        if self.num_requests and self.num_requests + len(prompt_lens) > limits.max_requests:
            raise self._refusal(f"{self.num_requests} requests are waiting, the limit is {limits.max_requests}")
        if self.num_requests and self.num_tokens + num_tokens > limits.max_tokens:
            raise self._refusal(f"{self.num_tokens} prompt tokens are waiting, the limit is {limits.max_tokens}")
        bound_s = limits.max_wait_s if deadline_s is None else min(limits.max_wait_s, deadline_s)
        is_open = self._is_open(num_tokens)
        if not is_open:  # whoever need not wait may try: estimates grow old
            if deadline_s is not None:
                service_s = max(self._service_s, self._pace.seconds(num_tokens))
                bound_s = max(min(bound_s, deadline_s - service_s), 0.0)
            wait_s = self.expected_wait_s(num_tokens, key, priority)
            if wait_s > MARGIN * bound_s:
                limit_s = f"{MARGIN * bound_s:.1f}"
                raise self._refusal(f"a wait of {wait_s:.1f} s is expected, more than {limit_s} s is too long")
        latest = self._clock() + bound_s
        places = [Place(self, prompt_len, key, priority, latest) for prompt_len in prompt_lens]
        for place in places:
            self.num_requests += 1
            self.num_tokens += place.num_tokens
            self._queue.push(place)
        self.pump(is_open=is_open)
        return places

    def expected_wait_s(self, num_tokens: int, key: str = "", priority: int = 0) -> float:
        """Estimate how long a request would wait here that came now; 0 while there is nothing to go by."""
        ahead = self._queue.tokens_ahead(num_tokens, key, priority) if self._queue else 0
        wait_s = self._pace.seconds(ahead)
        if not self._has_seat():
            num_ahead = ahead * len(self._queue) / self._queue.num_tokens if ahead else 0
            wait_s = max(wait_s, self._turnover.seconds(num_ahead + 1))
        return wait_s * self._caution.factor(self._clock())

    def pump(self, *, is_open: bool = False) -> None:
        """Release whose turn it is, if the workers have room. One at a time: the next when that one is charged.

        `is_open`: they are known to have room for the first.
        """
        now = self._clock()
        while self._released is None and (place := self._queue.head()) is not None:
            assert isinstance(place, Place)
            if not (is_open or self._has_room(place.num_tokens)):
                break
            if now > place.latest:
                self._queue.remove(place)
                place.settle(self.too_late())
                continue
            self._queue.take(place)
            self._released = place  # which ends the loop
            place.released_at = now
            self._turnover.num_running += 1
            place.settle(None)
        if not self._queue:
            self._pause()

    def wants_progress(self) -> bool:
        """Whether it is time for `note_progress`: while somebody waits, a few times a second."""
        return bool(self._queue) and self._pace.is_due(self._clock())

    def note_progress(self, outstanding: int) -> None:
        """Learn how many prompt tokens the workers have yet to compute."""
        self._pace.note(outstanding, self._clock())
        self._turnover.note(self._has_seat(), self._clock())

    def refuse_all(self, error: RouterError) -> None:
        """Nobody can serve what waits."""
        while (place := self._queue.head()) is not None:
            assert isinstance(place, Place)
            self._queue.remove(place)
            place.settle(error)
        self._pause()

    def too_late(self) -> Overloaded:
        if self._turnover.num_running:  # it was others who kept it waiting
            self._caution.add(self._clock())
        return self._refusal("the request waited too long for its turn")

    def note_end(self, place: Place, num_output: int) -> None:
        """A request has ended: its seat is free, and what it generated counts towards its key's share."""
        self._queue.charge(place.key, num_output)
        self._note_idle(place)

    def now(self) -> float:
        return self._clock()

    # For places only.

    def on_charged(self, place: Place, num_uncached: int) -> None:
        self._pace.charge(num_uncached, place.num_tokens)
        self._next_after(place)

    def on_left(self, place: Place, *, has_output: bool) -> None:
        now = self._clock()
        self.num_requests -= 1
        self.num_tokens -= place.num_tokens
        if place.is_waiting:
            self._queue.remove(place)
        if not has_output:
            self._note_idle(place)
        else:
            self._service_s += SMOOTHING * (now - place.released_at - self._service_s)
        self._next_after(place)
        self.pump()

    def _next_after(self, place: Place) -> None:
        if self._released is place:
            self._released = None
            self.pump()

    def _note_idle(self, place: Place) -> None:
        """A released request runs no more. Idempotent."""
        if place.is_released and not place.has_ended:
            place.has_ended = True
            self._turnover.end(self._clock() - place.released_at)

    def _pause(self) -> None:
        """Nobody waits: what follows says nothing of what the workers could do."""
        self._pace.pause()
        self._turnover.pause()

    def _is_open(self, num_tokens: int) -> bool:
        return not self._queue and self._released is None and self._has_room(num_tokens)

    def _refusal(self, reason: str) -> Overloaded:
        wait_s = self._pace.seconds(self.num_tokens)
        retry_after_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
        return Overloaded(f"{reason}: try again in {retry_after_s} s", retry_after_s=retry_after_s)


class Place:
    """One sequence's place: it waits for its turn, is charged to workers, and leaves with its first token."""

    def __init__(self, admission: Admission, num_tokens: int, key: str, priority: int, latest: float) -> None:
        self._admission = admission
        self.num_tokens = num_tokens
        self.key = key
        self.priority = priority
        self.latest = latest  # on the admission's clock: released after it, the request would be too late
        self.since = admission.now()  # what its trace counts the wait from
        self.is_waiting = False
        self.is_released = False
        self.released_at = 0.0
        self.has_ended = False
        self._has_left = False
        self.refusal: RouterError | None = None
        self._listener: Callable[[], None] | None = None

    async def wait(self) -> None:
        """Return when it is this sequence's turn. Raises Overloaded or NoWorkers when that will not come."""
        if self.is_waiting:
            settled = asyncio.Event()
            self.listen(settled.set)
            try:
                async with asyncio.timeout(max(self.latest - self._admission.now(), 0.0)):
                    await settled.wait()
            except TimeoutError:
                raise self._admission.too_late() from None
        if self.refusal is not None:
            raise self.refusal

    def listen(self, on_settled: Callable[[], None]) -> None:
        """Call `on_settled` when admission has spoken; at once if it has."""
        self._listener = on_settled
        if not self.is_waiting:
            on_settled()

    def settle(self, refusal: RouterError | None) -> None:
        """Admission's word: go, or why not."""
        self.is_released = refusal is None
        self.refusal = refusal
        if self._listener is not None:
            self._listener()

    def charged(self, num_uncached: int) -> None:
        """The request weighs on its workers now, by so many tokens to compute, so the next may be judged."""
        self._admission.on_charged(self, num_uncached)

    def leave(self, *, has_output: bool = False) -> None:
        """Idempotent. With `has_output`, the first token has come."""
        if not self._has_left:
            self._has_left = True
            self._admission.on_left(self, has_output=has_output)


class _Pace:
    """How many prompt tokens the workers compute a second while others wait: what they can do, all in all.

    Counted as they are computed, so that a long prompt counts while it runs. In uncached tokens; `_uncached` is the
    share of a prompt that is computed at all, on average.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._uncached = 1.0
        self._charged = 0  # in all
        self._last: tuple[int, int, float] | None = None  # outstanding, charged and the time, when last noted

    def charge(self, num_uncached: int, num_tokens: int) -> None:
        self._charged += num_uncached
        self._uncached += SMOOTHING * (num_uncached / max(num_tokens, 1) - self._uncached)

    def is_due(self, now: float) -> bool:
        return self._last is None or now - self._last[2] >= NOTE_S

    def note(self, outstanding: int, now: float) -> None:
        """`outstanding`: tokens that the workers have yet to compute."""
        last, self._last = self._last, (outstanding, self._charged, now)
        if last is None:
            return
        elapsed_s = now - last[2]
        computed = max(last[0] + self._charged - last[1] - outstanding, 0)
        fade = math.exp(-elapsed_s / PACE_S)
        self._tokens = self._tokens * fade + computed
        self._seconds = self._seconds * fade + elapsed_s

    def pause(self) -> None:
        self._last = None

    def seconds(self, num_tokens: int) -> float:
        """Return how long so many tokens of prompts take, cached ones among them; 0 while that is not known."""
        if self._seconds < MIN_MEASURED_S or not self._tokens:
            return 0.0
        return num_tokens * self._uncached * self._seconds / self._tokens


class _Turnover:
    """How many requests end a second while every seat is taken: what those who wait for one get."""

    def __init__(self) -> None:
        self.num_running = 0
        self._duration_s = 0.0  # of a request from its turn to its end, on average; 0 until one has ended
        self._num_ended = 0  # since the last note
        self._ended = 0.0
        self._seconds = 0.0
        self._since: float | None = None  # of the last note, if no seat was free then

    def end(self, duration_s: float) -> None:
        self.num_running -= 1
        self._num_ended += 1
        weight = SMOOTHING if self._duration_s else 1.0
        self._duration_s += weight * (duration_s - self._duration_s)

    def note(self, has_seat: bool, now: float) -> None:
        if self._since is not None:
            elapsed_s = now - self._since
            fade = math.exp(-elapsed_s / PACE_S)
            self._ended = self._ended * fade + self._num_ended
            self._seconds = self._seconds * fade + elapsed_s
        self._num_ended = 0
        self._since = None if has_seat else now

    def pause(self) -> None:
        self._since = None

    def seconds(self, num_requests: float) -> float:
        """Return how long so many wait for seats while none is free; 0 while that is not known.

        Where nothing runs, it is not others who hold the seats: there are none yet.
        """
        if not self.num_running:
            return 0.0
        if self._since is not None and self._seconds >= MIN_MEASURED_S and self._ended:
            return num_requests * self._seconds / self._ended
        return num_requests * self._duration_s / self.num_running


class _Caution:
    """What estimated waits are multiplied by: twice as much with each request that waited in vain, less with time."""

    def __init__(self) -> None:
        self._excess = 0.0  # over 1, at that time
        self._since = 0.0

    def factor(self, now: float) -> float:
        return 1.0 + self._excess * math.exp(-(now - self._since) / CAUTION_S)

    def add(self, now: float) -> None:
        self._excess, self._since = min(2 * self.factor(now), MAX_CAUTION) - 1.0, now
