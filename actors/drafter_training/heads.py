# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The draft heads as torch modules that can be trained. A `state_dict` is the public checkpoint but for its maps.

A head reads at position t the target's features after token t and the embedding of token t + 1, and foresees token
t + 2. Drafting on, it reads its own output in place of features. For training this runs over all positions at once, one
unrolled step after another (EAGLE-3's training-time test): the queries of step j see the keys of step 0 up to their own
position, and those of steps 1..j at their own place only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from baton.actors.engine.model_config import ModelConfig
from baton.actors.engine.rope import cos_sin_table


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(slots=True)
class Unrolled:
    """Keys and values of the steps so far, each [batch, kv_heads, length, head_dim]."""

    keys: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    values: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class DraftHead(Protocol):
    """features and embedded run parallel: [batch, length, ...]."""

    def fuse(self, features: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Make the first step's input of the target's tapped features and its last hidden states."""
        ...

    def step(self, h: torch.Tensor, embedded: torch.Tensor, cos_sin: torch.Tensor, past: Unrolled) -> torch.Tensor:
        """Return the next step's input."""
        ...

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Over the draft vocabulary, of what `step` returned."""
        ...


class Attention(nn.Module):
    def __init__(self, config: HeadConfig, in_size: int) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(in_size, width, bias=False)
        self.k_proj = nn.Linear(in_size, kv_width, bias=False)
        self.v_proj = nn.Linear(in_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, past: Unrolled) -> torch.Tensor:
        """cos_sin: [max_context, head_dim], as of the engine."""
        step, length = len(past.keys), x.shape[1]
        places = cos_sin[step : step + length]
        query = _rotate(self._heads(self.q_proj(x)), places)
        past.keys.append(_rotate(self._heads(self.k_proj(x)), places))
        past.values.append(self._heads(self.v_proj(x)))
        if step == 0:
            mixed = F.scaled_dot_product_attention(query, past.keys[0], past.values[0], is_causal=True, enable_gqa=True)
        else:
            mixed = self._mix_steps(query, past)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)

    def _mix_steps(self, query: torch.Tensor, past: Unrolled) -> torch.Tensor:
        group = self.config.num_heads // self.config.num_kv_heads
        keys = [key.repeat_interleave(group, dim=1) for key in past.keys]
        values = [value.repeat_interleave(group, dim=1) for value in past.values]
        length = query.shape[2]
        scores = query @ keys[0].transpose(2, 3)  # [batch, heads, length, length]
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        own = [(query * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat((scores.masked_fill(hidden, float("-inf")), *own), dim=-1) * self.config.head_dim**-0.5
        weights = scores.softmax(dim=-1)
        mixed = weights[..., :length] @ values[0]
        for i, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + i, None] * value
        return mixed


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = _norm(config)
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, h: torch.Tensor, embedded: torch.Tensor, cos_sin: torch.Tensor, past: Unrolled) -> torch.Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(h)), dim=-1)
        h = h + self.self_attn(both, cos_sin, past)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Head(nn.Module):
    def __init__(self, config: HeadConfig, draft_vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = _norm(config)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)

    def fuse(self, features: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def step(self, h: torch.Tensor, embedded: torch.Tensor, cos_sin: torch.Tensor, past: Unrolled) -> torch.Tensor:
        return self.midlayer(h, embedded, cos_sin, past)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(h))


class MtpHead(nn.Module):
    """A multi-token-prediction module. `rows` is the draft vocabulary's part of the target's head, which it shares."""

    def __init__(self, config: HeadConfig, rows: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.enorm = _norm(config)
        self.hnorm = _norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = _norm(config)
        self.mlp = MLP(config)
        self.shared_head = nn.ModuleDict({"norm": _norm(config)})
        self.register_buffer("rows", rows, persistent=False)

    def fuse(self, features: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def step(self, h: torch.Tensor, embedded: torch.Tensor, cos_sin: torch.Tensor, past: Unrolled) -> torch.Tensor:
        h = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(h)), dim=-1))
        h = h + self.self_attn(self.input_layernorm(h), cos_sin, past)
        return h + self.mlp(self.post_attention_layernorm(h))

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(self.shared_head["norm"](h), self.get_buffer("rows"))


def rope_table(config: ModelConfig, max_len: int) -> torch.Tensor:
    return cos_sin_table(config.layers[-1].rope, config.head_dim, max_len)


class _FloatNorm(nn.RMSNorm):
    """In float32 under autocast too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def _norm(config: HeadConfig) -> nn.RMSNorm:
    return _FloatNorm(config.hidden_size, eps=config.rms_norm_eps)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [batch, heads, length, head_dim]; pairs dim i with i + head_dim / 2."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
