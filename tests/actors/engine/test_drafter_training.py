"""From a tiny model's own answers to a head that the engine loads, and back to where a stopped run was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import draft_heads as heads
import pytest
import torch
from model_cases import reference_greedy
from test_draft_heads import BLOCKS, Steps, context, features_of
from tiny_samples import CONFIG, GREEDY, Tiny

from baton.actors.drafter_training.acceptance import acceptance
from baton.actors.drafter_training.export import export_head
from baton.actors.drafter_training.heads import Unrolled
from baton.actors.drafter_training.objective import collate, make_target, unroll
from baton.actors.drafter_training.prompts import BadPromptFile, split_prompts
from baton.actors.drafter_training.samples import Collector, Sample, Sampling, collect_waves, load_wave, load_waves
from baton.actors.drafter_training.train import Trainer
from baton.actors.drafter_training.vocabulary import choose_vocabulary
from baton.actors.engine.batch import Row
from baton.actors.engine.drafters.build import MODULES


def test_samples_are_the_models_own_answers_with_its_features(tiny: Tiny):
    for sample in tiny.samples[:3]:
        tokens, num_answer = sample.tokens.tolist(), len(sample.tokens) - sample.prompt_len
        assert num_answer == GREEDY.max_tokens
        assert tokens[sample.prompt_len :] == reference_greedy(tiny.reference, tokens[: sample.prompt_len], num_answer)
        expected = features_of(tiny.reference, (1, 2, 3, 6), tokens)
        kept = torch.cat((sample.features, sample.hidden), dim=1).float()
        torch.testing.assert_close(kept, expected.flatten(1), atol=0.05, rtol=0.01)


def test_collecting_goes_on_where_it_stopped(tiny: Tiny, tmp_path: Path):
    def wave(number: int, folder: Path) -> list[int]:
        return [t for s in load_wave(folder / f"wave-{number:04d}.safetensors") for t in s.tokens.tolist()]

    def collector() -> Collector:
        return Collector(tiny.model, wave_size=2, max_len=32)

    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    sampling = Sampling(max_tokens=5, temperature=1.0, seed=3)
    stopped = collect_waves(collector, prompts, sampling, tmp_path / "a", 2)
    assert next(stopped) == (1, 2)
    stopped.close()
    assert list(collect_waves(collector, prompts, sampling, tmp_path / "a", 2)) == [(1, 2), (2, 2)]
    assert list(collect_waves(collector, prompts, sampling, tmp_path / "b", 2)) == [(1, 2), (2, 2)]
    assert [wave(i, tmp_path / "a") for i in (0, 1)] == [wave(i, tmp_path / "b") for i in (0, 1)]
    assert len(load_waves(tmp_path / "a")) == 3


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_trained_head_says_in_the_engine_what_it_said_in_training(kind: str, tiny: Tiny, tmp_path: Path):
    head = tiny.head(kind)
    Trainer(head, tiny.target, tiny.samples, CONFIG).run(4)
    for parameter in head.parameters():
        parameter.data.copy_(parameter.to(torch.bfloat16))  # as it will lie in the file
    export_head(head, head.config, tiny.model.config, tiny.target.target_ids, tmp_path)
    drafter = "mtp" if kind == "mtp" else "eagle"
    steps = Steps(tiny.model, MODULES[drafter](context(tiny.model, drafter, tmp_path, tiny.path)))

    sample = tiny.samples[0]
    tokens, length = sample.tokens.tolist(), sample.prompt_len
    steps.forced = tokens[length + 1 :]  # training reads what was emitted, whatever the head would draft
    steps.run([Row(0, 0, length, tokens[:length], BLOCKS[0], True)], [length], [tokens[1 : length + 1]], 3)

    with torch.no_grad():
        unrolled = list(unroll(head, collate([sample], tiny.target.device), tiny.target, 3))
        expected = [head.logits(h[0, length - 1]) for h in unrolled]
    for logits, wanted in zip(steps.logits, expected, strict=True):
        # Training reads features in half precision.
        torch.testing.assert_close(logits[0, tiny.target.target_ids], wanted, atol=0.1, rtol=0.02)
        others = torch.ones(heads.VOCAB, dtype=torch.bool)
        others[tiny.target.target_ids] = False
        assert (logits[0, others] == float("-inf")).all()


def test_a_run_that_was_stopped_ends_in_the_same_weights(tiny: Tiny, tmp_path: Path):
    whole = Trainer(tiny.head("eagle3"), tiny.target, tiny.samples, CONFIG)
    whole.run(7)
    first = Trainer(tiny.head("eagle3"), tiny.target, tiny.samples, CONFIG)
    assert not first.load(tmp_path)
    first.run(3)
    first.save(tmp_path)
    second = Trainer(tiny.head("eagle3"), tiny.target, tiny.samples, CONFIG)
    assert second.load(tmp_path)
    assert (second.step, second.history) == (3, first.history)
    second.run(4)
    for (name, wanted), found in zip(whole.head.named_parameters(), second.head.parameters(), strict=True):
        assert torch.equal(wanted, found), name


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_training_makes_drafts_right(kind: str, tiny: Tiny):
    config = replace(CONFIG, epochs=15)
    head = tiny.head(kind)
    trainer = Trainer(head, tiny.target, tiny.samples, config)
    before = acceptance(head, tiny.target, tiny.samples, 3)
    trainer.run(config.epochs * 4)
    after = acceptance(head, tiny.target, tiny.samples, 3)
    assert trainer.step == trainer.num_steps
    assert before.length < 1.2 < 1.4 < after.length
    first, last = trainer.evaluate(tiny.samples).accuracy[0], trainer.history.held_out[-1].accuracy[0]
    assert first == last > 0.35


@pytest.mark.parametrize(
    ("right", "num_steps", "rates"),
    [
        ([[1, 1, 1, 1, 1, 1]] * 2, 2, (1.0, 1.0)),  # six tokens to come, three a step
        ([[0, 0, 0, 0, 0, 0]] * 2, 6, (0.0, 0.0)),
        ([[1, 0, 0, 0, 1, 1]] * 2, 3, (2 / 3, 2 / 3)),  # from where it stands after a step, not from every place
        ([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], 3, (1.0, 0.0)),
    ],
)
def test_acceptance_walks_as_the_engine_does(
    right: list[list[int]], num_steps: int, rates: tuple[float, ...], tiny: Tiny
):
    prompt_len = 3
    tokens = torch.arange(10, 20)
    features = torch.zeros(10, 3 * heads.HIDDEN)
    sample = Sample(tokens, features, features[:, : heads.HIDDEN], prompt_len=prompt_len)
    ids = torch.arange(heads.VOCAB)
    target = make_target(tiny.model, ids, tiny.target.cos_sin)
    measured = acceptance(_Told(right, tokens, prompt_len), target, [sample], 2)
    assert (measured.num_steps, measured.num_tokens, measured.rates) == (num_steps, 6, rates)


class _Told:
    """Is right where it is told to be: by draft and by column, from the prompt's last on."""

    def __init__(self, right: list[list[int]], tokens: torch.Tensor, prompt_len: int) -> None:
        self._right, self._tokens, self._first = right, tokens, prompt_len - 1
        self._step = -1

    def fuse(self, features: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.arange(hidden.shape[1], dtype=torch.float32)[None, :, None]  # h is the column

    def step(self, h: torch.Tensor, embedded: torch.Tensor, cos_sin: torch.Tensor, past: Unrolled) -> torch.Tensor:
        self._step += 1
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(h), heads.VOCAB)
        for row, column in enumerate(h[:, 0].int().tolist()):
            place = column - self._first
            if 0 <= place < 6 and self._right[self._step][place]:
                logits[row, self._tokens[column + 2 + self._step]] = 1.0
        return logits


