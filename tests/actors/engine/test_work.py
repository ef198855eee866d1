from __future__ import annotations

from baton.actors.engine.batch import Batch, Row
from baton.actors.engine.model_config import LayerConfig, ModelConfig, RopeConfig
from baton.actors.engine.work import ModelCost, WorkDone

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(RopeConfig(theta=5e5)),) * 32,
    rms_norm_eps=1e-5,
    attention_scale=128**-0.5,
    activation="silu",
    max_context=8192,
    eos_ids=(2,),
    bos_id=1,
    tie_embeddings=False,
    attention_bias=False,
    norm_offset=0.0,
)
COST = ModelCost.of_model(LLAMA_8B, item_bytes=2)


def row(start: int, num_tokens: int, *, sample: bool = True) -> Row:
    return Row(slot=0, start=start, num_tokens=num_tokens, tokens=(), blocks=(), sample=sample)


def test_costs_are_those_of_a_well_known_model() -> None:
    assert COST.weight_bytes / 2 == 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # less embeddings, which are looked up
    assert COST.kv_bytes_per_token == 131_072
    assert COST.flops_per_token + COST.flops_per_logit == COST.weight_bytes


def test_ranks_share_the_work() -> None:
    half = ModelCost.of_model(LLAMA_8B, item_bytes=2, world=2)
    assert (half.flops_per_pair * 2, half.weight_bytes * 2) == (COST.flops_per_pair, COST.weight_bytes)


def test_decode_reads_the_weights_once_and_every_sequences_kv() -> None:
    work = WorkDone()
    work.add(Batch((row(999, 1), row(499, 1))), COST)
    assert (work.decode_tokens, work.prefill_tokens) == (2, 0)
    assert work.bytes_moved == COST.weight_bytes + (1000 + 500 + 2) * COST.kv_bytes_per_token
    assert work.flops == 2 * (COST.flops_per_token + COST.flops_per_logit) + 1500 * COST.flops_per_pair


def test_chunks_of_a_prompt_cost_as_much_as_the_prompt_at_once_but_for_the_weights() -> None:
    whole, parts = WorkDone(), WorkDone()
    whole.add(Batch((row(0, 100),)), COST)
    parts.add(Batch((row(0, 60, sample=False),)), COST)
    parts.add(Batch((row(60, 40),)), COST)
    assert whole.flops == parts.flops
    assert whole.prefill_tokens == parts.prefill_tokens == 100
    assert parts.bytes_moved > whole.bytes_moved + COST.weight_bytes
