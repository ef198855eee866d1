"""Budget forcing (Muennighoff et al., 2025): a model that would end its thoughts is told to go on, so and so often.

The end of thinking is a stop token of such a request. When it comes, a request with what was thought so far and the
words to go on with takes its place: its prefix is cached, and to the client it is one answer.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from baton.actors.engine.request import Request
from baton.actors.messages import Output
from baton.router.admission import Place
from baton.router.dispatch import Dispatcher
from baton.router.slo import Terms

GO_ON = "\nWait"


class Source(Protocol):
    """Where a choice's tokens come from."""

    def outputs(
        self, dispatcher: Dispatcher, request: Request, place: Place, terms: Terms
    ) -> AsyncGenerator[Output, None]: ...


class Straight:
    """What the workers say is the answer."""

    def outputs(
        self, dispatcher: Dispatcher, request: Request, place: Place, terms: Terms
    ) -> AsyncGenerator[Output, None]:
        return dispatcher.generate(request, place, terms)


STRAIGHT = Straight()


@dataclass(frozen=True, slots=True)
class BudgetForcing:
    num_waits: int
    close_id: int  # the token that ends the thoughts
    go_on: tuple[int, ...]
    budget: float = math.inf  # tokens of thought: beyond it the model may close

    async def outputs(
        self, dispatcher: Dispatcher, request: Request, place: Place, terms: Terms
    ) -> AsyncGenerator[Output, None]:
        """Yield one answer's outputs from several requests. Raises what `Dispatcher.generate` does."""
        num_left = self.num_waits
        num_legs = 0
        while True:
            leg = _stopped_at(request, self.close_id) if num_left else request
            said: list[int] = []
            closing: Output | None = None
            async with aclosing(dispatcher.generate(leg, place, terms)) as outputs:
                async for output in outputs:
                    output = replace(output, cached_tokens=None) if num_legs else output
                    said += output.tokens
                    if num_left and output.finish == "stop" and output.tokens[-1:] == (self.close_id,):
                        closing = output
                        break
                    yield output
            if closing is None:
                return
            num_after = request.num_output + len(said) - 1 + len(self.go_on)
            goes_on = num_after < min(self.budget, request.sampling.max_tokens)
            num_left = num_left - 1 if goes_on else 0
            tail = self.go_on if goes_on else (self.close_id,)
            request = _after(request, (*said[:-1], *tail), num_legs := num_legs + 1)
            is_full = request.num_output >= request.sampling.max_tokens
            finish = "length" if is_full else None
            yield replace(closing, tokens=(*closing.tokens[:-1], *tail), finish=finish)
            if is_full:
                return
            (place,) = dispatcher.admit([request], terms)


def _after(request: Request, said: tuple[int, ...], num_legs: int) -> Request:
    return replace(
        request,
        id=f"{request.id.partition('/')[0]}/{num_legs}",  # so that late outputs cannot be mixed up
        tokens=(*request.tokens, *said),
        num_output=request.num_output + len(said),
    )


def _stopped_at(request: Request, close_id: int) -> Request:
    sampling = request.sampling
    return replace(request, sampling=replace(sampling, stop_token_ids=(*sampling.stop_token_ids, close_id)))
