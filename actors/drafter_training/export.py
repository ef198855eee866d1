# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Writes a trained head in the public format: config.json, and model.safetensors in half precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.actors.drafter_training.heads import Eagle3Head, HeadConfig, MtpHead
from baton.actors.drafter_training.vocabulary import d2t, t2d
from baton.actors.engine.model_config import ModelConfig, RopeConfig


def export_head(
    head: Eagle3Head | MtpHead, config: HeadConfig, model: ModelConfig, target_ids: torch.Tensor, folder: Path
) -> int:
    """Returns the size of the weights' file in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"model.layers.{model.num_layers}." if isinstance(head, MtpHead) else ""
    tensors = {prefix + name: value.detach().to(torch.bfloat16) for name, value in head.state_dict().items()}
    tensors["d2t"] = d2t(target_ids.cpu())
    tensors["t2d"] = t2d(target_ids.cpu(), model.vocab_size)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    described = _describe(head, config, model, len(target_ids))
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return (folder / "model.safetensors").stat().st_size


def _describe(head: Eagle3Head | MtpHead, config: HeadConfig, model: ModelConfig, draft_vocab: int) -> dict[str, Any]:
    is_mtp = isinstance(head, MtpHead)
    described = {
        "architectures": ["LlamaForCausalLM" if is_mtp else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        # A module stands behind the model's layers; an EAGLE head is a model of one layer.
        "num_hidden_layers": model.num_layers if is_mtp else 1,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": model.max_context,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": model.bos_id,
        "eos_token_id": list(model.eos_ids),
        **_rope(model.layers[-1].rope),
    }
    return described | ({"num_nextn_predict_layers": 1} if is_mtp else {})


def _rope(rope: RopeConfig) -> dict[str, Any]:
    theta = {"rope_theta": rope.theta}
    if rope.kind == "default":
        return theta
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return theta | {"rope_scaling": scaling}
