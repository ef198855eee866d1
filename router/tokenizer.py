"""Text to token ids and back, for one model; chat templates included.

Loaded from a GGUF file or a Hugging Face directory. Control tokens come from the model's template only: the same
characters inside a message stay text. Encoding is CPU work: the async methods run it on a small thread pool (the
tokenizers library releases the GIL there).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jinja2
import tokenizers

from baton.actors.engine.vocabulary import token_bytes
from baton.router.errors import InvalidRequest
from baton.router.heavy_lane import HeavyLane
from baton.router.tokenizer_files import load_tokenizer
from baton.router.tools.dialect import Dialect
from baton.router.tools.prompt import ChatMessage, in_plain_words
from baton.router.tools.registry import find_dialect

LIGHT_CHARS = 2048  # texts up to this are encoded at once: a thread would cost more than the encoding
HEAVY_CHARS = 256 * 1024  # texts longer than this are encoded in another process

RENDERING = ("tools", "tokenize", "add_generation_prompt", "conversation", "chat_template", "continue_final_message")
NO_TEMPLATE = "this model has no chat template; use /v1/completions"


class TokenBytes(dict[int, bytes]):
    """Every token's own bytes. An id that only pads the model's vocabulary has none."""

    def __missing__(self, id: int) -> bytes:
        return b""


class Tokenizer:
    """`hf` is a fast transformers tokenizer; it renders templates, its `tokenizers` backend encodes."""

    def __init__(self, hf: Any, *, num_threads: int = 2, lane: HeavyLane | None = None) -> None:
        """Without a `lane`, texts of any length are encoded on the threads."""
        self._hf = hf
        self._backend = cast(tokenizers.Tokenizer, hf.backend_tokenizer)
        self.lane = lane
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.bos_token: str = hf.bos_token or ""
        self.special_ids: frozenset[int] = frozenset(cast("list[int]", hf.all_special_ids)) | {
            id for id, token in hf.added_tokens_decoder.items() if token.special
        }
        self.token_bytes = TokenBytes(enumerate(token_bytes(self._backend, self.vocab_size)))
        self._chat = _ChatEncoder(self._backend, self.special_ids)
        template = hf.chat_template
        self.chat_template: str = template if isinstance(template, str) else ""
        self.dialect: Dialect = find_dialect("auto", self.chat_template)

    @classmethod
    def load(cls, path: str | Path, *, num_threads: int = 2) -> Tokenizer:
        """Load from a `.gguf` file or a directory. Slow (seconds): call it off the event loop."""
        return cls(load_tokenizer(Path(path)), num_threads=num_threads, lane=HeavyLane(Path(path)))

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        context: int | None = None,
    ) -> tuple[int, ...]:
        """Render the template up to the assistant's turn and encode it. Raises InvalidRequest when it refuses.

        `options` are variables of the model's own template, e.g. enable_thinking. A long text may be refused here
        already if it has more tokens than the `context` holds.
        """
        arguments = (messages, tools, options or {})
        num_chars = _num_chars(arguments)
        if num_chars <= LIGHT_CHARS:
            return self.encode_chat_now(*arguments)
        if self.lane is not None and num_chars > HEAVY_CHARS:
            return await self.lane.encode_chat(*arguments, context=context)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode_chat_now, *arguments)

    async def encode_prompt(self, text: str, *, context: int | None = None) -> tuple[int, ...]:
        """Encode a raw prompt, in which control tokens do count; adds BOS as the model wants, once."""
        if len(text) <= LIGHT_CHARS:
            return self.encode_prompt_now(text)
        if self.lane is not None and len(text) > HEAVY_CHARS:
            return await self.lane.encode_prompt(text, context)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode_prompt_now, text)

    def encode_chat_now(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        if not self._hf.chat_template:
            raise InvalidRequest(NO_TEMPLATE, param="messages")
        if "tools" not in self.chat_template:
            messages, tools = in_plain_words(messages, tools), ()
        guarded = [self._chat.guard(message) for message in messages]
        try:
            rendered: str = self._hf.apply_chat_template(
                guarded,
                tools=[self._chat.guard(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **{name: value for name, value in (options or {}).items() if name not in RENDERING},
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused: {error.message}", param="messages") from error
        except (TypeError, ValueError, KeyError) as error:  # what a template's code makes of types it does not expect
            raise InvalidRequest("the model's chat template cannot render these messages", param="messages") from error
        return self._chat.encode(rendered)

    def ids_of(self, names: Sequence[str]) -> frozenset[int]:
        """The ids of those names that are control tokens."""
        ids = (self._backend.token_to_id(name) for name in names)
        return frozenset(id for id in ids if id is not None and id in self.special_ids)

    def id_of(self, name: str) -> int | None:
        """The id of an added token of this name."""
        id = self._backend.token_to_id(name)
        return id if id in self._backend.get_added_tokens_decoder() else None

    def encode_prompt_now(self, text: str) -> tuple[int, ...]:
        has_bos = bool(self.bos_token) and text.startswith(self.bos_token)
        return tuple(self._backend.encode_batch_fast([text], add_special_tokens=not has_bos)[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without control tokens: exactly what streaming them would send."""
        return b"".join(self.token_bytes[t] for t in tokens if t not in self.special_ids).decode(errors="replace")

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _ChatEncoder:
    """Tells the template's control tokens from look-alikes in user text.

    Look-alikes are broken by a random mark before rendering. After it every control token still whole is the
    template's: it is renamed to a random alias, and the marks go. The second tokenizer knows aliases, and reads the
    control tokens' own spelling as plain text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        nonce = secrets.token_hex(8)
        self._mark = f"\ue000{nonce}\ue001"
        self._tokenizer = tokenizers.Tokenizer.from_str(backend.to_str())
        self._tokenizer.encode_special_tokens = True
        added = {id: token for id, token in backend.get_added_tokens_decoder().items() if id in special_ids}
        self._alias = {token.content: f"\ue002{nonce}.{id}\ue003" for id, token in added.items()}
        cast(Any, self._tokenizer).add_tokens([_renamed(token, self._alias[token.content]) for token in added.values()])
        self._real_id = {self._tokenizer.token_to_id(self._alias[token.content]): id for id, token in added.items()}
        longest_first = sorted(self._alias, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def guard(self, value: Any) -> Any:
        """Break the look-alikes in every string of a JSON value."""
        if isinstance(value, str):
            return self._control.sub(self._broken, value)
        if isinstance(value, Mapping):
            return {key: self.guard(item) for key, item in cast("Mapping[str, Any]", value).items()}
        return [self.guard(item) for item in cast("list[Any]", value)] if isinstance(value, list | tuple) else value

    def encode(self, rendered: str) -> tuple[int, ...]:
        text = self._control.sub(lambda match: self._alias[match[0]], rendered).replace(self._mark, "")
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids  # the template wrote BOS
        return tuple([self._real_id.get(id, id) for id in ids])

    def _broken(self, match: re.Match[str]) -> str:
        return match[0][0] + self._mark + match[0][1:]


def _num_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, cast("Mapping[str, object]", value).values()))
    return sum(map(_num_chars, cast("list[object]", value))) if isinstance(value, list | tuple) else 0


def _renamed(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
    )
