"""/tokenize and /detokenize: the served model's own mapping between text and ids, as requests would be read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from baton.router.errors import InvalidRequest
from baton.router.openai_models import MAX_MESSAGES, Message, TokenId
from baton.router.plan import for_template
from baton.router.tokenizer import Tokenizer


class TokenizeRequest(BaseModel):
    """Either a prompt, as /v1/completions reads it, or messages, as /v1/chat/completions does."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES), FailFast()] = []

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


class TokenizeReply(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int | None


class DetokenizeReply(BaseModel):
    prompt: str


async def tokenize(body: TokenizeRequest, tokenizer: Tokenizer, context: int | None) -> TokenizeReply:
    if body.prompt is not None:
        tokens = await tokenizer.encode_prompt(body.prompt, context=context)
    else:
        messages = [for_template(message) for message in body.messages]
        tokens = await tokenizer.encode_chat(messages, context=context)
    return TokenizeReply(tokens=list(tokens), count=len(tokens), max_model_len=context)


def detokenize(body: DetokenizeRequest, tokenizer: Tokenizer) -> DetokenizeReply:
    """Control tokens are spelled out: this is for looking at tokens, not for showing an answer."""
    if body.tokens and max(body.tokens) >= tokenizer.vocab_size:
        raise InvalidRequest(f"tokens must be below {tokenizer.vocab_size}, the vocabulary's size", param="tokens")
    text = b"".join(tokenizer.token_bytes[token] for token in body.tokens)
    return DetokenizeReply(prompt=text.decode(errors="replace"))
