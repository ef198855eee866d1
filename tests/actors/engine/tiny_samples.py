"""A tiny model with samples of its own answers, for what trains heads and what runs them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import draft_heads as heads
from model_cases import load

from baton.actors.drafter_training.heads import Eagle3Head, MtpHead, rope_table
from baton.actors.drafter_training.objective import Target, make_target
from baton.actors.drafter_training.samples import Collector, Sample, Sampling
from baton.actors.drafter_training.start import head_config, start_eagle3, start_mtp
from baton.actors.drafter_training.train import TrainConfig
from baton.actors.drafter_training.vocabulary import choose_vocabulary
from baton.actors.engine.models.llama import Llama

GREEDY = Sampling(max_tokens=12, temperature=0.0, seed=0)
DRAFT_VOCAB = 60
CONFIG = TrainConfig(epochs=4, batch_size=4, learning_rate=3e-3, num_steps=2, seed=0, warmup_steps=2)


@dataclass
class Tiny:
    reference: heads.Reference
    model: Llama
    path: Path
    samples: list[Sample]
    target: Target

    def head(self, kind: str) -> Eagle3Head | MtpHead:
        config = head_config(self.model.config, 48)
        return (
            start_eagle3(config, self.target, self.samples, 0)
            if kind == "eagle3"
            else start_mtp(config, self.target, 0)
        )


def make_tiny(path: Path) -> Tiny:
    reference = heads.target(tied=True)
    reference.save_pretrained(path)
    model = load(path, max_context=64)
    prompts = [random.Random(seed).choices(range(3, heads.VOCAB), k=6 + seed % 5) for seed in range(16)]
    samples = Collector(model, wave_size=16, max_len=32).collect(prompts, GREEDY)
    vocabulary = choose_vocabulary(samples, heads.VOCAB, DRAFT_VOCAB)
    assert vocabulary.coverage > 0.9
    return Tiny(
        reference, model, path, samples, make_target(model, vocabulary.target_ids, rope_table(model.config, 64))
    )
