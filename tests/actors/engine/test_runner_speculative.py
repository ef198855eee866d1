"""Drafted steps on a real (tiny) model: tokens and log-probabilities are those of one token a step."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch

from baton.actors.engine.config import EngineConfig
from baton.actors.engine.draft_length import FixedLengths
from baton.actors.engine.drafters.build import DraftParts
from baton.actors.engine.drafters.drafter import Drafter
from baton.actors.engine.drafters.ngram import NgramDrafter
from baton.actors.engine.drafters.suffix import SuffixDrafter
from baton.actors.engine.engine import Engine
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_config import LayerConfig, ModelConfig, RopeConfig
from baton.actors.engine.models.llama import Llama
from baton.actors.engine.request import Request, SamplingParams, TokenLogprobs
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.runner_speculative import SpeculativeRunner
from baton.actors.engine.speculation import DraftSpeculation, Speculation
from baton.actors.engine.vocabulary import Vocabulary
from baton.actors.engine.weights import DummyWeights, Placement, Weights
from baton.kernels.attention_torch import TorchAttention
from tests.actors.engine.scripted import NumRight, Scripted, all_right, none_right, some_right

VOCAB, EOS, BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT = 258, 256, 4, 128, 256
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerConfig(RopeConfig(theta=1e4)),) * 2,
    rms_norm_eps=1e-5,
    attention_scale=8**-0.5,
    activation="silu",
    max_context=MAX_CONTEXT,
    eos_ids=(EOS,),
    bos_id=None,
    tie_embeddings=True,
    attention_bias=False,
    norm_offset=0.0,
)
GRAMMARS = GrammarStore(lambda: Vocabulary((*(bytes([i]) for i in range(256)), b"", b""), (EOS,)), VOCAB)
Seen = dict[str, tuple[list[int], list[TokenLogprobs], str | None]]


class Loud(DummyWeights):
    """Weights large enough that the next token depends on what stands before it."""

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dest: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            dest.fill_(1.0)
        else:
            dest.normal_(std=0.35)


@cache
def model() -> Llama:
    torch.manual_seed(7)
    return Llama(CONFIG, Weights(Loud(), Placement()), BLOCK_SIZE, MAX_CONTEXT)


def serve(requests: list[Request], speculation: Speculation | None, **config: Any) -> Seen:
    """All that each request's client sees, on an engine of its own."""
    return run(make_engine(speculation, **config), requests)


def make_engine(
    speculation: Speculation | None, parts: DraftParts | None = None, num_blocks: int = NUM_BLOCKS, **config: Any
) -> Engine:
    parts = parts or DraftParts(model())
    spec = KVSpec.of_model(CONFIG, BLOCK_SIZE, torch.float32, num_draft_layers=parts.num_layers)
    kind = TorchRunner if speculation is None else SpeculativeRunner
    kv = spec.allocate(num_blocks)
    runner = kind(parts.model, kv, num_slots=8, make_attention=TorchAttention, grammars=GRAMMARS)
    if isinstance(runner, SpeculativeRunner):
        runner.stage, runner.max_context = parts.stage, MAX_CONTEXT
    settings = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_step_tokens": 64, "overlap": False} | config
    return Engine(
        EngineConfig.model_validate(settings),
        runner,
        num_blocks=num_blocks,
        max_context=MAX_CONTEXT,
        eos_token_ids=frozenset((EOS,)),
        speculation=speculation,
    )


