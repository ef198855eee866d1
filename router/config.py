"""What an operator may set on a gateway. Frozen; unknown keys are refused."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.router.api_keys import ApiKey

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class PolicyName(StrEnum):
    COST = "cost"
    CACHE_AWARE = "cache_aware"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    DYNAMO = "dynamo"


class CacheAwareLimits(BaseModel):
    """When a cached prefix is worth more than a shorter queue (see `policy.cache_aware`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_match: Annotated[float, Field(ge=0, le=1)] = 0.3  # share of the prompt's blocks below which a match is a miss
    imbalance_requests: Annotated[int, Field(ge=0)] = 64  # a holder may be this much busier than the idlest worker ...
    imbalance_ratio: Annotated[float, Field(ge=1)] = 1.5  # ... or this many times as busy, whichever is more


class SloClass(BaseModel):
    """Targets; a key that is left out counts as met. A first token that cannot come in time is refused (429)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    itl_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # mean time between tokens


class SloConfig(BaseModel):
    """Whose requests have which targets. The headers x-baton-slo, x-baton-ttft-ms and x-baton-itl-ms go before it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: dict[str, SloClass] = {"default": SloClass()}
    default: str = "default"  # class of requests that name none and whose key has none
    keys: dict[str, str] = {}  # name of an API key -> class

    @model_validator(mode="after")
    def _classes_exist(self) -> Self:
        for where, name in {
            "default": self.default,
            **{f"keys.{key}": name for key, name in self.keys.items()},
        }.items():
            if name not in self.classes:
                raise ValueError(
                    f"slo.{where} is {name!r}, which is no class: define it, or use {sorted(self.classes)}"
                )
        if "custom" in self.classes:
            raise ValueError("slo.classes: 'custom' is the class of requests with targets of their own; rename it")
        return self


class RouterConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0 = any free port
    advertise_host: str | None = None  # what `Gateway.start` returns when `host` is a wildcard

    policy: PolicyName = PolicyName.COST
    cache_aware: CacheAwareLimits = CacheAwareLimits()
    predicted_prefix_s: Seconds = 5.0  # how long a prefix counts as cached where it was just sent

    max_body_bytes: Count = 8 * 2**20
    max_held_body_bytes: Count = 256 * 2**20  # of all bodies that are being read; an only one may be larger
    max_queued_requests: Count = 1024  # sequences without a first token yet
    max_queued_tokens: Count = 2_000_000  # their prompt tokens
    max_queue_s: Seconds = 30.0  # in the gateway's queue; whoever would wait longer is refused at once
    slo: SloConfig = SloConfig()
    request_timeout_s: Seconds = 600.0
    max_attempts: Count = 3  # workers that one sequence may be lost on before it is given up

    reconnect_first_s: Seconds = 0.1
    reconnect_max_s: Seconds = 2.0
    drain_s: Annotated[float, Field(ge=0)] = 30.0  # `stop` waits this long for running requests
    tokenizer_threads: Count = 2
    # How the model writes tool calls; auto = as its chat template says.
    tool_dialect: Literal["auto", "hermes", "llama3", "mistral", "pythonic"] = "auto"

    api_keys: tuple[ApiKey, ...] = ()  # with those of the file; none in all = everybody may call
    api_keys_file: Path | None = None  # a YAML list of the same
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()  # of web pages that may call; "*" = of any
    pooling: Literal["mean", "last"] = "last"  # of embeddings, where the request does not say

    @model_validator(mode="after")
    def _tls_has_both_files(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together: set both, or neither")
        return self
