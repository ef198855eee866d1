"""The Llama family: a pre-norm transformer with RoPE, grouped-query attention and a gated MLP.

    h += o(attention(rope(qkv(norm(h)))))
    h += down(act(gate(norm(h))) * up(norm(h)))

Siblings override what differs. `fused_linear` runs each projection together with what stands around it.
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
from baton.actors.engine.weights import Shard, Weights
from baton.kernels.attention import AttentionBackend, AttentionShape
from baton.kernels.fused_linear import NormWeight, linear_add, norm_gated_linear, norm_linear
from baton.kernels.gated_activation import ActivationKind
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_store import QKNorm, TokenPlaces, rope_and_store


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer's attention reads and writes in this step."""

    kv: torch.Tensor  # the layer's view of the cache
    places: TokenPlaces
    backend: AttentionBackend


class LlamaLayer:
    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"
    num_inputs: ClassVar[int] = 1  # vectors of the hidden size that q, k and v read side by side
    has_input_norm: ClassVar[bool] = True
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
        if self.has_input_norm:
            self.input_norm = read_norm(weights, f"{prefix}.input_layernorm", config)
        self.qkv = weights.merged_linear(qkv, self.num_inputs * hidden, bias=bias or self.has_qkv_bias)
        self.qk_norm = _qk_norm(weights, f"{prefix}.self_attn", config) if self.has_qk_norm else None
        self.o = weights.reduced_linear(f"{prefix}.self_attn.o_proj", hidden, attention_width, bias=bias)
        self.mlp_norm = read_norm(weights, f"{prefix}.{self.mlp_norm_name}", config)
        self.gate_up = weights.merged_linear(gate_up, hidden)
        self.down = weights.reduced_linear(f"{prefix}.mlp.down_proj", hidden, width)

    def attend(self, h: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        return linear_add(self.mix(h, cos_sin, cache), self.o, h)

    def feed(self, h: torch.Tensor) -> torch.Tensor:
        return linear_add(norm_gated_linear(h, self.mlp_norm, self.gate_up, self.activation), self.down, h)

    def mix(self, h: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """Attention before its output projection: [num_tokens, num_heads * head_dim]."""
        return self.mix_qkv(self.project(h), cos_sin, cache)

    def project(self, h: torch.Tensor) -> torch.Tensor:
        """The merged q, k and v: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]."""
        return norm_linear(h, self.input_norm, self.qkv)

    def mix_qkv(self, qkv: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        query = rope_and_store(qkv, cos_sin, cache.kv, cache.places, self.shape, self.qk_norm)
        return cache.backend.run(query, cache.kv).flatten(1)


class Llama:
    layer_type: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, config: ModelConfig, weights: Weights, block_size: int, max_context: int) -> None:
        self.config = config
        shapes = [attention_shape(config, layer, weights.shard, block_size) for layer in config.layers]
        self.shapes = tuple(dict.fromkeys(shapes))
        self.embeddings = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self.layer_type(weights, f"model.layers.{i}", config, shape) for i, shape in enumerate(shapes)]
        self.final_norm = read_norm(weights, "model.norm", config)
        tied = self.embeddings if config.tie_embeddings else None
        self.lm_head = weights.gathered_linear("lm_head", config.vocab_size, config.hidden_size, tied=tied)
        tables = _rope_tables(config, weights, max_context)
        # Per layer: its RoPE table and the index of its backend.
        self._cos_sins = [tables[layer.rope] for layer in config.layers]
        self._backends = [self.shapes.index(shape) for shape in shapes]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embeddings)

    def forward(self, inputs: StepInputs, kv: torch.Tensor, attention: Sequence[AttentionBackend]) -> torch.Tensor:
        h = self.embed(inputs.tokens)  # [num_tokens, hidden]
        for i, layer in enumerate(self.layers):
            cache = LayerCache(kv[:, i], inputs.places, attention[self._backends[i]])
            h = layer.feed(layer.attend(h, self._cos_sins[i], cache))
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = norm_linear(hidden, self.final_norm, self.lm_head)
        if self.config.num_token_ids is not None:
            logits[:, self.config.num_token_ids :] = -torch.inf
        return logits

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.final_norm.weight, self.final_norm.eps)


def read_norm(weights: Weights, name: str, config: ModelConfig) -> NormWeight:
    return NormWeight(weights.norm(name, config.hidden_size, config.norm_offset), config.rms_norm_eps)


def _qk_norm(weights: Weights, prefix: str, config: ModelConfig) -> QKNorm:
    q, k = (weights.norm(f"{prefix}.{name}_norm", config.head_dim, config.norm_offset) for name in ("q", "k"))
    return QKNorm(q, k, config.rms_norm_eps)


def attention_shape(config: ModelConfig, layer: LayerConfig, shard: Shard, block_size: int) -> AttentionShape:
    return AttentionShape(
        num_heads=shard.split(config.num_heads, "num_attention_heads"),
        num_kv_heads=shard.split(config.num_kv_heads, "num_key_value_heads"),
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