def test_the_draft_vocabulary_is_what_answers_say_most_then_what_prompts_say():
    def sample(prompt: list[int], answer: list[int]) -> Sample:
        empty = torch.empty(0)
        return Sample(torch.tensor(prompt + answer), empty, empty, prompt_len=len(prompt))

    samples = [sample([9, 9, 9, 8], [5, 5, 6]), sample([9, 8, 8], [6, 5])]
    assert choose_vocabulary(samples, 12, 2).target_ids.tolist() == [5, 6]
    assert choose_vocabulary(samples, 12, 3).target_ids.tolist() == [5, 6, 9]
    assert choose_vocabulary(samples, 12, 5).target_ids.tolist() == [0, 5, 6, 8, 9]
    assert choose_vocabulary(samples, 12, 1).coverage == pytest.approx(3 / 5)


def test_prompt_files_of_all_kinds(tmp_path: Path):
    lines = ['{"prompt": "a"}', '{"question": "b", "answer": "x"}', "", '{"turns": ["c", "d"]}']
    (tmp_path / "p.jsonl").write_text("\n".join([*lines, '{"messages": [{"role": "user", "content": "e"}]}']))
    split = split_prompts([tmp_path / "p.jsonl"], hold_every=3)
    assert [m[0]["content"] for m in split.train] == ["a", "b", "e"]
    assert [m[0]["content"] for m in split.held_out] == ["c"]


@pytest.mark.parametrize("line", ["{", '{"text": "a"}', "[]", '{"turns": [1]}', '{"messages": [{"role": "user"}]}'])
def test_a_line_without_a_prompt_is_refused_by_its_number(line: str, tmp_path: Path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(BadPromptFile, match=r"p\.jsonl:2"):
        split_prompts([tmp_path / "p.jsonl"], hold_every=3)
