"""EAGLE, MTP and Medusa heads, loaded from small files of the public shape, against plain torch (draft_heads.py).

The references see whole sequences at once; ours see them in steps: a prompt in chunks, then drafts kept in part.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import draft_heads as heads
import pytest
import torch
from model_cases import BLOCK_SIZE, load
from safetensors.torch import save_file

from baton.actors.engine.batch import Row
from baton.actors.engine.drafters.build import MODULES
from baton.actors.engine.drafters.config import DrafterKind, SpeculationConfig
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import DraftModule, TargetStep
from baton.actors.engine.drafters.taps import Taps
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_config import UnsupportedModelError
from baton.actors.engine.models.llama import Llama
from baton.actors.engine.models.model import StepInputs
from baton.actors.engine.step_fields import step_layout, write_fields
from baton.actors.engine.weights import CheckpointError, Placement
from baton.kernels.attention_torch import TorchAttention
from baton.kernels.rope_store import TokenPlaces

NUM_DRAFTS = 3
BLOCKS = ([5, 2, 9, 0], [1, 7, 3, 8])  # of two sequences


@dataclass
class Steps:
    """Runs target and module as the runner would: greedy drafts, or `forced` ones, whose logits are kept."""

    model: Llama
    module: DraftModule
    forced: list[int] = field(default_factory=list[int])
    logits: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def __post_init__(self) -> None:
        self.taps = Taps(self.model, self.module.taps, max_tokens=64)
        spec = KVSpec.of_model(self.model.config, BLOCK_SIZE, torch.float32)
        self.kv = replace(spec, num_layers=spec.num_layers + self.module.num_layers).allocate(10)
        self.attention = [TorchAttention(shape) for shape in self.model.shapes]

    @torch.inference_mode()
    def run(self, rows: list[Row], kept: list[int], following: list[list[int]], num_drafts: int) -> torch.Tensor:
        fields = torch.empty(4, sum(row.num_tokens for row in rows), dtype=torch.int64)
        write_fields(fields.numpy(), rows, BLOCK_SIZE, no_slot=8)
        tokens, places = fields[0], TokenPlaces(fields[1], fields[2])
        for backend in self.attention:
            backend.plan(step_layout(rows, BLOCK_SIZE))
        self.taps.model.forward(StepInputs(tokens, places), self.kv, self.attention)
        self.logits.clear()
        step = TargetStep(
            rows=rows,
            admissions=(),
            kept=kept,
            tokens=tokens,
            following=torch.tensor([token for row in following for token in row]),
            places=places,
            features=self.taps.features(len(tokens)),
            attention=self.attention,
            kv=self.kv,
            num_drafts=num_drafts,
            choose=self._choose,
        )
        return self.module.advance(step)

    def _choose(self, logits: torch.Tensor, index: int) -> torch.Tensor:
        assert index == len(self.logits)
        self.logits.append(logits)
        return torch.tensor([self.forced[index]]) if self.forced else logits.argmax(dim=-1)


def context(model: Llama, kind: DrafterKind, path: Path | None, target_path: Path, **options: Any) -> ModuleContext:
    name = None if path is None else str(path)
    return ModuleContext(
        config=SpeculationConfig(drafter=kind, model=name, max_draft_tokens=NUM_DRAFTS, **options),
        target=model,
        target_path=target_path,
        placement=Placement(),
        block_size=BLOCK_SIZE,
        max_context=64,
        num_slots=2,
        make_attention=TorchAttention,
    )


def features_of(reference: Any, taps: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """[length, taps, hidden]: what transformers' layers put out."""
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        reference.model.layers[layer].register_forward_hook(
            lambda _, __, out, layer=layer: seen.update({layer: out[0] if isinstance(out, tuple) else out})
        )
        for layer in taps
    ]
    with torch.inference_mode():
        reference(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack([seen[layer].view(len(tokens), -1) for layer in taps], dim=1)


TEXTS = [random.Random(seed).choices(range(heads.VOCAB), k=40) for seed in (1, 2)]


def check_chain(steps: Steps, reference: Any, plain: heads.PlainChain) -> None:
    """A prompt in two chunks beside another's decode, then a step whose drafts are kept in part."""
    first, second = TEXTS

    def expect(text: list[int], num_kept: int, num: int = NUM_DRAFTS) -> list[torch.Tensor]:
        features = features_of(reference, steps.module.taps, text[:num_kept])
        with torch.inference_mode():
            return plain.draft(features, reference.model.embed_tokens.weight, text[1 : num_kept + 1], num)

    def check(drafts: torch.Tensor, *expected: list[torch.Tensor]) -> None:
        for index in range(NUM_DRAFTS):
            wanted = torch.stack([logits[index] for logits in expected])
            torch.testing.assert_close(steps.logits[index], wanted, atol=2e-3, rtol=1e-4)
            assert drafts[:, index].tolist() == wanted.argmax(dim=-1).tolist()

    a, b = BLOCKS
    assert steps.run([Row(0, 0, 9, first[:9], a, False)], [9], [first[1:10]], NUM_DRAFTS).shape == (0, NUM_DRAFTS)
    assert steps.run([Row(1, 0, 17, second[:17], b, True)], [17], [second[1:18]], 0).shape == (1, 0)
    rows = [Row(1, 17, 1, second[17:18], b, True), Row(0, 9, 11, first[9:20], a, True)]
    drafts = steps.run(rows, [1, 11], [second[18:19], first[10:21]], NUM_DRAFTS)
    check(drafts, expect(second, 18), expect(first, 20))

    wrong = [(first[22] + 1) % heads.VOCAB, 4]  # of three drafts the first is kept
    verify = [Row(0, 20, 4, [first[20], first[21], *wrong], a, True), Row(1, 18, 1, second[18:19], b, True)]
    drafts = steps.run(verify, [2, 1], [[first[21], first[22], 0, 0], second[19:20]], NUM_DRAFTS)
    check(drafts, expect(first, 22), expect(second, 19))
    check(steps.run([Row(0, 22, 1, first[22:23], a, True)], [1], [first[23:24]], NUM_DRAFTS), expect(first, 23))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Llama]:
    torch.manual_seed(5)
    reference = heads.target()
    reference.save_pretrained(tmp_path / "target")
    return reference, load(tmp_path / "target", max_context=64)


