"""Builds a worker's engine from its config: weights, KV memory, runner, and the layout that peers must share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from baton.actors.ceilings import Ceilings, measure_ceilings
from baton.actors.config import WorkerConfig
from baton.actors.engine.batch import Runner
from baton.actors.engine.checkpoint import Checkpoint, build_model, open_checkpoint
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.drafters.build import DraftParts, make_parts, make_speculation
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import DraftModule
from baton.actors.engine.engine import Engine
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_config import ModelConfig, UnsupportedModelError
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.runner_ranks import follow
from baton.actors.engine.runner_speculative import SpeculativeGraphRunner, SpeculativeRunner
from baton.actors.engine.speculation import DraftCounts
from baton.actors.engine.vocabulary import load_vocabulary
from baton.actors.engine.weights import Placement
from baton.actors.engine.work import MeteredRunner, ModelCost, WorkDone
from baton.actors.grammar_process import CompileLimits, CompilerSeat
from baton.actors.grammars import Grammars, NoGrammars, WorkerGrammars
from baton.actors.ranks import NoRanks, Ranks, Seat, start_ranks
from baton.kernels.attention import AttentionBackend, AttentionShape, GraphSize
from baton.kernels.attention_split import SplitAttention
from baton.kernels.attention_torch import TorchAttention
from baton.kernels.collective import Collective
from baton.transfer.factory import MoverPlace, make_rank_mover
from baton.transfer.mover import KVMover
from baton.transfer.ranked_mover import Join, RankServer
from baton.transfer.wire import KVLayout

log = logging.getLogger(__name__)
_SAMPLE_BYTES = 1 << 20  # of each weight file's two ends, for the fingerprint
_MAX_VERIFY_ROWS = 512  # a draft counts: where so many rows decode, verifying more hardly pays


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    kv: torch.Tensor  # contiguous, first dimension = blocks
    layout: KVLayout
    num_blocks: int
    max_context: int
    ranks: Ranks = field(default_factory=NoRanks)  # the caller closes them
    grammars: Grammars = field(default_factory=NoGrammars)  # and these
    work: WorkDone = field(default_factory=WorkDone)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    ceilings: Ceilings | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank needs beside its part of the model to run batches."""

    kv: torch.Tensor
    spec: KVSpec
    runner: Runner
    grammars: GrammarStore
    module: DraftModule | None


@torch.inference_mode()
def build_engine(config: WorkerConfig) -> BuiltEngine:
    """Load the model and allocate the KV cache, on every rank.

    Raises ModelNotFoundError, CheckpointError, UnsupportedModelError, KVMemoryError or RankLost.
    """
    checkpoint = _open(config)
    checkpoint.config.check_splits_over(config.tensor_parallel)  # before processes start that would all fail
    ranks = start_ranks(config, _device(config, rank=0), follow_engine)
    try:
        placement = _placement(config, ranks.collective)
        ceilings = measure_ceilings(placement.device, placement.dtype)  # before KV takes the memory
        model = _load(config, checkpoint, placement)
        version = "dummy" if config.load_format == "dummy" else weights_version(resolve_model(config.model))
        return replace(join_engine(config, model, placement, version, ranks), ceilings=ceilings)
    except BaseException:
        ranks.close()
        raise


@torch.inference_mode()
def follow_engine(config: WorkerConfig, seat: Seat) -> None:
    """The life of a process that is a rank other than 0: build this rank's share, run what rank 0 sends."""
    collective = seat.take(_device(config, seat.rank))
    try:
        placement = _placement(config, collective)
        model = _load(config, _open(config), placement)
        share = _share(config, model, placement, seat.agree)
        Thread(target=_serve_mover, args=(config, seat, share.kv), name="kv-mover", daemon=True).start()
        follow(share.runner, seat.line.recv_bytes)
    except EOFError:
        pass  # rank 0 has closed the line
    finally:
        collective.abort()  # else NCCL may wait, at this process's exit, for ranks that are gone


