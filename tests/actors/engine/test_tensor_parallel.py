"""Two processes that share a model say what one says: logits of every family, and requests through the real engine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from model_cases import BLOCK_SIZE, NUM_BLOCKS, all_logits, scattered_blocks
from test_models import CASES, NUM_TOKENS, build

from baton.actors.build import build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.batch import Row
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_config import UnsupportedModelError
from baton.actors.engine.request import Request, SamplingParams, TokenLogprobs
from baton.actors.engine.weights import Placement
from baton.actors.ranks import RankProcesses, Seat
from baton.kernels.collective import Collective, NoCollective

CPU = torch.device("cpu")


# Logits.


def case_logits(path: Path, collective: Collective) -> list[torch.Tensor]:
    """Logits of a prompt at once, of the same in chunks, and of a decode beside a prefill."""
    model = build_model(open_checkpoint(path), Placement(collective=collective), block_size=BLOCK_SIZE, max_context=128)
    spec = KVSpec.of_model(model.config, BLOCK_SIZE, torch.float32, collective.world)
    kv = spec.allocate(NUM_BLOCKS)
    assert kv.shape[4] == 4 // collective.world
    tokens = torch.randint(0, 97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    [blocks, others] = scattered_blocks(NUM_TOKENS, seed=4, num_rows=2)
    steps = [[Row(0, 0, NUM_TOKENS, tokens, others, True)]]
    for start, end in ((0, 7), (7, 33), (33, NUM_TOKENS - 1)):
        steps.append([Row(0, start, end - start, tokens[start:end], blocks, True)])
    decode = Row(0, NUM_TOKENS - 1, 1, tokens[-1:], blocks, True)
    steps.append([decode, Row(1, 0, NUM_TOKENS, tokens, others, True)])
    return [all_logits(model, rows, kv) for rows in steps]


def follow_logits(config: WorkerConfig, seat: Seat) -> None:
    collective = seat.take(CPU)
    torch.set_num_threads(1)
    for path in sorted(Path(config.model).iterdir()):
        case_logits(path, collective)
    with suppress(EOFError):
        seat.line.recv_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints whose heads divide by 2 and 4; their vocabulary, 97, does not."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        build(case, num_attention_heads=8, num_key_value_heads=4).save_pretrained(folder / case)
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["tp2", "tp4"])
def split_logits(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[torch.Tensor]]:
    config = WorkerConfig(model=str(folder), served_name="tiny", tensor_parallel=request.param)
    ranks = RankProcesses(config, CPU, follow_logits)
    try:
        return {path.name: case_logits(path, ranks.collective) for path in sorted(folder.iterdir())}
    finally:
        ranks.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_one_rank(case: str, folder: Path, split_logits: dict[str, list[torch.Tensor]]) -> None:
    whole = case_logits(folder / case, NoCollective())
    for split, expected in zip(split_logits[case], whole, strict=True):
        torch.testing.assert_close(split, expected, atol=1e-4, rtol=0)


# Requests.


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]


LENGTHS = (1, 7, 16, 33, 90, 150)  # about a block, a chunk and a step
SAMPLINGS = (
    SamplingParams(max_tokens=12, seed=0, temperature=0.0),
    SamplingParams(max_tokens=12, seed=1, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=12, seed=2, temperature=1.0, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=12, seed=2**64 - 3, temperature=0.8, min_p=0.02, presence_penalty=0.5),
    SamplingParams(max_tokens=12, seed=4, temperature=0.0, repetition_penalty=1.3, logit_bias={5: 2.0}, min_tokens=12),
)
REQUESTS = [
    Request(id=f"{length}/{i}", tokens=tuple((length + i + 7 * j * j) % 97 for j in range(length)), sampling=sampling)
    for length in LENGTHS
    for i, sampling in enumerate(SAMPLINGS)
]


def worker_config(path: Path, tensor_parallel: int, *, device: str = "cpu", **engine: object) -> WorkerConfig:
    settings = {"num_blocks": 80, "max_num_seqs": 6, "max_step_tokens": 64, "max_prefill_chunk": 40, "max_context": 200}
    return WorkerConfig(
        model=str(path),
        served_name="tiny",
        device=device,
        dtype="float32",
        num_threads=1,
        tensor_parallel=tensor_parallel,
        engine=EngineConfig.model_validate({**settings, **engine}),
    )


def answers(config: WorkerConfig) -> dict[str, Answer]:
    """Ask everything at once: six run at a time, and 80 blocks hold fewer than what six can grow to."""
    built = build_engine(config)
    try:
        found = {request.id: Answer([], []) for request in REQUESTS}
        for request in REQUESTS:
            built.engine.submit(request)
        while built.engine.has_work:
            for update in built.engine.step():
                found[update.request_id].tokens += update.tokens
                found[update.request_id].logprobs += update.logprobs or ()
        built.engine.check_integrity()
        return found
    finally:
        built.ranks.close()


@pytest.mark.parametrize(
    ("case", "overlap", "device"),
    [("llama", False, "cpu"), ("qwen3", True, "cpu"), pytest.param("qwen3", True, "cuda", marks=pytest.mark.multi_gpu)],
)
def test_requests_get_the_same_tokens_as_from_one_rank(case: str, overlap: bool, device: str, folder: Path) -> None:
    """With overlap, or with a draft model that is split likewise."""
    whole = answers(worker_config(folder / case, 1, device=device))
    speculation = None if overlap else {"drafter": "draft_model", "model": str(folder / case), "length": "fixed"}
    split = answers(worker_config(folder / case, 2, device=device, overlap=overlap, speculation=speculation))
    for id, expected in whole.items():
        assert split[id].tokens == expected.tokens, id
        assert [entry.top_ids for entry in split[id].logprobs] == [entry.top_ids for entry in expected.logprobs]
        for found, wanted in zip(split[id].logprobs, expected.logprobs, strict=True):
            assert found.top == pytest.approx(wanted.top, abs=1e-3)
    assert sum(len(answer.tokens) for answer in whole.values()) > 250


# What cannot be split.


def test_heads_that_do_not_divide_are_refused_with_the_fix(folder: Path) -> None:
    message = "tensor_parallel = 8 cannot split the model's num_kv_heads = 4; set it to a divisor of 4"
    with pytest.raises(UnsupportedModelError, match=message):
        build_engine(worker_config(folder / "llama", 8))
