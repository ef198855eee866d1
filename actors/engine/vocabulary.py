"""The bytes that each token id stands for, read from a model's tokenizer. The engine's only knowledge of text.

Import-light: the gateway, which has no torch, shares it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from baton.actors.engine.gguf_metadata import read_metadata

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # token types


class UnsupportedTokenizer(Exception):
    """The model's tokenizer cannot be mapped to bytes; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    token_bytes: Sequence[bytes]  # by id; a control token has none
    eos_ids: tuple[int, ...]


def load_vocabulary(path: Path, eos_ids: Sequence[int]) -> Vocabulary:
    """Read a GGUF file or a Hugging Face folder. Takes a second or so. Raises UnsupportedTokenizer."""
    if path.suffix == ".gguf":
        return Vocabulary(_gguf_bytes(path), tuple(eos_ids))
    if not (path / "tokenizer.json").exists():
        raise UnsupportedTokenizer(f"{path} has no tokenizer.json: structured output needs one; convert the tokenizer")
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    pieces = list(token_bytes(backend, backend.get_vocab_size(with_added_tokens=True)))
    for id, token in backend.get_added_tokens_decoder().items():
        if token.special:
            pieces[id] = b""
    return Vocabulary(tuple(pieces), tuple(eos_ids))


def num_token_ids(path: Path) -> int | None:
    """Return how many ids mean something: those behind only pad the model's rows. None where there is no tokenizer."""
    if path.suffix == ".gguf":
        kinds = read_metadata(path).get("tokenizer.ggml.token_type", ())
        return max((id + 1 for id, kind in enumerate(kinds) if kind != _UNUSED), default=None)
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = json.loads(file.read_bytes())
    vocab: dict[str, int] | list[Any] = tokenizer["model"]["vocab"]
    last = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
    return max(last, *(token["id"] for token in tokenizer["added_tokens"]), 0) + 1


def _gguf_bytes(path: Path) -> tuple[bytes, ...]:
    metadata = read_metadata(path)
    is_byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    to_byte = byte_level_alphabet()

    def bytes_of(piece: str, kind: int) -> bytes:
        if kind in (_UNKNOWN, _CONTROL, _UNUSED):
            return b""
        if kind == _USER_DEFINED:
            return piece.encode()
        return byte_level_bytes(piece, to_byte) if is_byte_level else sentencepiece_bytes(piece)

    pieces, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return tuple(bytes_of(piece, kind) for piece, kind in zip(pieces, kinds, strict=True))


def token_bytes(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[bytes, ...]:
    """Return every token's own bytes, control tokens' names too; those of a text are their concatenation."""
    decoder: dict[str, Any] = json.loads(backend.to_str())["decoder"] or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    added = {id: token.content.encode() for id, token in backend.get_added_tokens_decoder().items()}
    pieces = [backend.id_to_token(id) or "" for id in range(vocab_size)]
    if "ByteLevel" in kinds:
        to_byte = byte_level_alphabet()
        return tuple(added[id] if id in added else byte_level_bytes(piece, to_byte) for id, piece in enumerate(pieces))
    if kinds & {"ByteFallback", "Metaspace"}:
        return tuple(added[id] if id in added else sentencepiece_bytes(piece) for id, piece in enumerate(pieces))
    raise UnsupportedTokenizer(
        f"decoder {decoder.get('type')!r} is neither byte-level nor SentencePiece-like; convert the tokenizer"
    )


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte, inverted: printable bytes are themselves, others follow 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(piece: str, to_byte: dict[str, int]) -> bytes:
    if all(char in to_byte for char in piece):
        return bytes(to_byte[char] for char in piece)
    return piece.encode()  # not written in the alphabet: itself, as the tokenizers library decodes it


def sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
