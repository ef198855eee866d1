"""Gemma 3: Llama with norms after attention and MLP as well as before, norms on q and k, and scaled embeddings."""

from __future__ import annotations

import torch

from baton.actors.engine.model_config import ModelConfig
from baton.actors.engine.models.llama import LayerCache, Llama, LlamaLayer
from baton.actors.engine.weights import Weights
from baton.kernels.attention import AttentionShape
from baton.kernels.fused_linear import norm_gated_linear
from baton.kernels.rms_norm import rms_norm


class Gemma3Layer(LlamaLayer):
    mlp_norm_name = "pre_feedforward_layernorm"
    has_qk_norm = True

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, shape: AttentionShape) -> None:
        super().__init__(weights, prefix, config, shape)
        hidden, offset = config.hidden_size, config.norm_offset
        self.eps = config.rms_norm_eps
        self.after_attention = weights.norm(f"{prefix}.post_attention_layernorm", hidden, offset)
        self.after_mlp = weights.norm(f"{prefix}.post_feedforward_layernorm", hidden, offset)

    def attend(self, h: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        return h + rms_norm(self.o(self.mix(h, cos_sin, cache)), self.after_attention, self.eps)

    def feed(self, h: torch.Tensor) -> torch.Tensor:
        gated = norm_gated_linear(h, self.mlp_norm, self.gate_up, self.activation)
        return h + rms_norm(self.down(gated), self.after_mlp, self.eps)


class Gemma3(Llama):
    layer_type = Gemma3Layer

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = super().embed(tokens)
        # The scale takes the weights' precision before it multiplies, as in training.
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype)