def run(engine: Engine, requests: list[Request]) -> Seen:
    seen: Seen = {request.id: ([], [], None) for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for update in engine.step():
            tokens, logprobs, _ = seen[update.request_id]
            assert update.logprobs is None or len(update.logprobs) == len(update.tokens)
            seen[update.request_id] = ([*tokens, *update.tokens], [*logprobs, *(update.logprobs or ())], update.finish)
    engine.check_integrity()
    assert engine.counts().held == 0
    return seen


SCRIPTS = {"all right": all_right, "none right": none_right, "some right": some_right}
scripts = pytest.mark.parametrize("num_right", SCRIPTS.values(), ids=SCRIPTS.keys())


def prompt(length: int, seed: int = 3) -> tuple[int, ...]:
    return tuple(97 + (i * i * seed + i) % 23 for i in range(length))


def request(id: str, length: int = 9, grammar: str = "", **sampling: Any) -> Request:
    settings: dict[str, Any] = {"max_tokens": 24, "seed": 5, "temperature": 0.0} | sampling
    return Request(id=id, tokens=prompt(length), sampling=SamplingParams(**settings), grammar=grammar)


def mixed() -> list[Request]:
    """One batch of everything that changes what is sampled."""
    return [
        request("greedy", logprobs=2),
        request("seeded", 13, temperature=0.9, seed=11, logprobs=0),
        request("filtered", 17, temperature=1.3, seed=2**63 + 5, top_k=40, top_p=0.9, min_p=0.01),
        request("penalised", 6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logprobs=1),
        request("seeded and penalised", 5, temperature=0.8, seed=4, frequency_penalty=1.5),
        request("biased", 8, logit_bias={100: 4.0, 101: -90.0}),
        request("late end", 7, temperature=1.0, min_tokens=9, stop_token_ids=tuple(range(60, 200)), logprobs=0),
        request("short", 4, max_tokens=2),
    ]


@cache
def plain() -> Seen:
    return serve(mixed(), None)


def speculation(drafter: Drafter, k: int) -> DraftSpeculation:
    return DraftSpeculation(drafter, FixedLengths(), k)


def scripted(num_right: NumRight, expected: Seen) -> Scripted:
    return Scripted(num_right, lambda request: [*expected[request.id][0], *[0] * 20], VOCAB)


def assert_same(seen: Seen, expected: Seen) -> None:
    for id, (tokens, logprobs, finish) in expected.items():
        assert seen[id][0] == tokens, id
        assert seen[id][2] == finish
        assert len(seen[id][1]) == len(logprobs)
        for here, there in zip(seen[id][1], logprobs, strict=True):
            assert here.chosen == pytest.approx(there.chosen, abs=1e-4) and here.chosen < 0
            assert here.top_ids == there.top_ids
            assert here.top == pytest.approx(there.top, abs=1e-4)


@scripts
@pytest.mark.parametrize("k", range(1, 9))
def test_drafts_change_neither_text_nor_logprobs(k: int, num_right: NumRight) -> None:
    drafting = speculation(scripted(num_right, plain()), k)
    assert_same(serve(mixed(), drafting), plain())
    accepted = sum(drafting.counts.accepted)
    assert (accepted == 0) == (num_right is none_right)
    if num_right is all_right:
        assert accepted > 0.9 * sum(drafting.counts.verified)  # not all: nobody knows what follows an end


@pytest.mark.parametrize(
    ("chunk", "prefix_cache", "overlap"), [(3, True, True), (8, False, False), (8, True, True), (64, True, False)]
)
@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_lookup_drafters_change_nothing(make: type[Drafter], chunk: int, prefix_cache: bool, overlap: bool) -> None:
    drafter = make(1)  # pyright: ignore[reportCallIssue]
    drafting = speculation(drafter, 5)
    seen = serve(mixed(), drafting, max_prefill_chunk=chunk, prefix_cache=prefix_cache, overlap=overlap)
    assert_same(seen, plain())
    assert sum(drafting.counts.verified) > 0


TIME = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "(ab|cd)[0-9]{3}x?"}})
THINKING = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [
    {"type": "any_text", "excludes": ["</t>"], "max_tokens": 6},
    {"type": "const_string", "value": "</t>"},
    {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}},
                                            "required": ["a"], "additionalProperties": False}},
]}})  # fmt: skip


def constrained() -> list[Request]:
    return [
        request("time", grammar=TIME, logprobs=0),
        request("random time", 12, grammar=TIME, temperature=1.5, seed=3),
        request("thinking", 7, grammar=THINKING, max_tokens=60),
        request("random thinking", 10, grammar=THINKING, temperature=1.2, seed=9, max_tokens=60),
        request("free", 5),
    ]


@cache
def plain_constrained() -> Seen:
    return serve(constrained(), None)


@scripts
@pytest.mark.parametrize("k", range(1, 9))
def test_grammars_hold_inside_the_drafts(k: int, num_right: NumRight) -> None:
    """Entry 14: markers, openings and the end itself fall inside the window; nothing drafted behind the end counts."""
    expected = plain_constrained()
    assert_same(serve(constrained(), speculation(scripted(num_right, expected), k)), expected)
    for id in ("thinking", "random thinking"):
        text = bytes(token for token in expected[id][0] if token < 256)
        assert json.loads(text.split(b"</t>", 1)[1]).keys() == {"a"} and expected[id][2] == "stop"


def test_a_draft_that_the_grammar_forbids_is_rejected_there_and_nowhere_else() -> None:
    """Entry 14 too: a drafter that always proposes a markdown fence."""

    class Fence:
        def propose(self, sequence: Any, num: int) -> list[int]:
            return [*b"```json\n"][:num]

        def forget(self, sequence: Any) -> None:
            pass

    drafting = speculation(Fence(), 8)
    assert_same(serve(constrained()[:4], drafting), {k: v for k, v in plain_constrained().items() if k != "free"})
