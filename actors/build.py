"""Builds a worker's engine from its config: weights, KV memory, runner, and the layout that peers must share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from baton.actors.config import WorkerConfig
from baton.actors.engine.batch import Runner
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.engine import Engine
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_config import ModelConfig
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.weights import Placement
from baton.kernels.attention import AttentionBackend, AttentionShape, GraphSize
from baton.kernels.attention_split import SplitAttention
from baton.kernels.attention_torch import TorchAttention
from baton.transfer.wire import KVLayout

log = logging.getLogger(__name__)
_SAMPLE_BYTES = 1 << 20  # of each weight file's two ends, for the fingerprint


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    kv: torch.Tensor  # contiguous, first dimension = blocks
    layout: KVLayout
    num_blocks: int
    max_context: int


@torch.inference_mode()
def build_engine(config: WorkerConfig) -> BuiltEngine:
    """Load the model and allocate the KV cache.

    Raises ModelNotFoundError, CheckpointError, UnsupportedModelError or KVMemoryError.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    placement = _placement(config)
    path = resolve_model(config.model)
    is_dummy = config.load_format == "dummy"
    checkpoint = open_checkpoint(path, dummy=is_dummy)
    block_size = config.engine.block_size
    max_context = config.engine.max_context or checkpoint.config.max_context
    model = build_model(checkpoint, placement, block_size=block_size, max_context=max_context)
    version = "dummy" if is_dummy else weights_version(path)
    return join_engine(config, model, placement, version)


def join_engine(config: WorkerConfig, model: Model, placement: Placement, version: str) -> BuiltEngine:
    """Give a model in memory its KV cache, runner and engine. One model may serve several."""
    block_size = config.engine.block_size
    max_context = config.engine.max_context or model.config.max_context
    spec = KVSpec.of_model(model.config, block_size, placement.dtype)
    num_blocks = config.engine.num_blocks or spec.num_blocks(_kv_bytes(config, torch.device(placement.device)))
    kv = spec.allocate(num_blocks, placement.device)
    runner = _runner(model, kv, config.engine.max_num_seqs, max_context)
    overlap = torch.device(placement.device).type == "cuda" if config.engine.overlap is None else config.engine.overlap
    engine = Engine(
        config.engine.model_copy(update={"overlap": overlap}),
        runner,
        num_blocks=num_blocks,
        max_context=max_context,
        eos_token_ids=frozenset(model.config.eos_ids),
    )
    layout = kv_layout(config.served_name, version, model.config, spec)
    return BuiltEngine(engine, kv, layout, num_blocks, max_context)


def _runner(model: Model, kv: torch.Tensor, num_slots: int, max_context: int) -> Runner:
    if not kv.is_cuda:
        return TorchRunner(model, kv, num_slots=num_slots, make_attention=TorchAttention)
    from baton.actors.engine.runner_graph import GraphRunner

    graph = GraphSize(num_slots, min(num_slots * -(-max_context // kv.shape[3]), 4 * kv.shape[0]))
    make_attention = gpu_attention(model.shapes, kv.dtype, kv.device, graph)
    runner = GraphRunner(model, kv, num_slots=num_slots, max_blocks=graph.max_blocks, make_attention=make_attention)
    with Progress(TextColumn("capturing decode graphs"), BarColumn(), MofNCompleteColumn(), transient=True) as progress:
        task = progress.add_task("", total=None)
        runner.capture(lambda done, total: progress.update(task, completed=done, total=total))
    return runner


def gpu_attention(
    shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device, largest: GraphSize
) -> Callable[[AttentionShape, GraphSize | None], AttentionBackend]:
    """Choose what is fastest where it runs: our Triton kernels for decode rows, FlashInfer for prefill rows.

    Without FlashInfer, or with heads or a dtype that it does not serve, Triton does both.
    """
    from baton.kernels.attention_triton import TritonAttention

    def triton(shape: AttentionShape, graph: GraphSize | None) -> AttentionBackend:
        return TritonAttention(shape, device, graph)

    half = dtype in (torch.bfloat16, torch.float16)
    if not half or find_spec("flashinfer") is None or any(shape.head_dim not in (64, 128, 256) for shape in shapes):
        log.info("attention: Triton (FlashInfer is absent, or does not serve %s with these heads)", dtype)
        return triton
    from baton.kernels.attention_flashinfer import FlashInferAttention, FlashInferWorkspace
    from baton.kernels.attention_gathered import GatheredPrefill

    workspace = FlashInferWorkspace.allocate(shapes[0], largest, device)
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    log.info("attention: Triton for decode, FlashInfer for prefill (%s)", "gathered FA3" if is_hopper else "paged FA2")

    def split(shape: AttentionShape, graph: GraphSize | None) -> AttentionBackend:
        if graph is not None:
            return triton(shape, graph)
        if is_hopper:
            return SplitAttention(triton(shape, None), GatheredPrefill(shape, dtype, workspace.floats))
        return SplitAttention(triton(shape, None), FlashInferAttention(shape, dtype, workspace))

    return split


def kv_layout(model: str, version: str, config: ModelConfig, spec: KVSpec) -> KVLayout:
    """Describe what a block's bytes mean, for the handshake of two workers."""
    return KVLayout(
        model=model,
        weights_version=version,
        dtype=str(spec.dtype),
        block_size=spec.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        attention_scale=config.attention_scale,
        rope="; ".join(sorted({str(layer.rope) for layer in config.layers})),
    )


def weights_version(path: Path) -> str:
    """Fingerprint the weight files by size and both ends: cheap, and equal on every host that has the same files."""
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), path / "config.json"])
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def _placement(config: WorkerConfig) -> Placement:
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.device == "auto" else config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # a thread's own: this one is about to load and capture
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return Placement(getattr(torch, name), str(device))


def _kv_bytes(config: WorkerConfig, device: torch.device) -> int:
    """Memory for KV blocks, after the weights are in place."""
    if device.type == "cpu":
        return int(config.kv_memory_gb * 1e9)
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - config.gpu_memory_share) * total)