def _serve_mover(config: WorkerConfig, seat: Seat, kv: torch.Tensor) -> None:
    """Move this rank's KV as rank 0 says. What ends this ends the rank, and so the worker."""

    def make(join: Join) -> KVMover:
        place = MoverPlace(join.host)
        return make_rank_mover(config.transfer, kv, join.worker, place, rank=seat.rank, world=seat.world)

    try:
        RankServer(seat.mover_line, make).run()
    except (EOFError, OSError):
        pass  # rank 0 has closed the line
    except BaseException:
        log.exception("the mover of rank %d failed", seat.rank)
        os._exit(1)


def join_engine(
    config: WorkerConfig, model: Model, placement: Placement, version: str, ranks: Ranks | None = None
) -> BuiltEngine:
    """Give a model in memory its KV cache, runner and engine. One model may serve several, if it is whole."""
    ranks = ranks or NoRanks()
    max_context = config.engine.max_context or model.config.max_context
    share = _share(config, model, placement, ranks.agree)
    overlap = placement.device.type == "cuda" if config.engine.overlap is None else config.engine.overlap
    num_blocks = share.kv.shape[0]
    cost, work = ModelCost.of_model(model.config, placement.dtype.itemsize, config.tensor_parallel), WorkDone()
    speculation = make_speculation(config.engine.speculation, share.module, share.grammars, overlap=overlap)
    engine = Engine(
        config.engine.model_copy(update={"overlap": overlap}),
        MeteredRunner(ranks.lead(share.runner), cost, work),
        num_blocks=num_blocks,
        max_context=max_context,
        eos_token_ids=frozenset(model.config.eos_ids),
        speculation=speculation,
    )
    layout = kv_layout(config, version, model.config, share.spec)
    grammars = WorkerGrammars(share.grammars, lambda: _compiler_seat(config, model.config))
    return BuiltEngine(engine, share.kv, layout, num_blocks, max_context, ranks, grammars, work, speculation.counts)


def _compiler_seat(config: WorkerConfig, model: ModelConfig) -> CompilerSeat:
    limits = CompileLimits(config.grammar_compile_s, config.grammar_compile_mb << 20)
    return CompilerSeat(resolve_model(config.model), tuple(model.eos_ids), model.vocab_size, limits)


def _open(config: WorkerConfig) -> Checkpoint:
    return open_checkpoint(resolve_model(config.model), dummy=config.load_format == "dummy")


def _load(config: WorkerConfig, checkpoint: Checkpoint, placement: Placement) -> Model:
    max_context = config.engine.max_context or checkpoint.config.max_context
    return build_model(checkpoint, placement, block_size=config.engine.block_size, max_context=max_context)


def _share(config: WorkerConfig, model: Model, placement: Placement, agree: Callable[[int], int]) -> _Share:
    """Allocate this rank's KV cache, as large as all ranks can have it, and make its runner."""
    max_context = config.engine.max_context or model.config.max_context
    parts = _draft_parts(config, model, placement, max_context)
    world = placement.collective.world
    spec = KVSpec.of_model(model.config, config.engine.block_size, placement.dtype, world, parts.num_layers)
    memory = _kv_bytes(config, placement.device)
    num_blocks = agree(config.engine.num_blocks or spec.num_blocks(memory, parts.own_block_bytes))
    kv = spec.allocate(num_blocks, placement.device)
    is_quiet = placement.collective.rank > 0
    eos_ids, vocab_size = model.config.eos_ids, model.config.vocab_size
    grammars = GrammarStore(lambda: load_vocabulary(resolve_model(config.model), eos_ids), vocab_size)
    runner = _runner(parts, kv, config.engine, max_context, grammars, is_quiet=is_quiet)
    return _Share(kv, spec, runner, grammars, parts.module)


def _draft_parts(config: WorkerConfig, model: Model, placement: Placement, max_context: int) -> DraftParts:
    engine = config.engine
    if engine.speculation is None:
        return DraftParts(model)
    context = ModuleContext(
        config=engine.speculation,
        target=model,
        target_path=resolve_model(config.model),
        placement=placement,
        block_size=engine.block_size,
        max_context=max_context,
        num_slots=engine.max_num_seqs,
        make_attention=lambda shape: own_attention(shape, placement.device),
    )
    return make_parts(context, max(engine.max_step_tokens, _graph_rows(engine)))


