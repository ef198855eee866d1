"""/v1/embeddings: each input's hidden states after the last layer, pooled and scaled to length 1."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from baton.actors.engine.request import Pooling
from baton.router.endpoints import Reading, Writer
from baton.router.errors import RouterError
from baton.router.formats import encode
from baton.router.generation import Delta
from baton.router.openai_models import CompletionRequest, Priority, Prompts, Usage, refuse_if


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    input: Prompts  # each a str or a list[int]
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None  # an extension
    dimensions: Any = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Priority | None = None
    user: str | None = None


class Embedding(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True):
    object: str
    data: list[Embedding]
    model: str
    usage: dict[str, int]
    baton: dict[str, Any]


class Embeddings:
    name = "embeddings"
    body = EmbeddingRequest

    def __init__(self, pooling: Pooling) -> None:
        self._pooling: Pooling = pooling

    def core(self, body: EmbeddingRequest) -> CompletionRequest:
        refuse_if("dimensions", body.dimensions)
        return CompletionRequest.pooled(
            body.pooling or self._pooling,
            model=body.model,
            prompt=body.input,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )

    def writer(self, reading: Reading[EmbeddingRequest]) -> Writer:
        return EmbeddingWriter(reading.model, is_base64=reading.body.encoding_format == "base64")

    def error(self, error: RouterError) -> dict[str, object]:
        return error.body()


class EmbeddingWriter:
    def __init__(self, model: str, *, is_base64: bool) -> None:
        self._model = model
        self._is_base64 = is_base64

    def body(self, deltas: Sequence[Delta], usage: Usage, baton: dict[str, Any]) -> bytes:
        ordered = sorted(deltas, key=lambda delta: delta.index)
        data = [Embedding("embedding", delta.index, self._spelled(delta.pooled)) for delta in ordered]
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return encode(EmbeddingList("list", data, self._model, tokens, baton))

    def _spelled(self, pooled: bytes) -> list[float] | str:
        state = np.frombuffer(pooled, dtype="<f4")
        unit = state / max(float(np.linalg.norm(state)), 1e-12)
        return base64.b64encode(unit.tobytes()).decode() if self._is_base64 else unit.tolist()
