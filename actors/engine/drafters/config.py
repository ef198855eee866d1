"""Settings of speculative decoding."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DrafterKind = Literal["ngram", "suffix", "grammar", "draft_model", "eagle", "mtp", "medusa"]
NEEDS_MODEL = ("draft_model", "eagle", "medusa")
TAKES_NO_MODEL = ("ngram", "suffix", "grammar")


class SpeculationConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    drafter: DrafterKind = Field(description="who proposes tokens")
    max_draft_tokens: int = Field(4, ge=1, le=16, description="the most that one sequence may draft in a step")
    length: Literal["cost", "fixed"] = Field(
        "cost", description="cost = as many as pay by measured acceptance and step times, none at all if none do"
    )
    acceptance: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="coupled = the same tokens as without speculation, seed by seed; rejection = the same distribution "
        "only, with more of a network's drafts accepted at high temperatures",
    )
    model: str | None = Field(
        None,
        description="weights of draft_model, eagle, medusa or mtp: a directory, a .gguf file, or package:NAME; mtp may "
        "leave it out where the served model holds the module",
    )
    min_match: int = Field(2, ge=1, le=16, description="tokens that ngram and suffix must find again before they draft")

    @property
    def block_owner(self) -> str | None:
        """Whose KV lies in the block beside the model's, so that workers that hand over must agree on it."""
        return f"{self.drafter} {self.model or ''}".strip() if self.drafter in ("eagle", "mtp") else None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.drafter in NEEDS_MODEL and self.model is None:
            raise ValueError(f"speculation.drafter = {self.drafter} needs speculation.model; set it")
        if self.drafter in TAKES_NO_MODEL and self.acceptance == "rejection":
            raise ValueError(
                f"speculation.acceptance = rejection gains nothing with {self.drafter}, whose drafts have no "
                f"probabilities; leave it coupled"
            )
        if self.drafter in TAKES_NO_MODEL and self.model is not None:
            raise ValueError(f"speculation.drafter = {self.drafter} takes no speculation.model; remove it")
        return self