@pytest.mark.parametrize("num_heads", [4, 8])  # the second unlike the target's
def test_eagle3_drafts_what_plain_torch_drafts(num_heads: int, saved: tuple[Any, Llama], tmp_path: Path):
    reference, model = saved
    tensors = heads.eagle3_tensors(num_heads)
    config = {"draft_vocab_size": len(heads.DRAFT_IDS), "num_attention_heads": num_heads, "head_dim": heads.HEAD_DIM}
    path = heads.write(tmp_path / "head", tensors, heads.CONFIG | config)
    module = MODULES["eagle"](context(model, "eagle", path, tmp_path / "target"))
    assert (module.num_layers, module.taps) == (1, (1, 2, 3))
    check_chain(Steps(model, module), reference, heads.plain_eagle3(tensors, reference))


def test_eagle_drafts_what_plain_torch_drafts(saved: tuple[Any, Llama], tmp_path: Path):
    reference, model = saved
    tensors = heads.eagle_tensors(num_layers=2)
    path = heads.write(tmp_path / "head", tensors, heads.CONFIG | {"num_hidden_layers": 2})
    module = MODULES["eagle"](context(model, "eagle", path, tmp_path / "target"))
    assert (module.num_layers, module.taps) == (2, (6,))
    check_chain(Steps(model, module), reference, heads.plain_eagle(tensors, reference, 2))


@pytest.mark.parametrize("with_head", [True, False])
def test_mtp_of_the_models_own_checkpoint_drafts_what_plain_torch_drafts(with_head: bool, tmp_path: Path):
    torch.manual_seed(5)
    reference = heads.target()
    reference.config.num_nextn_predict_layers = 1
    reference.save_pretrained(tmp_path)
    tensors = heads.mtp_tensors(with_head=with_head)
    save_file(tensors, tmp_path / "mtp.safetensors")
    model = load(tmp_path, max_context=64)
    module = MODULES["mtp"](context(model, "mtp", None, tmp_path))
    assert (module.num_layers, module.taps) == (1, (6,))
    check_chain(Steps(model, module), reference, heads.plain_mtp(tensors, reference))


