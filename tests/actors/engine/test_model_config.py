"""Config keys in all their spellings end up as one frozen config; what is not understood is refused."""

from __future__ import annotations

from typing import Any

import pytest

from baton.actors.engine.model_config import ModelConfig, RopeConfig, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def windows(**changes: Any) -> list[int | None]:
    return [layer.sliding_window for layer in ModelConfig.from_hf(LLAMA | changes).layers]


def test_defaults_are_those_of_llama():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 16, 0.25)
    assert (config.eos_ids, config.tie_embeddings, config.norm_offset) == ((), False, 0.0)
    assert {layer.rope for layer in config.layers} == {RopeConfig(theta=10_000.0)}


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_eos_may_be_one_or_many(value: Any, ids: tuple[int, ...]):
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": value}).eos_ids == ids


def test_old_and_new_spellings_of_rope_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    spellings = (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}},
    )
    [layers] = {ModelConfig.from_hf(LLAMA | spelling).layers for spelling in spellings}
    assert layers[0].rope.factor == 8.0 and layers[0].rope.original_context == 64


def test_windows_follow_the_familys_rule_where_layer_types_are_missing():
    window = {"sliding_window": 9}
    assert windows(**window) == [None] * 4
    assert windows(architectures=["MistralForCausalLM"], **window) == [9] * 4
    assert windows(architectures=["Qwen2ForCausalLM"], max_window_layers=2, **window) == [None] * 4
    assert windows(architectures=["Qwen3ForCausalLM"], use_sliding_window=True, max_window_layers=3, **window) == [
        None,
        None,
        None,
        9,
    ]
    assert windows(architectures=["Gemma3ForCausalLM"], sliding_window_pattern=2, **window) == [9, None, 9, None]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(architectures=["Qwen3ForCausalLM"], layer_types=types, **window) == [None, 9, None, 9]


def test_gemma_rotates_local_layers_by_their_own_base():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 9, "sliding_window_pattern": 2}
    rope = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    local, wide, *_ = ModelConfig.from_hf(LLAMA | gemma | rope).layers
    assert local.rope == RopeConfig(theta=1e4)
    assert wide.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": []}, "architectures="),
        ({"hidden_size": None}, "lacks hidden_size"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type='yarn'.*supported: default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(LLAMA | change)
