"""Draft heads in whole engines: what is said does not change, and a hand-over changes nothing of what is drafted.

The head has learnt the tiny model's answers, so that drafts are kept and rejected in turn.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import draft_heads as heads
import pytest
import torch
from rerun import CapturedRunner
from safetensors.torch import save_file
from tiny_samples import CONFIG, Tiny

from baton.actors import build as building
from baton.actors.build import BuiltEngine, build_engine, join_engine
from baton.actors.config import WorkerConfig
from baton.actors.drafter_training.export import export_head
from baton.actors.drafter_training.train import Trainer
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.models.model import Model
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.weights import Placement

IDS = itertools.count()
NUM_TOKENS = 12


@dataclass
class Said:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


def config_of(model: Path, head: dict[str, Any] | None, k: int = 3, *, ranks: int = 1, **engine: Any) -> WorkerConfig:
    options = {"block_size": 4, "num_blocks": 64, "max_context": 64, "max_num_seqs": 4, "max_step_tokens": 32} | engine
    if head is not None:
        options["speculation"] = head | {"max_draft_tokens": k, "length": "fixed"}
    config = {"model": str(model), "served_name": "tiny", "device": "cpu", "num_threads": 1, "tensor_parallel": ranks}
    return WorkerConfig.model_validate(config | {"engine": options})


def build(model: Path, head: dict[str, Any] | None, k: int = 3, **engine: Any) -> BuiltEngine:
    return join_engine(config_of(model, head, k, **engine), model_at(model), Placement(), "v1")


@cache
def model_at(path: Path) -> Model:
    return build_model(open_checkpoint(path), Placement(), block_size=4, max_context=64)


def requests() -> list[Request]:
    """Greedy ones and seeded ones in turn."""
    return [
        Request(
            id=f"r{next(IDS)}",
            tokens=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=NUM_TOKENS, seed=3, temperature=0.8 * (i % 2), top_p=0.95, logprobs=1, ignore_eos=True
            ),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def run(built: BuiltEngine, requests: list[Request]) -> list[Said]:
    said = {request.id: Said() for request in requests}
    for one in requests:
        built.engine.submit(one)
    finish(built, said)
    return list(said.values())


def finish(built: BuiltEngine, said: dict[str, Said]) -> None:
    with torch.inference_mode():
        while built.engine.has_work:
            for update in built.engine.step():
                said[update.request_id].tokens += update.tokens
                said[update.request_id].logprobs += [entry.chosen for entry in update.logprobs or ()]
    built.engine.check_integrity()
    counts = built.engine.counts()
    assert counts.held == 0 and counts.free + counts.cached == counts.total


def hand_over(prefill: BuiltEngine, decode: BuiltEngine, one: Request) -> Said:
    """Compute the prompt on one engine, copy its blocks as the mover does, and decode on the other."""
    opened = decode.engine.open_import(one)
    prefill.engine.submit(one, export=True)
    said = Said()
    with torch.inference_mode():
        while not (last := [u for u in prefill.engine.step() if u.finish is not None]):
            pass
    [update] = last
    said.tokens += update.tokens
    said.logprobs += [entry.chosen for entry in update.logprobs or ()]
    places = decode.engine.reserve_import(one.id)
    assert places is not None
    blocks = update.blocks[opened.skip_blocks : opened.num_blocks]
    with torch.inference_mode():
        decode.kv[list(places)] = prefill.kv[list(blocks)]
    prefill.engine.release(one.id)
    decode.engine.adopt_import(one.id, update.tokens, update.drafts)
    finish(decode, {one.id: said})
    return said


LONG = list(range(20, 41))
PROMPTS = [[5, 9, 33, 60, 7, 8, 11], LONG, [90, 3], [*LONG, 70, 71, 72, 73, 74, 75]]  # the last finds a prefix


@pytest.fixture(scope="module")
def all_heads(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By name: what `speculation` says of it. The first two are trained, the others random."""
    folder = tmp_path_factory.mktemp("heads")
    made: dict[str, dict[str, Any]] = {}
    for kind, drafter in (("eagle3", "eagle"), ("mtp", "mtp")):
        head = tiny.head(kind)
        Trainer(head, tiny.target, tiny.samples, replace(CONFIG, epochs=12)).run(48)
        export_head(head, head.config, tiny.model.config, tiny.target.target_ids, folder / kind)
        made[kind] = {"drafter": drafter, "model": str(folder / kind)}
    torch.manual_seed(2)
    path = heads.write(folder / "eagle", heads.eagle_tensors(2), heads.CONFIG | {"num_hidden_layers": 2})
    made["eagle"] = {"drafter": "eagle", "model": str(path)}
    path = heads.write(folder / "medusa", heads.medusa_tensors(4, 1), {"medusa_num_heads": 4, "medusa_num_layers": 1})
    made["medusa"] = {"drafter": "medusa", "model": str(path)}
    return made


