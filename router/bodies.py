"""Every body that clients send, by the name of its endpoint."""

from __future__ import annotations

from pydantic import BaseModel

from baton.router.embeddings import EmbeddingRequest
from baton.router.messages import MessagesRequest
from baton.router.openai_models import ChatRequest, CompletionRequest
from baton.router.responses import ResponsesRequest
from baton.router.tokenize import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "embeddings": EmbeddingRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