def own_attention(shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """Attention that needs no FlashInfer and no CUDA graph: for layers that run beside the model's own."""
    if device.type == "cpu":
        return TorchAttention(shape)
    from baton.kernels.attention_triton import TritonAttention

    return TritonAttention(shape, device, None)


def _runner(
    parts: DraftParts,
    kv: torch.Tensor,
    engine: EngineConfig,
    max_context: int,
    grammars: GrammarStore,
    *,
    is_quiet: bool,
) -> Runner:
    model, num_slots = parts.model, engine.max_num_seqs
    if not kv.is_cuda:
        kind = TorchRunner if engine.speculation is None else SpeculativeRunner
        made = kind(model, kv, num_slots=num_slots, make_attention=TorchAttention, grammars=grammars)
        return _with_stage(made, parts, engine, max_context)
    from baton.actors.engine.runner_graph import GraphLimits, GraphRunner

    num_rows = _graph_rows(engine)
    max_blocks = min(num_rows * -(-max_context // kv.shape[3]), 4 * kv.shape[0])
    make_attention = gpu_attention(model.shapes, kv.dtype, kv.device, GraphSize(num_rows, max_blocks))
    limits = GraphLimits(num_slots, num_rows, max_blocks, engine.max_step_tokens)
    kind = GraphRunner if engine.speculation is None else SpeculativeGraphRunner
    runner = kind(model, kv, limits=limits, make_attention=make_attention, grammars=grammars)
    columns = (TextColumn("capturing CUDA graphs"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("", total=None)
        runner.capture(lambda done, total: progress.update(task, completed=done, total=total))
    return _with_stage(runner, parts, engine, max_context)


def _graph_rows(engine: EngineConfig) -> int:
    """Decode rows of the largest captured step."""
    if engine.speculation is None:
        return engine.max_num_seqs
    verified = engine.max_num_seqs * (1 + engine.speculation.max_draft_tokens)
    return max(engine.max_num_seqs, min(verified, _MAX_VERIFY_ROWS))


def _with_stage(runner: TorchRunner, parts: DraftParts, engine: EngineConfig, max_context: int) -> Runner:
    if isinstance(runner, SpeculativeRunner) and engine.speculation is not None:
        runner.stage, runner.max_context = parts.stage, max_context
        runner.by_rejection = engine.speculation.acceptance == "rejection"
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


def kv_layout(config: WorkerConfig, version: str, model: ModelConfig, spec: KVSpec) -> KVLayout:
    """Describe what a block's bytes mean, for the handshake of two workers."""
    return KVLayout(
        model=config.served_name,
        weights_version=version,
        dtype=str(spec.dtype),
        block_size=spec.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads * config.tensor_parallel,
        head_dim=spec.head_dim,
        attention_scale=model.attention_scale,
        rope="; ".join(sorted({str(layer.rope) for layer in model.layers})),
        tensor_parallel=config.tensor_parallel,
        drafter=_drafter_version(config) if spec.num_layers > model.num_layers else "",
    )


def _drafter_version(config: WorkerConfig) -> str:
    speculation = config.engine.speculation
    assert speculation is not None
    return f"{speculation.drafter} {weights_version(resolve_model(speculation.model or config.model))}"


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


def _device(config: WorkerConfig, rank: int) -> torch.device:
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.device == "auto" else config.device)
    if device.type == "cpu":
        return device
    first = device.index or 0
    if (present := torch.cuda.device_count()) < first + config.tensor_parallel:
        raise UnsupportedModelError(
            f"tensor_parallel = {config.tensor_parallel} needs a GPU for each rank, and this process sees {present}; "
            f"lower it, or give the pool num_gpus: 1, which counts for each rank"
        )
    return torch.device("cuda", first + rank)


def _placement(config: WorkerConfig, collective: Collective) -> Placement:
    """Choose this rank's device and make it the calling thread's, with the threads that the config allows."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = _device(config, collective.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return Placement(getattr(torch, name), device, collective)


def _kv_bytes(config: WorkerConfig, device: torch.device) -> int:
    """Memory for KV blocks, after the weights are in place."""
    if device.type == "cpu":
        return int(config.kv_memory_gb * 1e9)
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - config.gpu_memory_share) * total)
