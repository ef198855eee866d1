"""One HTTP call's sequences, from dispatched requests to text deltas; streaming or not, the same deltas.

Knows tokens and text; knows no HTTP and no OpenAI shapes.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from baton.actors.engine.request import PromptOutput, Request, TokenLogprobs
from baton.actors.messages import Output, ServedBy
from baton.router.admission import Place
from baton.router.budget_forcing import STRAIGHT, Source
from baton.router.detokenizer import Detokenizer
from baton.router.dispatch import Dispatcher
from baton.router.errors import Overloaded, RouterError
from baton.router.metrics import Metrics
from baton.router.openai_models import CompletionTokensDetails, PromptTokensDetails, Usage
from baton.router.parts import CallStart, Part, PartParser, PlainText, Reasoning, join_parts, merged
from baton.router.ranking import Candidate, Scorer, ranked
from baton.router.slo import Terms
from baton.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probabilities; `offset` is where its text starts, in characters."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None  # None: a prompt's first token


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text, to be sent before the output, or in its place."""

    text: str
    is_all: bool


@dataclass(frozen=True, slots=True)
class Manner:
    """How outputs are to be understood, and what is told of them."""

    make_parser: Callable[[], PartParser] = PlainText  # one for each choice
    shown_ids: frozenset[int] = frozenset()  # control tokens that are text to the parser
    tells_logprobs: bool = True
    source: Source = STRAIGHT


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice that the client may see. `finish` is set on its last."""

    index: int
    is_first: bool
    text: str
    scored: tuple[ScoredToken, ...]
    finish: str | None
    pooled: bytes = b""  # the prompt's pooled hidden state, float32
    stop_string: str | None = None  # that ended it
    parts: tuple[Part, ...] = ()  # what the text means


class Choice:
    """One sequence's state: what of its tokens has become text, and how it ended."""

    def __init__(
        self,
        index: int,
        request: Request,
        stops: Sequence[str],
        tokenizer: Tokenizer,
        echo: Echo | None = None,
        manner: Manner | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.served: ServedBy | None = None
        self.finish: str | None = None
        self._echo = echo
        self._has_output = False
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        manner = manner or Manner()
        self._parser = manner.make_parser()
        self._has_calls = False
        self._tells_logprobs = manner.tells_logprobs
        self.source = manner.source
        self._total_logprob = 0.0
        self._text = Detokenizer(
            tokenizer.token_bytes,
            tokenizer.special_ids - manner.shown_ids,
            stops=stops,
            min_tokens=request.sampling.min_tokens,
        )
        self._offsets = _Offsets(tokenizer)
        self._unsent: list[ScoredToken] = []  # their text is still held back

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def take(self, output: Output) -> Delta | None:
        """Turn an output into a delta, or None while all of its text must be held back."""
        is_first, self._has_output = not self._has_output, True
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if is_first and output.prompt is not None and output.prompt.pooled:
            return self._only("", output)
        if self._echo is not None and is_first:
            self._unsent += self._offsets.prompt(self.request.tokens, self._echo.text, output.prompt)
            if self._echo.is_all:
                return self._only(self._echo.text, output)
        ends_in_stop_id = output.finish == "stop" and bool(output.tokens) and output.tokens[-1] in self._stop_ids
        released = self._text.push(output.tokens, hidden_tail=int(ends_in_stop_id), last=output.finish is not None)
        self.finish = "stop" if released.stop_string is not None else output.finish
        self.served = output.served
        for token, logprobs in zip(output.tokens[: released.num_tokens], output.logprobs or (), strict=False):
            self._total_logprob += logprobs.chosen
            if self._tells_logprobs:
                self._unsent.append(ScoredToken(token, self._offsets.take(token), logprobs))
        text = self._echo.text + released.text if self._echo is not None and is_first else released.text
        if not (text or is_first or self.finish):
            return None
        scored: tuple[ScoredToken, ...] = ()
        if text or self.finish:
            scored, self._unsent = tuple(self._unsent), []
        parts = self._parse(text)
        return Delta(self.index, is_first, text, scored, self.finish, stop_string=released.stop_string, parts=parts)

    @property
    def mean_logprob(self) -> float:
        """Of the tokens sampled, if they were scored."""
        return self._total_logprob / max(self.num_tokens, 1)

    def _parse(self, text: str) -> tuple[Part, ...]:
        parts = list(self._parser.push(text))
        if self.finish is not None:
            parts = merged([*parts, *self._parser.finish()])
        self._has_calls |= any(isinstance(part, CallStart) for part in parts)
        if any(isinstance(part, Reasoning) for part in parts):
            self.reasoning_tokens = self.num_tokens
        if self._has_calls and self.finish == "stop":
            self.finish = "tool_calls"
        return tuple(parts)

    def _only(self, text: str, output: Output) -> Delta:
        """End with what is told of the prompt: the token sampled after it was not asked for."""
        self.finish = "length"
        self.served = output.served
        scored = tuple(self._unsent)
        pooled = output.prompt.pooled if output.prompt else b""
        return Delta(self.index, True, text, scored, self.finish, pooled, parts=self._parse(text))


class Generation:
    """All sequences of one call: `num_choices` for each prompt, in order. Times count from `started`, monotonic."""

    def __init__(
        self,
        choices: Sequence[Choice],
        num_choices: int,
        dispatcher: Dispatcher,
        metrics: Metrics,
        *,
        terms: Terms,
        started: float,
    ) -> None:
        self._choices = choices
        self._num_choices = num_choices
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._terms = terms
        self._started = self.planned = started
        self.ttft_s: float | None = None
        self.failure: RouterError | None = None  # told to the client in its stream

    @property
    def is_finished(self) -> bool:
        """Whether every choice has given its last delta."""
        return all(choice.finish is not None for choice in self._choices)

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Yield what came together, together. Closing the generator cancels every sequence."""
        places: Sequence[Place] = ()
        try:
            places = self._dispatcher.admit([choice.request for choice in self._choices], self._terms)
            for place in places:
                place.since = self.planned
            async with aclosing(self._outputs(places)) as batches:
                async for batch in batches:
                    yield batch
        except RouterError as error:
            outcome = "refused" if error.code == Overloaded.code else "failed"
            for _ in filter(lambda choice: choice.finish is None, self._choices):
                self._metrics.judged(self._terms.slo.name, self._terms.key, outcome, 0)
            raise
        finally:
            for place in places:  # of sequences that were never started
                place.leave()

    def _outputs(self, places: Sequence[Place]) -> AsyncGenerator[list[Delta], None]:
        return self._follow(self._choices[0], places[0]) if len(places) == 1 else self._merged(places)

    def best(self, deltas: Sequence[Delta], num_kept: int, scorer: Scorer) -> list[Delta]:
        """Keep the `num_kept` best of each prompt's choices, best first."""
        if num_kept == self._num_choices:
            return list(deltas)
        indices: dict[int, int] = {}  # by the choice's own
        for first in range(0, len(self._choices), self._num_choices):
            group = self._choices[first : first + self._num_choices]
            candidates = [Candidate(_answer(choice, deltas), choice.mean_logprob) for choice in group]
            best = ranked(candidates, scorer)[:num_kept]
            indices |= {group[i].index: len(indices) + place for place, i in enumerate(best)}
        return [replace(delta, index=indices[delta.index]) for delta in deltas if delta.index in indices]

    def usage(self) -> Usage:
        """Count what was used so far: a prompt once for all its choices."""
        groups = [self._choices[i : i + self._num_choices] for i in range(0, len(self._choices), self._num_choices)]
        prompt_tokens = sum(len(group[0].request.tokens) for group in groups)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached_tokens = sum(min(choice.cached_tokens for choice in group) for group in groups)
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        details = PromptTokensDetails(cached_tokens), CompletionTokensDetails(reasoning_tokens)
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, *details)

    def served(self) -> list[ServedBy | None]:
        """Say who served each choice; None for one that a stop string cut short."""
        return [choice.served for choice in self._choices]

    async def _merged(self, places: Sequence[Place]) -> AsyncGenerator[list[Delta], None]:
        news: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()  # None: one sequence has ended
        tasks = [
            asyncio.create_task(self._pump(choice, place, news))
            for choice, place in zip(self._choices, places, strict=True)
        ]
        try:
            num_running = len(tasks)
            while num_running:
                items = [await news.get()]
                while not news.empty():
                    items.append(news.get_nowait())
                batch = [item for item in items if isinstance(item, Delta)]
                if batch:
                    yield batch
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                num_running -= items.count(None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, choice: Choice, place: Place, news: asyncio.Queue[Delta | Exception | None]) -> None:
        try:
            async with aclosing(self._follow(choice, place)) as batches:
                async for batch in batches:
                    news.put_nowait(batch[0])
        except Exception as error:  # handed to the reader, who raises it
            news.put_nowait(error)
        news.put_nowait(None)

    async def _follow(self, choice: Choice, place: Place) -> AsyncGenerator[list[Delta], None]:
        """Yield one choice's deltas, each by itself."""
        first_s: float | None = None
        last_s: float | None = None
        source = choice.source.outputs(self._dispatcher, choice.request, place, self._terms)
        async with aclosing(source) as outputs:
            async for output in outputs:
                now = time.monotonic()
                before = choice.num_tokens
                delta = choice.take(output)
                if first_s is None:
                    first_s = now
                    self._note_first(choice, now)
                self._metrics.output(choice.num_tokens - before, None if last_s is None else now - last_s)
                last_s = now
                if delta is not None:
                    yield [delta]
                if choice.finish is not None:
                    break
        self._metrics.finished(choice.finish or "none")
        if first_s is not None and last_s is not None:
            itl_s = (last_s - first_s) / (choice.num_tokens - 1) if choice.num_tokens > 1 else None
            verdict = self._terms.slo.verdict(first_s - self._started, itl_s)
            self._metrics.judged(self._terms.slo.name, self._terms.key, verdict, choice.num_tokens)
        if choice.served is not None:
            self._metrics.phases(choice.served.times)

    def _note_first(self, choice: Choice, now: float) -> None:
        if self.ttft_s is None:
            self.ttft_s = now - self._started
        if choice.index % self._num_choices == 0:
            self._metrics.first_output(now - self._started, len(choice.request.tokens), choice.cached_tokens)
            self._metrics.prompt_of_key(self._terms.key, len(choice.request.tokens))


def _answer(choice: Choice, deltas: Sequence[Delta]) -> str:
    """Return what it says and calls, as one text."""
    answer = join_parts(part for delta in deltas if delta.index == choice.index for part in delta.parts)
    return answer.content + "".join(f"\n{call.name}{call.arguments}" for call in answer.calls)


class _Offsets:
    """Where each token's text starts, counted as if nothing were held back or cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, tokens: Sequence[int], text: str, scores: PromptOutput | None) -> list[ScoredToken]:
        """Place the prompt's tokens in its text, in which control tokens do count; score them if they were."""
        placed: list[ScoredToken] = []
        logprobs = [None, *scores.logprobs] if scores is not None else []
        for token, scored in zip(tokens, logprobs, strict=True) if logprobs else ():
            offset = self.take(token)
            spelled = self._tokenizer.token_bytes[token].decode(errors="replace")
            if token in self._tokenizer.special_ids and text.startswith(spelled, offset):
                self._offset += len(spelled)
            placed.append(ScoredToken(token, offset, scored))
        self._offset = len(text)
        return placed

    def take(self, token: int) -> int:
        offset = self._offset
        if token not in self._tokenizer.special_ids:
            self._offset += len(self._characters.decode(self._tokenizer.token_bytes[token]))
        return offset
