"""Every family against transformers, on tiny random models saved as a checkpoint: prompt, chunks and decode."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import BLOCK_SIZE, Reference, all_logits, kv_cache, load, reference_logits, scattered_blocks

from baton.actors.engine.batch import Row
from baton.actors.engine.checkpoint import MODELS, build_model, open_checkpoint
from baton.actors.engine.weights import Placement

NUM_TOKENS = 3 * BLOCK_SIZE + 5
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that a wrong rotation or mask shows
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3-tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "llama-bias-head-dim": ("Llama", {"attention_bias": True, "head_dim": 24, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-window": ("Qwen3", QWEN_WINDOW),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
    ),
    "gemma3-linear": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def build(case: str, **overrides: Any) -> Reference:
    family, changes = CASES[case]
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**(TINY | changes | overrides), bos_token_id=1, eos_token_id=2)
    torch.manual_seed(3)
    model: Reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start as constants, which would hide a swap
            torch.nn.init.uniform_(parameter, 0.2, 1.0)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path):
    reference = build(case)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, max_context=128)
    tokens = random.Random(1).choices(range(TINY["vocab_size"]), k=NUM_TOKENS)
    expected = reference_logits(reference, tokens)
    [blocks, others] = scattered_blocks(NUM_TOKENS, seed=4, num_rows=2)
    kv = kv_cache(model)

    whole = all_logits(model, [Row(0, 0, NUM_TOKENS, tokens, blocks, True)], kv)
    torch.testing.assert_close(whole, expected, atol=1e-3, rtol=0)

    kv = kv_cache(model)
    for start, end in ((0, 7), (7, 33), (33, NUM_TOKENS - 1)):
        chunk = all_logits(model, [Row(0, start, end - start, tokens[start:end], blocks, True)], kv)
        torch.testing.assert_close(chunk, expected[start:end], atol=1e-3, rtol=0)
    decode = Row(0, NUM_TOKENS - 1, 1, tokens[-1:], blocks, True)
    prefill = Row(1, 0, NUM_TOKENS, tokens, others, True)
    mixed = all_logits(model, [decode, prefill], kv)
    torch.testing.assert_close(mixed, torch.cat((expected[-1:], expected)), atol=1e-3, rtol=0)


def test_every_supported_architecture_has_a_case():
    assert {f"{family}ForCausalLM" for family, _ in CASES.values()} == MODELS.keys()


def test_layers_with_different_windows_get_a_backend_each(tmp_path: Path):
    build("gemma3").save_pretrained(tmp_path)
    model = load(tmp_path, max_context=64)
    assert [shape.sliding_window for shape in model.shapes] == [8, None]


@pytest.mark.parametrize("case", ["llama-llama3-tied", "gemma3"])
def test_half_precision_keeps_the_logits_direction(case: str, tmp_path: Path):
    reference = build(case)
    reference.save_pretrained(tmp_path)
    placement = Placement(dtype=torch.bfloat16)
    model = build_model(open_checkpoint(tmp_path), placement, block_size=BLOCK_SIZE, max_context=64)
    tokens = list(range(1, 21))  # gemma pads with 0, whose embedding is 0
    row = Row(0, 0, len(tokens), tokens, [3, 1], True)
    logits = all_logits(model, [row], kv_cache(model).bfloat16())
    assert logits.dtype == torch.bfloat16
    similarity = torch.cosine_similarity(logits.float(), reference_logits(reference, tokens), dim=-1)
    assert similarity.min() > 0.99


def test_ids_that_only_pad_the_vocabulary_are_never_sampled(tmp_path: Path):
    build("qwen2").save_pretrained(tmp_path)
    row = Row(0, 0, 3, (5, 6, 7), [2], True)
    plain, tokenizer = load(tmp_path, max_context=64), {"model": {"vocab": {"a": 88}}, "added_tokens": [{"id": 89}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    padded = load(tmp_path, max_context=64)
    logits = all_logits(padded, [row], kv_cache(padded))
    assert logits[:, 90:].isneginf().all()
    torch.testing.assert_close(logits[:, :90], all_logits(plain, [row], kv_cache(plain))[:, :90])
