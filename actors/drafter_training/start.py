# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Heads as they start: so placed that an untrained one already says what the model's own last token would."""

from __future__ import annotations

import torch
from torch import nn

from baton.actors.drafter_training.heads import Eagle3Head, HeadConfig, MtpHead
from baton.actors.drafter_training.objective import Target
from baton.actors.drafter_training.samples import Sample
from baton.actors.engine.model_config import ModelConfig, UnsupportedModelError
from baton.actors.engine.models.llama import LlamaLayer

_INIT_STD = 0.02


def head_config(model: ModelConfig, intermediate_size: int) -> HeadConfig:
    return HeadConfig(
        hidden_size=model.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
    )


@torch.no_grad()
def start_eagle3(config: HeadConfig, target: Target, samples: list[Sample], seed: int) -> Eagle3Head:
    """`fc` passes the highest features on, scaled to one; the head and its norm are the model's."""
    head = Eagle3Head(config, len(target.target_ids))
    _randomize(head, seed)
    hidden = config.hidden_size
    high = torch.cat([sample.features[:, -hidden:].float() for sample in samples[:16]])
    head.fc.weight.mul_(1 / float(high.std()))
    head.fc.weight[:, -hidden:] += torch.eye(hidden) / float(high.std())
    head.norm.weight.copy_(target.model.final_norm.weight)
    head.lm_head.weight.copy_(target.rows)
    return head.to(target.device)


@torch.no_grad()
def start_mtp(config: HeadConfig, target: Target, seed: int) -> MtpHead:
    if target.model.layer_type is not LlamaLayer:
        raise UnsupportedModelError("an mtp module is trained for plain Llama layers only; use eagle3")
    head = MtpHead(config, target.rows)
    _randomize(head, seed)
    head.eh_proj.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    final_norm = head.shared_head["norm"]
    assert isinstance(final_norm, nn.RMSNorm)
    final_norm.weight.copy_(target.model.final_norm.weight)
    return head.to(target.device)


def _randomize(head: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=_INIT_STD, generator=generator)
