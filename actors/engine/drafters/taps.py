"""Records the outputs of some of a model's layers, for draft modules that read them.

A copy of the model, with the same weights, has these layers wrapped: a model without taps runs as if this did not
exist. What is recorded lies in one buffer that never moves, which is what a CUDA graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from baton.actors.engine.models.llama import LayerCache, Llama, LlamaLayer


class Taps:
    def __init__(self, model: Llama, layers: Sequence[int], max_tokens: int) -> None:
        """`max_tokens`: the most that one step of the target computes, padding included."""
        self.model = copy(model)
        self.model.layers = list(model.layers)
        self._recorded = model.embeddings.new_zeros(max_tokens, len(layers), model.config.hidden_size)
        for index, layer in enumerate(layers):
            self.model.layers[layer] = _TappedLayer(self.model.layers[layer], self._recorded[:, index])

    def features(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, num_layers, hidden], of the last forward pass."""
        return self._recorded[:num_tokens]


class _TappedLayer(LlamaLayer):
    def __init__(self, layer: LlamaLayer, out: torch.Tensor) -> None:
        self._layer = layer
        self._out = out  # [max_tokens, hidden]

    def attend(self, h: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        return self._layer.attend(h, cos_sin, cache)

    def feed(self, h: torch.Tensor) -> torch.Tensor:
        h = self._layer.feed(h)
        self._out[: h.shape[0]].copy_(h)
        return h
