"""The engine's settings. Facts found out at start (how many blocks fit, the model's context) are constructor
arguments of what needs them; the optional fields here override them.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.actors.engine.drafters.config import SpeculationConfig


class EngineConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(
        default=16,
        ge=1,
        description="tokens in one KV block; those of prefill and decode workers may differ by a whole factor",
    )
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks of this worker; None = as many as memory holds"
    )
    max_context: int | None = Field(
        default=None, ge=2, description="tokens of prompt and output; None = the model's own limit"
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="sequences that run at once; also the number of sampling slots"
    )
    max_step_tokens: int = Field(
        default=4096, ge=1, description="tokens computed in one step, decodes and prefill chunks together"
    )
    max_prefill_chunk: int = Field(
        default=2048, ge=1, description="tokens that one prompt may take of a step while other prompts want their part"
    )
    export_chunk: int = Field(
        default=2048,
        ge=1,
        description="a prompt with more uncached tokens than this is computed for a peer in chunks of at most as many, "
        "and each chunk's KV leaves while the next one computes",
    )
    export_last_chunk: int = Field(
        default=512, ge=1, description="tokens of such a prompt's last chunk, whose KV leaves when prefill has ended"
    )
    overlap: bool | None = Field(
        default=None,
        description="launch a step before the sampled ids of the step before are known; None = on a GPU only",
    )
    prefix_cache: bool = Field(
        default=True, description="keep the KV of ended sequences for prompts that start the same"
    )
    headroom_blocks: int = Field(
        default=1, ge=0, description="blocks left free for each running sequence when another one enters"
    )
    max_preemptions: int = Field(
        default=4,
        ge=1,
        description="preemptions of one sequence after which it re-enters only with room for its whole output",
    )
    max_overtakes: int = Field(
        default=16,
        ge=0,
        description="how many later requests of equal priority may start before the one that waits longest",
    )
    speculation: SpeculationConfig | None = Field(
        default=None, description="draft tokens and verify them several a step; None = one token a step"
    )

    @model_validator(mode="after")
    def _every_sequence_can_step(self) -> Self:
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}, below max_num_seqs {self.max_num_seqs}: a step could not "
                f"hold one token of each running sequence; raise max_step_tokens or lower max_num_seqs"
            )
        return self
