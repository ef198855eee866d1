"""EAGLE: a decoder layer that foresees the target's next features, and so its next tokens.

EAGLE-1 and 2 (the second differs in how drafts branch, not in the network): `fc` joins the embedding with the last
hidden state as the target's head reads it, plain decoder layers follow, and the target's own head reads the result.
EAGLE-3: `fc` joins the residual stream after a low, a middle and a high layer; one layer reads this and the embedding
side by side; its own head knows the draft vocabulary only. Checkpoints as of github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

import torch

from baton.actors.engine.drafters.chain import (
    ChainDrafter,
    ChainNetwork,
    ChainPlaces,
    DraftVocabulary,
    llama_target,
    read_head_config,
    read_target_ids,
    rope_of,
)
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import DraftModule
from baton.actors.engine.loader_safetensors import SafetensorsWeights
from baton.actors.engine.model_config import ModelConfig
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.llama import LayerCache, LlamaLayer, attention_shape, read_norm
from baton.actors.engine.weights import Weights
from baton.kernels.attention import AttentionShape
from baton.kernels.fused_linear import linear_add
from baton.kernels.linear_cpu import fastest_linear
from baton.kernels.rms_norm import rms_norm

_OWN_TABLE = "embed_tokens.weight"  # the target's, frozen: what the target holds is used


def make_eagle(context: ModuleContext) -> DraftModule:
    """Tell EAGLE-3 from its forebears by the tensors' names."""
    assert context.config.model is not None
    path = resolve_model(context.config.model)
    weights = Weights(SafetensorsWeights(path), context.placement)
    target = llama_target(context)
    config, hf = read_head_config(path, target.config)
    network: ChainNetwork
    if weights.has("midlayer.hidden_norm.weight"):
        network = Eagle3(weights, config, context, hf.get("draft_vocab_size") or config.vocab_size)
    else:
        network = Eagle(weights, config, context)
    weights.check_all_read(_OWN_TABLE, "t2d")
    return ChainDrafter(network, context)


class _FirstLayer(LlamaLayer):
    has_input_norm = False

    def project(self, h: torch.Tensor) -> torch.Tensor:
        return self.qkv(h)


class Eagle:
    def __init__(self, weights: Weights, config: ModelConfig, context: ModuleContext) -> None:
        self._target = llama_target(context)
        self.num_layers = config.num_layers
        self.taps = (self._target.config.num_layers - 1,)
        self.shape = attention_shape(config, config.layers[0], weights.shard, context.block_size)
        hidden = config.hidden_size
        bias = weights.tensor("fc.bias", hidden) if weights.has("fc.bias") else None
        self._fc = fastest_linear(weights.tensor("fc.weight", hidden, 2 * hidden), bias)
        kinds = (_FirstLayer, *(LlamaLayer,) * (self.num_layers - 1))
        self._layers = [kind(weights, f"layers.{i}", config, self.shape) for i, kind in enumerate(kinds)]
        self._cos_sin = rope_of(config, context)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self._target.normed(features[:, 0])

    def run(self, h: torch.Tensor, tokens: torch.Tensor, at: ChainPlaces) -> torch.Tensor:
        h = self._fc(torch.cat((self._target.embed(tokens), h), dim=-1))
        for i, layer in enumerate(self._layers):
            h = layer.feed(layer.attend(h, self._cos_sin, at.cache(i - self.num_layers)))
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self._target.lm_head(h)


class _Eagle3Layer(LlamaLayer):
    num_inputs = 2

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, shape: AttentionShape) -> None:
        super().__init__(weights, prefix, config, shape)
        self._hidden_norm = read_norm(weights, f"{prefix}.hidden_norm", config)

    def run(self, h: torch.Tensor, embedded: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        parts = ((embedded, self.input_norm), (h, self._hidden_norm))
        qkv = self.qkv(torch.cat([rms_norm(x, norm.weight, norm.eps) for x, norm in parts], dim=-1))
        return self.feed(linear_add(self.mix_qkv(qkv, cos_sin, cache), self.o, h))


class Eagle3:
    num_layers = 1

    def __init__(self, weights: Weights, config: ModelConfig, context: ModuleContext, draft_vocab: int) -> None:
        self._target = llama_target(context)
        self.taps = eagle3_taps(self._target.config.num_layers)
        self.shape = attention_shape(config, config.layers[0], weights.shard, context.block_size)
        hidden = config.hidden_size
        self._fc = fastest_linear(weights.tensor("fc.weight", hidden, 3 * hidden))
        self._layer = _Eagle3Layer(weights, "midlayer", config, self.shape)
        self._norm = read_norm(weights, "norm", config)
        head = weights.gathered_linear("lm_head", draft_vocab, hidden)
        if weights.has("d2t"):
            target_ids = read_target_ids(weights, draft_vocab, config.vocab_size)
            head = DraftVocabulary(head, target_ids, config.vocab_size)
        self._head = head
        self._cos_sin = rope_of(config, context)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self._fc(features.flatten(1))

    def run(self, h: torch.Tensor, tokens: torch.Tensor, at: ChainPlaces) -> torch.Tensor:
        return self._layer.run(h, self._target.embed(tokens), self._cos_sin, at.cache(-1))

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self._head(rms_norm(h, self._norm.weight, self._norm.eps))


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs EAGLE-3 fuses: low, middle and high."""
    return 1, num_layers // 2 - 1, num_layers - 4
