"""Multi-token prediction as of DeepSeek-V3: a further decoder layer that was trained with the model.

It stands behind the model's layers in the checkpoint, as `model.layers.N` with `num_nextn_predict_layers` = 1 in its
config: enorm and hnorm, eh_proj joining embedding and last hidden state, a layer like the others, and a norm before
the model's own head. Or in a folder of its own under the same names; that may hold `d2t`, a draft vocabulary of which
the model's head computes no more.
"""

from __future__ import annotations

from pathlib import Path

import torch

from baton.actors.engine.drafters.chain import (
    ChainDrafter,
    ChainPlaces,
    DraftVocabulary,
    check_fits,
    head_rows,
    llama_target,
    read_target_ids,
    rope_of,
)
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import DraftModule
from baton.actors.engine.loader_safetensors import SafetensorsWeights, read_hf_config
from baton.actors.engine.model_config import HFConfig, ModelConfig, UnsupportedModelError
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.llama import Llama, attention_shape, read_norm
from baton.actors.engine.weights import Weights
from baton.kernels.fused_linear import NormWeight, norm_linear
from baton.kernels.linear import Linear
from baton.kernels.linear_cpu import fastest_linear
from baton.kernels.rms_norm import rms_norm


def make_mtp(context: ModuleContext) -> DraftModule:
    path = context.target_path if context.config.model is None else resolve_model(context.config.model)
    hf = _read_config(path)
    weights = Weights(SafetensorsWeights(path), context.placement)
    network = Mtp(weights, hf, context)
    if context.config.model is not None:
        weights.check_all_read("t2d")
    return ChainDrafter(network, context)


def _read_config(path: Path) -> HFConfig:
    """config.json, where it names exactly one module. Raises UnsupportedModelError."""
    hf: HFConfig = {} if path.suffix == ".gguf" else read_hf_config(path)
    if (found := hf.get("num_nextn_predict_layers", 0)) != 1:
        raise UnsupportedModelError(
            f"{path.name}: num_nextn_predict_layers is {found}; the mtp drafter runs one module, again and again: "
            f"set speculation.model to a head trained for this model, or use another drafter"
        )
    return hf


class Mtp:
    num_layers = 1

    def __init__(self, weights: Weights, hf: HFConfig, context: ModuleContext) -> None:
        target = llama_target(context)
        config = ModelConfig.from_hf(hf)
        check_fits(config, target.config)
        if config.num_layers != target.config.num_layers:
            raise UnsupportedModelError(
                f"the module was made to stand behind {config.num_layers} layers, the model has "
                f"{target.config.num_layers}: not a module for it"
            )
        hidden, prefix = config.hidden_size, f"model.layers.{config.num_layers}"
        self._target = target
        self.taps = (config.num_layers - 1,)
        self.shape = attention_shape(config, config.layers[-1], weights.shard, context.block_size)
        self._enorm, self._hnorm = (read_norm(weights, f"{prefix}.{name}", config) for name in ("enorm", "hnorm"))
        self._eh_proj = fastest_linear(weights.tensor(f"{prefix}.eh_proj.weight", hidden, 2 * hidden))
        self._layer = target.layer_type(weights, prefix, config, self.shape)
        self._norm: NormWeight = read_norm(weights, f"{prefix}.shared_head.norm", config)
        self._head = _head(weights, prefix, hf, target)
        self._cos_sin = rope_of(config, context)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features[:, 0]

    def run(self, h: torch.Tensor, tokens: torch.Tensor, at: ChainPlaces) -> torch.Tensor:
        parts = ((self._target.embed(tokens), self._enorm), (h, self._hnorm))
        h = self._eh_proj(torch.cat([rms_norm(x, norm.weight, norm.eps) for x, norm in parts], dim=-1))
        return self._layer.feed(self._layer.attend(h, self._cos_sin, at.cache(-1)))

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        if isinstance(self._head, DraftVocabulary):
            return self._head(rms_norm(h, self._norm.weight, self._norm.eps))
        return norm_linear(h, self._norm, self._head)


def _head(weights: Weights, prefix: str, hf: HFConfig, target: Llama) -> Linear:
    """The model's head, of which DeepSeek's files hold a copy; or its rows of the draft vocabulary."""
    vocab_size, hidden = target.config.vocab_size, target.config.hidden_size
    if not weights.has("d2t"):
        copy = f"{prefix}.shared_head.head"
        return weights.gathered_linear(copy, vocab_size, hidden) if weights.has(f"{copy}.weight") else target.lm_head
    target_ids = read_target_ids(weights, hf["draft_vocab_size"], vocab_size)
    return DraftVocabulary(fastest_linear(head_rows(target, target_ids)), target_ids, vocab_size)