@pytest.mark.parametrize("tied", [True, False])
def test_mtp_with_a_draft_vocabulary_of_its_own_folder(tied: bool, tmp_path: Path):
    torch.manual_seed(5)
    reference = heads.target(tied=tied)
    reference.save_pretrained(tmp_path / "target")
    model = load(tmp_path / "target", max_context=64)
    tensors = heads.mtp_tensors(with_head=False)
    d2t = heads.DRAFT_IDS - torch.arange(len(heads.DRAFT_IDS))
    config = {"num_hidden_layers": heads.LAYERS, "num_nextn_predict_layers": 1, "draft_vocab_size": len(d2t)}
    path = heads.write(tmp_path / "head", tensors | {"d2t": d2t}, heads.CONFIG | config)
    module = MODULES["mtp"](context(model, "mtp", path, tmp_path / "target"))
    check_chain(Steps(model, module), reference, heads.plain_mtp(tensors, reference, is_reduced=True))


def test_medusa_drafts_what_plain_torch_drafts(saved: tuple[Any, Llama], tmp_path: Path):
    reference, model = saved
    tensors = heads.medusa_tensors(num_heads=4, num_blocks=2)
    path = heads.write(tmp_path / "head", tensors, {"medusa_num_heads": 4, "medusa_num_layers": 2})
    module = MODULES["medusa"](context(model, "medusa", path, tmp_path / "target"))
    assert module.num_layers == 0
    steps, text = Steps(model, module), TEXTS[0]
    rows = [Row(0, 0, 20, text[:20], BLOCKS[0], True), Row(1, 0, 5, TEXTS[1][:5], BLOCKS[1], False)]
    drafts = steps.run(rows, [17, 5], [text[1:21], TEXTS[1][1:6]], NUM_DRAFTS)
    with torch.inference_mode():
        h = reference.model.norm(features_of(reference, (6,), text[:17])[-1, 0])
        expected = torch.stack([heads.plain_medusa(tensors, 2, h, i) for i in range(NUM_DRAFTS)])
    torch.testing.assert_close(torch.cat(steps.logits), expected, atol=2e-3, rtol=1e-4)
    assert drafts.tolist() == [expected.argmax(dim=-1).tolist()]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": 32}, "hidden_size 32"),
        ({"vocab_size": 98}, "vocab_size 98"),
        ({"num_key_value_heads": 1}, "num_kv_heads 1"),
        ({"head_dim": 8}, "head_dim 8"),
    ],
)
def test_a_head_of_another_model_is_refused(
    changes: dict[str, int], names: str, saved: tuple[Any, Llama], tmp_path: Path
):
    path = heads.write(tmp_path / "head", heads.eagle3_tensors(), heads.CONFIG | {"draft_vocab_size": 47} | changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=names):
        MODULES["eagle"](context(saved[1], "eagle", path, tmp_path))


def test_a_map_outside_the_vocabulary_is_refused(saved: tuple[Any, Llama], tmp_path: Path):
    tensors = heads.eagle3_tensors()
    tensors["d2t"] += 2
    path = heads.write(tmp_path / "head", tensors, heads.CONFIG | {"draft_vocab_size": len(heads.DRAFT_IDS)})
    with pytest.raises(UnsupportedModelError, match="d2t"):
        MODULES["eagle"](context(saved[1], "eagle", path, tmp_path))


def test_a_tensor_that_the_head_does_not_use_is_refused(saved: tuple[Any, Llama], tmp_path: Path):
    tensors = heads.eagle3_tensors() | {"midlayer.extra.weight": torch.zeros(1)}
    path = heads.write(tmp_path / "head", tensors, heads.CONFIG | {"draft_vocab_size": len(heads.DRAFT_IDS)})
    with pytest.raises(CheckpointError, match="extra"):
        MODULES["eagle"](context(saved[1], "eagle", path, tmp_path))


def test_mtp_without_a_module_and_medusa_with_too_few_heads_are_refused(saved: tuple[Any, Llama], tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match="num_nextn_predict_layers"):
        MODULES["mtp"](context(saved[1], "mtp", None, tmp_path / "target"))
    path = heads.write(tmp_path / "head", heads.medusa_tensors(1, 1), {"medusa_num_heads": 1})
    with pytest.raises(UnsupportedModelError, match="medusa_num_heads"):
        MODULES["medusa"](context(saved[1], "medusa", path, tmp_path / "target"))
