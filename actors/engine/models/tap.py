"""Copies of the residual stream from inside a model, for heads that draft from more than its last hidden states.

A `Tap` stands in a model's list of layers in place of the layer it wraps, so that the model's own loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from baton.actors.engine.models.llama import LayerCache, Llama, LlamaLayer

Keep = Callable[[torch.Tensor, LayerCache], None]  # h [num_tokens, hidden] changes afterwards: copy it


class Tap:
    def __init__(self, layer: LlamaLayer, keep: Keep) -> None:
        self._layer = layer
        self._keep = keep

    def attend(self, h: torch.Tensor, cos_sin: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        self._keep(h, cache)
        return self._layer.attend(h, cos_sin, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 fuses: low, middle and high."""
    return 2, num_layers // 2, num_layers - 3


def tap_layers(model: Llama, keep: dict[int, Keep]) -> None:
    """Let `keep[i]` see the input of layer i in every forward pass."""
    for index, function in keep.items():
        model.layers[index] = Tap(model.layers[index], function)  # pyright: ignore[reportArgumentType, reportCallIssue]
