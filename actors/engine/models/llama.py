"""The Llama family: a pre-norm transformer with RoPE, grouped-query attention and a gated MLP.

    x += attend(norm(x))        attend(x) = o(attention(rope(qkv(x))))
    x += feed(norm(x))          feed(x) = down(act(gate(x)) * up(x))

Siblings override what differs. Each addition is fused with the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from baton.actors.engine.model_config import LayerConfig, ModelConfig, RopeConfig
from baton.actors.engine.models.model import StepInputs
from baton.actors.engine.rope import cos_sin_table
from baton.actors.engine.weights import Weights
from baton.kernels.attention import AttentionBackend, AttentionShape
from baton.kernels.gated_activation import ActivationKind, gated_activation
from baton.kernels.linear_cpu import shared_linear
from baton.kernels.rms_norm import add_rms_norm, rms_norm
from baton.kernels.rope_store import QKNorm, TokenPlaces, rope_and_store


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer's attention reads and writes in this step."""

    kv: torch.Tensor  # the layer's view of the cache
    places: TokenPlaces
    backend: AttentionBackend


class LlamaLayer:
    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"
    has_qkv_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = False

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, shape: AttentionShape) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        qkv = {f"{prefix}.self_attn.{name}_proj": count * config.head_dim for name, count in heads.items()}
        gate_up = {f"{prefix}.mlp.{name}_proj": width for name in ("gate", "up")}
        attention_width, bias = config.num_heads * config.head_dim, config.attention_bias
        self.shape = shape
        self.activation: ActivationKind = config.activation
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", hidden, config.norm_offset)
        self.qkv = weights.merged_linear(qkv, hidden, bias=bias or self.has_qkv_bias)
        self.qk_norm = _qk_norm(weights, f"{prefix}.self_attn", config) if self.has_qk_norm else None
        self.o = weights.reduced_linear(f"{prefix}.self_attn.o_proj", hidden, attention_width, bias=bias)
        self.mlp_norm = weights.norm(f"{prefix}.{self.mlp_norm_name}", hidden, config.norm_offset)
        self.gate_up = weights.merged_linear(gate_up, hidden)
        self.down = weights.reduced_linear(f"{prefix}.mlp.down_proj", hidden, width)

    def attend(self, x: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        query = rope_and_store(self.qkv(x), cos_sin, cache.kv, cache.places, self.shape, self.qk_norm)
        return self.o(cache.backend.run(query, cache.kv).flatten(1))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated_activation(self.gate_up(x), self.activation))


class Llama:
    layer_type: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, config: ModelConfig, weights: Weights, block_size: int, max_context: int) -> None:
        self.config = config
        shapes = [_attention_shape(config, layer, weights, block_size) for layer in config.layers]
        self.shapes = tuple(dict.fromkeys(shapes))
        self.embeddings = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self.layer_type(weights, f"model.layers.{i}", config, shape) for i, shape in enumerate(shapes)]
        self.final_norm = weights.norm("model.norm", config.hidden_size, config.norm_offset)
        if config.tie_embeddings:
            self.lm_head = shared_linear(self.embeddings)
        else:
            self.lm_head = weights.merged_linear({"lm_head": config.vocab_size}, config.hidden_size)
        tables = _rope_tables(config, weights, max_context)
        # Per layer: its RoPE table, the index of its backend, and the norm after it.
        self._cos_sins = [tables[layer.rope] for layer in config.layers]
        self._backends = [self.shapes.index(shape) for shape in shapes]
        self._next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embeddings)

    def forward(self, inputs: StepInputs, kv: torch.Tensor, attention: Sequence[AttentionBackend]) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        residual = self.embed(inputs.tokens)  # [num_tokens, hidden]
        x = rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            cache = LayerCache(kv[:, i], inputs.places, attention[self._backends[i]])
            x, residual = add_rms_norm(layer.attend(x, self._cos_sins[i], cache), residual, layer.mlp_norm, eps)
            x, residual = add_rms_norm(layer.feed(x), residual, self._next_norms[i], eps)
        return self.lm_head(x.index_select(0, inputs.logit_rows))


def _qk_norm(weights: Weights, prefix: str, config: ModelConfig) -> QKNorm:
    q, k = (weights.norm(f"{prefix}.{name}_norm", config.head_dim, config.norm_offset) for name in ("q", "k"))
    return QKNorm(q, k, config.rms_norm_eps)


def _attention_shape(config: ModelConfig, layer: LayerConfig, weights: Weights, block_size: int) -> AttentionShape:
    return AttentionShape(
        num_heads=weights.shard.split(config.num_heads, "num_attention_heads"),
        num_kv_heads=weights.shard.split(config.num_kv_heads, "num_key_value_heads"),
        head_dim=config.head_dim,
        block_size=block_size,
        scale=config.attention_scale,
        sliding_window=layer.sliding_window,
    )


def _rope_tables(config: ModelConfig, weights: Weights, max_context: int) -> dict[RopeConfig, torch.Tensor]:
    factors = None
    if weights.has("rope_freqs.weight"):  # how GGUF spells llama3's scaling
        factors = weights.tensor("rope_freqs.weight", config.head_dim // 2, dtype=torch.float32).cpu()
    ropes = {layer.rope for layer in config.layers}
    return {rope: cos_sin_table(rope, config.head_dim, max_context, factors).to(weights.device) for rope in ropes}