HEADS = ("eagle3", "mtp", "eagle", "medusa")


@pytest.mark.parametrize("name", HEADS)
def test_the_same_is_said_with_and_without_a_head(name: str, tiny: Tiny, all_heads: dict[str, dict[str, Any]]):
    plain = build(tiny.path, None)
    expected = run(plain, requests())
    for k, chunk, has_cache in ((1, 32, False), (4, 5, True)):
        built = build(
            tiny.path, all_heads[name], k, max_prefill_chunk=chunk, max_step_tokens=20, prefix_cache=has_cache
        )
        together = run(built, requests())
        again = run(built, requests()) if has_cache else []
        for found, wanted in zip((*together, *again), (expected * 2)[: len(together) + len(again)], strict=True):
            assert found.tokens == wanted.tokens
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
        assert built.drafts.verified[0] > 0
        if name in ("eagle3", "mtp"):
            assert 0 < built.drafts.accepted[0] < built.drafts.verified[0]


@pytest.mark.parametrize("name", HEADS)
def test_after_a_hand_over_as_much_is_kept_as_without(name: str, tiny: Tiny, all_heads: dict[str, dict[str, Any]]):
    alone = build(tiny.path, all_heads[name])
    prefill, decode = build(tiny.path, all_heads[name], max_step_tokens=8), build(tiny.path, all_heads[name])
    assert prefill.layout == decode.layout
    for one, same in zip(requests(), requests(), strict=True):
        [expected] = run(alone, [one])
        found = hand_over(prefill, decode, same)
        assert found.tokens == expected.tokens
    assert (decode.drafts.verified, decode.drafts.accepted) == (alone.drafts.verified, alone.drafts.accepted)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_preemption_changes_nothing(name: str, tiny: Tiny, all_heads: dict[str, dict[str, Any]]):
    expected = run(build(tiny.path, None), requests())
    built = build(tiny.path, all_heads[name], num_blocks=20, headroom_blocks=0)
    asked = requests()
    for one in asked:
        built.engine.submit(one)
    said = {one.id: Said() for one in asked}
    have_all_run = False
    # 20 blocks hold the prompts, but not what they grow to.
    while not have_all_run or not built.engine.num_waiting:
        for update in built.engine.step():
            said[update.request_id].tokens += update.tokens
        have_all_run |= built.engine.num_running == len(asked)
    finish(built, said)
    assert [one.tokens for one in said.values()] == [one.tokens for one in expected]


def test_two_ranks_keep_what_one_keeps(tiny: Tiny, all_heads: dict[str, dict[str, Any]]):
    alone = build(tiny.path, all_heads["eagle3"])
    expected = run(alone, requests())
    split = build_engine(config_of(tiny.path, all_heads["eagle3"], ranks=2))
    try:
        assert [said.tokens for said in run(split, requests())] == [said.tokens for said in expected]
        assert (split.drafts.verified, split.drafts.accepted) == (alone.drafts.verified, alone.drafts.accepted)
    finally:
        split.ranks.close()


def test_workers_with_different_heads_do_not_hand_over(tiny: Tiny, all_heads: dict[str, dict[str, Any]]):
    layouts = {name: build(tiny.path, head).layout for name, head in (("none", None), *all_heads.items())}
    with_layers = [layouts[name] for name in ("none", "eagle3", "mtp", "eagle")]
    assert len({str(layout) for layout in with_layers}) == 4


def test_a_models_own_module_drafts_without_a_folder(tmp_path: Path):
    torch.manual_seed(5)
    reference = heads.target()
    reference.config.num_nextn_predict_layers = 1
    reference.save_pretrained(tmp_path)
    save_file(heads.mtp_tensors(with_head=False), tmp_path / "mtp.safetensors")
    built, plain = build(tmp_path, {"drafter": "mtp"}), build(tmp_path, None)
    for found, wanted in zip(*(run(b, requests()) for b in (built, plain)), strict=True):
        assert found.tokens == wanted.tokens
    assert built.drafts.verified[0] > 0


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "medusa"])
def test_captured_steps_draft_and_verify_the_same(
    kind: str, tiny: Tiny, all_heads: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tiny.path, all_heads[kind])
    said = run(plain, requests())
    made: list[CapturedRunner] = []

    class Noted(CapturedRunner):
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            made.append(self)

    monkeypatch.setattr(building, "SpeculativeRunner", Noted)
    captured = build(tiny.path, all_heads[kind])
    for found, wanted in zip(run(captured, requests()), said, strict=True):
        assert found.tokens == wanted.tokens
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
    assert captured.drafts == plain.drafts
    assert made[0].num_decode_replays > 0
