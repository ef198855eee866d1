"""Draft heads in a worker's engine, loaded from files: no text changes, and a hand-over drafts as one engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draft_heads as heads
import pytest
import torch
from safetensors.torch import save_file

from baton.actors.build import BuiltEngine, build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.transfer.layout import check_layout

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, with an MTP module beside its weights, and heads of the three other kinds."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    target = heads.target()
    target.config.num_nextn_predict_layers = 1
    target.save_pretrained(folder / "target")
    save_file(heads.mtp_tensors(with_head=False), folder / "target" / "mtp.safetensors")
    draft_vocab = {"draft_vocab_size": len(heads.DRAFT_IDS)}
    heads.write(folder / "eagle3", heads.eagle3_tensors(), heads.CONFIG | draft_vocab)
    heads.write(folder / "eagle", heads.eagle_tensors(num_layers=1), heads.CONFIG)
    heads.write(folder / "medusa", heads.medusa_tensors(K, 1), {"medusa_num_heads": K, "medusa_num_layers": 1})
    return folder


SPECULATIONS: dict[str, tuple[str, str | None]] = {
    "eagle3": ("eagle", "eagle3"),
    "eagle": ("eagle", "eagle"),
    "mtp": ("mtp", None),
    "medusa": ("medusa", "medusa"),
}


def engine(folder: Path, kind: str | None, **settings: Any) -> BuiltEngine:
    speculation: dict[str, Any] | None = None
    if kind is not None:
        drafter, head = SPECULATIONS[kind]
        speculation = {"drafter": drafter, "max_draft_tokens": K, "length": "fixed"}
        speculation["model"] = None if head is None else str(folder / head)
    sizes = {"block_size": 4, "num_blocks": 160, "max_num_seqs": 4, "max_step_tokens": 24, "max_prefill_chunk": 7}
    config = EngineConfig.model_validate({**sizes, "max_context": 128, "speculation": speculation, **settings})
    model = str(folder / "target")
    return build_engine(WorkerConfig(model=model, served_name="t", device="cpu", dtype="float32", engine=config))


def requests(num: int = 4) -> list[Request]:
    made: list[Request] = []
    for i in range(num):
        sampling = SamplingParams(max_tokens=30, seed=i, temperature=0.0 if i % 2 else 0.7, ignore_eos=True)
        tokens = tuple((3 + j * j * (i + 1)) % heads.VOCAB for j in range(6 + 5 * i))
        made.append(Request(id=str(i), tokens=tokens, sampling=sampling))
    return made


def run(built: BuiltEngine, asked: list[Request]) -> dict[str, list[int]]:
    for request in asked:
        built.engine.submit(request)
    return rest(built, {request.id: [] for request in asked})


def rest(built: BuiltEngine, found: dict[str, list[int]]) -> dict[str, list[int]]:
    while built.engine.has_work:
        for update in built.engine.step():
            found[update.request_id] += update.tokens
    built.engine.check_integrity()
    assert built.engine.counts().held == 0
    return found


def hand_over(source: BuiltEngine, target: BuiltEngine, request: Request) -> list[int]:
    """Move the prompt's blocks with everything in them, as the mover would; returns the output."""
    source.engine.submit(request, export=True)
    updates = [update for _ in range(20) if source.engine.has_work for update in source.engine.step()]
    exported = updates[-1]
    skip = target.engine.open_import(request).skip_blocks
    places = target.engine.reserve_import(request.id)
    assert places is not None
    with torch.inference_mode():
        target.kv[list(places)] = source.kv[list(exported.blocks[skip:])]
    target.engine.adopt_import(request.id, exported.tokens, exported.drafts)
    source.engine.release(request.id)
    return rest(target, {request.id: list(exported.tokens)})[request.id]


@pytest.mark.parametrize("kind", SPECULATIONS)
def test_heads_change_no_text_and_draft_alike_after_a_hand_over(kind: str, folder: Path) -> None:
    expected = run(engine(folder, None), requests())
    together = engine(folder, kind)
    assert run(together, requests()) == expected
    assert sum(together.drafts.verified) > 0

    alone, source, target = (engine(folder, kind, overlap=False) for _ in range(3))
    check_layout(source.layout, target.layout)
    for request in requests():
        assert hand_over(source, target, request) == run(alone, [request])[request.id] == expected[request.id]
    assert target.drafts == alone.drafts and sum(target.drafts.accepted) > 0
    assert not source.drafts.verified
