"""Draft modules in a running engine: their KV in the block is right wherever it came from, and no text changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_runner_speculative import (
    BLOCK_SIZE,
    CONFIG,
    MAX_CONTEXT,
    Seen,
    assert_same,
    make_engine,
    mixed,
    model,
    plain,
    prompt,
    request,
    run,
    serve,
)

from baton.actors.engine.batch import Row
from baton.actors.engine.draft_length import CostLengths, FixedLengths
from baton.actors.engine.draft_stage import DraftStage
from baton.actors.engine.drafters import draft_model
from baton.actors.engine.drafters.build import DraftParts
from baton.actors.engine.drafters.config import SpeculationConfig
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.draft_model import DraftModel
from baton.actors.engine.drafters.drafter import ModuleDrafts
from baton.actors.engine.drafters.module import DraftModule, TargetStep, draft_pass
from baton.actors.engine.drafters.taps import Taps
from baton.actors.engine.engine import Engine
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.models.llama import Llama
from baton.actors.engine.models.model import StepInputs
from baton.actors.engine.request import Request
from baton.actors.engine.speculation import DraftSpeculation
from baton.actors.engine.step_fields import step_layout
from baton.actors.engine.weights import Placement
from baton.kernels.attention_torch import TorchAttention
from baton.kernels.linear_cpu import shared_linear
from baton.kernels.rope_store import TokenPlaces


@dataclass
class Recorder:
    """Writes into its layer which tokens stand where, checks what it finds there, and proposes what it was told."""

    known: Seen
    num_right: int
    num_layers: int = 1
    taps: tuple[int, ...] = (1, 0)
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by slot
    requests: dict[int, Request] = field(default_factory=dict[int, Request])

    def advance(self, step: TargetStep) -> torch.Tensor:
        assert step.features.shape == (len(step.tokens), 2, CONFIG.hidden_size)
        assert bool((step.features.abs().sum(dim=-1) > 0).all())
        for admission in step.admissions:
            self.texts[admission.slot], self.requests[admission.slot] = list(admission.tokens), admission.request
        first = 0
        drafts: list[list[int]] = []
        for row, kept in zip(step.rows, step.kept, strict=True):
            text = self.texts[row.slot]
            following = step.following[first : first + kept].tolist()
            tokens = step.tokens[first : first + kept].tolist()
            text[row.start : row.start + kept + 1] = [tokens[0], *following] if row.sample else [*tokens, following[-1]]
            assert tokens == text[row.start : row.start + kept]
            entries = self._entries(step.kv, row.blocks)
            for i, entry in enumerate(entries[: row.start].tolist()):
                assert entry[0] == text[i]
                assert entry[1] == text[i + 1] or i % BLOCK_SIZE == BLOCK_SIZE - 1  # whoever came there first
            for i, pair in enumerate(zip(tokens, following, strict=True), row.start):
                self._write(step.kv, row.blocks, i, pair)
            first += row.num_tokens
            if row.sample:
                drafts.append(self._drafts(row.slot, row.start + kept, step.num_drafts))
        self._spoil(step)
        return torch.tensor(drafts, dtype=torch.int64).view(len(drafts), step.num_drafts)

    def _drafts(self, slot: int, end: int, num: int) -> list[int]:
        request = self.requests[slot]
        text = [*request.tokens[: request.prompt_len], *self.known[request.id][0], *[0] * 30]
        right = text[end + 1 : end + 1 + num]
        return [*right[: self.num_right], *((token + 1) % 256 for token in right[self.num_right :])]

    def _spoil(self, step: TargetStep) -> None:
        """As a later draft's KV would, where there is room."""
        for index in range(step.num_drafts - 1):
            for slot in draft_pass(step, index, BLOCK_SIZE).slots:
                if slot >= 0:
                    step.kv[slot // BLOCK_SIZE, -1, :, slot % BLOCK_SIZE] = -77.0

    def _entries(self, kv: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        layer = kv[torch.tensor(blocks), -1]  # [num_blocks, 2, block_size, heads, head_dim]
        return layer[..., 0, 0].transpose(1, 2).reshape(-1, 2).long()

    def _write(self, kv: torch.Tensor, blocks: Sequence[int], position: int, pair: tuple[int, int]) -> None:
        block, offset = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        kv[block, -1, 0, offset], kv[block, -1, 1, offset] = float(pair[0]), float(pair[1])


def engine(
    module: DraftModule, k: int, *, by_cost: bool = False, by_rejection: bool = False, **config: Any
) -> tuple[Engine, DraftSpeculation]:
    if module.taps:
        taps = Taps(model(), module.taps, 64)
        parts = DraftParts(taps.model, module, DraftStage(module, taps, keeps_guesses=by_rejection))
    else:
        parts = DraftParts(model(), module, DraftStage(module, keeps_guesses=by_rejection))
    lengths = CostLengths(k, quiet_steps=0) if by_cost else FixedLengths()
    speculation = DraftSpeculation(ModuleDrafts(), lengths, k, module_layers=module.num_layers)
    made = make_engine(speculation, parts, **config)
    made._runner.by_rejection = by_rejection  # pyright: ignore
    return made, speculation


@pytest.mark.parametrize(("chunk", "overlap"), [(3, True), (4, False), (64, True)])
@pytest.mark.parametrize(("k", "num_right"), [(1, 1), (3, 0), (5, 2), (8, 99)])
def test_a_module_sees_every_kept_token_once_and_its_following_one(
    k: int, num_right: int, chunk: int, overlap: bool
) -> None:
    """Then the same prompts again, longer, from the cache."""
    served, speculation = engine(Recorder(plain(), num_right), k, max_prefill_chunk=chunk, overlap=overlap)
    assert_same(run(served, mixed()), plain())
    assert (sum(speculation.counts.accepted) > 0) == (num_right > 0)
    for id, extra in (("greedy", 3), ("seeded", 0)):
        before = next(request for request in mixed() if request.id == id)
        longer = Request(id=id, tokens=(*before.tokens, *plain()[id][0][: 7 + extra]), sampling=before.sampling)
        recorder_text = serve([longer], None)
        assert run(served, [longer])[id][0] == recorder_text[id][0]


def test_preempted_sequences_bring_the_module_up_again() -> None:
    requests = [request(f"r{i}", 7 + i, max_tokens=20) for i in range(4)]
    expected = serve(requests, None)
    served, _ = engine(Recorder(expected, 2), 3, num_blocks=18, prefix_cache=False)
    assert_same(run(served, requests), expected)


def test_a_prefix_hit_leaves_the_last_cached_block_to_be_computed_anew() -> None:
    served, _ = engine(Recorder({"a": ([], [], None), "b": ([], [], None)}, 0), 2)
    first = Request(id="a", tokens=prompt(17), sampling=request("a", max_tokens=1).sampling)
    run(served, [first])
    fork = (*prompt(12), 200, 201, 202, 203, 204)  # shares three whole blocks, and goes on differently
    served.submit(Request(id="b", tokens=fork, sampling=request("b", max_tokens=1).sampling))
    cached = [update.cached_tokens for _ in range(3) for update in served.step()]
    assert set(cached) == {8}


def test_the_first_drafts_come_with_the_export_and_are_verified_first_by_the_importer() -> None:
    expected = serve([request("a", 10)], None)
    source, _ = engine(Recorder(expected, 99), 3)
    source.submit(request("a", 10), export=True)
    updates = [update for _ in range(3) for update in source.step()]
    drafts = updates[-1].drafts
    assert drafts == tuple(expected["a"][0][1:4])
    target, speculation = engine(Recorder(expected, 99), 3)
    target.open_import(request("a", 10))
    places = target.reserve_import("a")
    assert places is not None
    target._runner._kv[list(places)] = source._runner._kv[list(updates[-1].blocks)]  # pyright: ignore
    recorder = target._runner.stage._module  # pyright: ignore
    recorder.texts[0], recorder.requests[0] = list(prompt(10)), request("a", 10)
    target.adopt_import("a", tuple(expected["a"][0][:1]), drafts)
    tokens = [token for _ in range(30) if target.has_work for update in target.step() for token in update.tokens]
    assert tokens == expected["a"][0][1:]
    assert speculation.counts.accepted == speculation.counts.verified and speculation.counts.verified[0] == 6


def same_model() -> DraftModel:
    """The target as its own draft model: it agrees with itself."""
    return own_model(model())


def own_model(drafting: Llama) -> DraftModel:
    context = ModuleContext(
        config=SpeculationConfig(drafter="draft_model", model="unused"),
        target=model(),
        target_path=None,  # pyright: ignore[reportArgumentType]
        placement=Placement(),
        block_size=BLOCK_SIZE,
        max_context=MAX_CONTEXT,
        num_slots=8,
        make_attention=TorchAttention,
    )
    return DraftModel(drafting, context)


@pytest.mark.parametrize(("chunk", "overlap"), [(3, False), (64, True)])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_draft_model_that_is_the_target_is_always_right(k: int, chunk: int, overlap: bool) -> None:
    """Greedy and seeded alike: it samples with the noise that the target will sample with."""
    requests = [
        request("greedy", 9),
        request("seeded", 14, temperature=0.9, top_k=50, seed=3),
        request("hot", 6, temperature=1.4, seed=8),
    ]
    expected = serve(requests, None)
    served, speculation = engine(same_model(), k, max_prefill_chunk=chunk, overlap=overlap)
    assert_same(run(served, requests), expected)
    assert sum(speculation.counts.accepted) > 0.9 * sum(speculation.counts.verified)


def test_a_draft_model_changes_nothing_whatever_is_asked() -> None:
    served, speculation = engine(same_model(), 4, max_prefill_chunk=5)
    assert_same(run(served, mixed()), plain())
    assert sum(speculation.counts.accepted) > 0


def test_a_long_prompt_is_caught_up_before_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 16)
    requests = [request("long", 90, max_tokens=30), request("short", 5, max_tokens=30)]
    expected = serve(requests, None)
    served, speculation = engine(same_model(), 4)
    assert_same(run(served, requests), expected)
    assert sum(speculation.counts.accepted) > 0.9 * sum(speculation.counts.verified)


def test_a_module_learns_when_to_stop_and_text_stays_the_same() -> None:
    served, _ = engine(Recorder(plain(), 1), 4, by_cost=True)
    assert_same(run(served, mixed()), plain())


def blurred() -> Llama:
    """The target with a little noise on its head: a draft model that is often right."""
    other = copy(model())
    torch.manual_seed(3)
    weight = model().embeddings
    other.embeddings = weight + 0.05 * torch.randn_like(weight)
    other.lm_head = shared_linear(other.embeddings)
    return other


def hot(num: int) -> list[Request]:
    return [request(f"{i}", 9, max_tokens=3, temperature=1.2, top_k=5, seed=i, ignore_eos=True) for i in range(num)]


def test_rejection_keeps_the_distribution_of_what_is_drafted_and_accepts_more() -> None:
    """The second token, the first that is verified, given the first: chi-squared at the 0.1 % level."""
    requests = hot(600)
    seen: dict[bool, Seen] = {}
    rates: dict[bool, float] = {}
    for by_rejection in (False, True):
        served, speculation = engine(own_model(blurred()), 1, by_rejection=by_rejection, max_step_tokens=256)
        seen[by_rejection] = run(served, requests)
        rates[by_rejection] = sum(speculation.counts.accepted) / sum(speculation.counts.verified)
    assert_same({id: seen[False][id] for id in ("0", "1")}, serve(requests[:2], None))
    assert {id: s[0][0] for id, s in seen[False].items()} == {id: s[0][0] for id, s in seen[True].items()}
    assert seen[False] != seen[True]
    assert rates[True] > rates[False] + 0.02
    first = Counter(tokens[0] for tokens, _, _ in seen[True].values()).most_common(1)[0][0]
    second = Counter(tokens[1] for tokens, _, _ in seen[True].values() if tokens[0] == first)
    expected = next_probabilities((*prompt(9), first))
    total = second.total()
    assert total > 150 and set(second) <= set(expected)
    chi_squared = sum((second[t] - total * p) ** 2 / (total * p) for t, p in expected.items())
    assert chi_squared < 18.5  # 4 degrees of freedom


def next_probabilities(tokens: tuple[int, ...]) -> dict[int, float]:
    """What follows, by the target and the filters of `hot`."""
    kv = KVSpec.of_model(CONFIG, BLOCK_SIZE, torch.float32).allocate(8)
    row = Row(0, 0, len(tokens), tokens, list(range(8)), True)
    attention = [TorchAttention(shape) for shape in model().shapes]
    for backend in attention:
        backend.plan(step_layout([row], BLOCK_SIZE))
    at = torch.arange(len(tokens))
    with torch.inference_mode():
        hidden = model().forward(StepInputs(torch.tensor(tokens), TokenPlaces(at, at)), kv, attention)
        logits = model().logits(hidden[-1:])[0] / 1.2
    top = logits.topk(5)
    return dict(zip(top.indices.tolist(), top.values.softmax(dim=0).tolist(), strict=True))
