"""Text to token ids and back, for one model; chat templates included.

Loaded from a GGUF file or a Hugging Face directory. Control tokens come from the model's template only: the same
characters inside a message stay text. Encoding is CPU work: the async methods run it on a small thread pool (the
tokenizers library releases the GIL there).
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jinja2
import tokenizers

from baton.router.errors import InvalidRequest
from baton.router.heavy_lane import HeavyLane
from baton.router.tokenizer_files import UnsupportedTokenizer, load_tokenizer

HEAVY_CHARS = 256 * 1024  # texts longer than this are encoded in another process

ChatMessage = Mapping[str, str]  # role, content and perhaps name


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
        self.token_bytes: tuple[bytes, ...] = _token_bytes(self._backend, self.vocab_size)
        self._chat = _ChatEncoder(self._backend, self.special_ids)

    @classmethod
    def load(cls, path: str | Path, *, num_threads: int = 2) -> Tokenizer:
        """Load from a `.gguf` file or a directory. Slow (seconds): call it off the event loop."""
        return cls(load_tokenizer(Path(path)), num_threads=num_threads, lane=HeavyLane(Path(path)))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Render the template up to the assistant's turn and encode it. Raises InvalidRequest when it refuses."""
        if self.lane is not None and sum(len(text) for message in messages for text in message.values()) > HEAVY_CHARS:
            return await self.lane.encode_chat(messages)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode_chat_now, messages)

    async def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode a raw prompt, in which control tokens do count; adds BOS as the model wants, once."""
        if self.lane is not None and len(text) > HEAVY_CHARS:
            return await self.lane.encode_prompt(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode_prompt_now, text)

    def encode_chat_now(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if not self._hf.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            rendered: str = self._hf.apply_chat_template(
                [self._chat.guard(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused: {error.message}", param="messages") from error
        return self._chat.encode(rendered)

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

    def guard(self, message: ChatMessage) -> dict[str, str]:
        return {key: self._control.sub(self._broken, text) for key, text in message.items()}

    def encode(self, rendered: str) -> tuple[int, ...]:
        text = self._control.sub(lambda match: self._alias[match[0]], rendered).replace(self._mark, "")
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids  # the template wrote BOS
        return tuple([self._real_id.get(id, id) for id in ids])

    def _broken(self, match: re.Match[str]) -> str:
        return match[0][0] + self._mark + match[0][1:]


def _renamed(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
    )


def _token_bytes(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[bytes, ...]:
    """Return every token's own bytes; those of a text are their concatenation."""
    decoder: dict[str, Any] = json.loads(backend.to_str())["decoder"] or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    added = {id: token.content.encode() for id, token in backend.get_added_tokens_decoder().items()}
    pieces = [backend.id_to_token(id) or "" for id in range(vocab_size)]
    if "ByteLevel" in kinds:
        to_byte = _byte_level_alphabet()
        return tuple(added[id] if id in added else _byte_level_bytes(piece, to_byte) for id, piece in enumerate(pieces))
    if kinds & {"ByteFallback", "Metaspace"}:
        return tuple(added[id] if id in added else _sentencepiece_bytes(piece) for id, piece in enumerate(pieces))
    raise UnsupportedTokenizer(
        f"decoder {decoder.get('type')!r} is neither byte-level nor SentencePiece-like; convert the tokenizer"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte, inverted: printable bytes are themselves, others follow 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(piece: str, to_byte: dict[str, int]) -> bytes:
    if all(char in to_byte for char in piece):
        return bytes(to_byte[char] for char in piece)
    return piece.encode()  # not written in the alphabet: itself, as the tokenizers library decodes it


def _sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
