"""The sampling that a model's makers recommend, for what a request leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from baton.actors.engine.gguf_metadata import read_metadata

GGUF_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class SamplingDefaults(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0


def sampling_defaults(path: Path) -> SamplingDefaults:
    """Read what lies with the weights at `path`. Raises ValidationError where it makes no sense."""
    if path.suffix == ".gguf":
        metadata = read_metadata(path)
        given: dict[str, Any] = {name: metadata.get(f"general.sampling.{key}") for name, key in GGUF_KEYS.items()}
        return SamplingDefaults(**{name: value for name, value in given.items() if value is not None})
    file = path / "generation_config.json"
    return SamplingDefaults.model_validate_json(file.read_bytes()) if file.exists() else SamplingDefaults()
