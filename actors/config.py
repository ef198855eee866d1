"""What one worker is told at its start; composed into the cluster's config."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.actors.engine.config import EngineConfig
from baton.transfer.config import TransferConfig


class LogConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["json", "text"] = "json"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TracingConfig(BaseModel):
    """Where spans go. Without an endpoint there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s]+[^/\s]$", description="of a collector, e.g. http://127.0.0.1:4318"
    )
    sample: float = Field(
        default=1.0, ge=0, le=1, description="share of the traces that begin here; a caller's is obeyed"
    )


class WorkerConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="a directory, a .gguf file, or package:NAME for a GGUF inside a Python package")
    served_name: str = Field(description="the model's name in the HTTP API")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description='"auto", "cpu", "cuda" or "cuda:N"; auto takes a GPU where there is one',
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and KV; auto = bfloat16 on a GPU, float32 on a CPU"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy = random weights, for benchmarks")
    kv_memory_gb: float = Field(1.0, gt=0, description="for KV blocks on a CPU, where engine.num_blocks is unset")
    gpu_memory_share: float = Field(0.9, gt=0, le=1, description="share of the GPU that weights and KV may fill")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the engine; None = what torch finds")
    tensor_parallel: int = Field(
        1, ge=1, le=8, description="ranks that share the model, each a process with a GPU of its own, on one node"
    )
    grammar_compile_s: int = Field(10, ge=1, description="processor seconds that compiling one grammar may take")
    grammar_compile_mb: int = Field(1024, ge=64, description="MiB of memory that compiling one grammar may take")
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
