"""How much arithmetic and memory traffic a model's steps need: estimates from shapes, for utilisation figures.

Counts matrix products, attention and the bytes of weights and KV; leaves out norms, activations and sampling, which
are small. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.actors.engine.batch import Batch, PendingStep, Runner
from baton.actors.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one rank computes and moves."""

    flops_per_token: int  # matrix products of all layers
    flops_per_logit: int  # of the head, for a position that is sampled
    flops_per_pair: int  # attention, for a query and a position that it sees
    weight_bytes: int  # read once a step
    kv_bytes_per_token: int

    @classmethod
    def of_model(cls, model: ModelConfig, item_bytes: int, world: int = 1) -> ModelCost:
        heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        attention = model.hidden_size * (2 * heads + 2 * kv_heads)
        layers = model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
        head = model.vocab_size * model.hidden_size
        return cls(
            flops_per_token=2 * layers // world,
            flops_per_logit=2 * head // world,
            flops_per_pair=4 * model.num_layers * heads // world,
            weight_bytes=(layers + head) * item_bytes // world,
            kv_bytes_per_token=2 * model.num_layers * kv_heads * item_bytes // world,
        )


@dataclass(slots=True)
class WorkDone:
    """Totals since the start. Written by the engine's thread; others read one number at a time."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    flops: int = 0
    bytes_moved: int = 0

    def add(self, batch: Batch, cost: ModelCost) -> None:
        num_tokens = num_logits = num_pairs = num_positions = 0
        for row in batch.rows:
            num_tokens += row.num_tokens
            num_logits += row.sample + row.num_drafts
            num_positions += row.end
            num_pairs += row.num_tokens * row.start + row.num_tokens * (row.num_tokens + 1) // 2
            if row.num_tokens == 1 + row.num_drafts and row.sample:
                self.decode_tokens += row.num_tokens
            else:
                self.prefill_tokens += row.num_tokens
        self.flops += (
            num_tokens * cost.flops_per_token + num_logits * cost.flops_per_logit + num_pairs * cost.flops_per_pair
        )
        self.bytes_moved += cost.weight_bytes + (num_positions + num_tokens) * cost.kv_bytes_per_token


class MeteredRunner:
    """A runner that keeps count; it counts while the device works."""

    def __init__(self, runner: Runner, cost: ModelCost, done: WorkDone) -> None:
        self._runner = runner
        self._cost = cost
        self._done = done

    def launch(self, batch: Batch) -> PendingStep:
        pending = self._runner.launch(batch)
        self._done.add(batch, self._cost)
        return pending
