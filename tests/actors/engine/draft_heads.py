"""Draft heads as small files of the public shape, and the same networks as plain torch over whole sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model_cases import Reference
from safetensors.torch import save_file
from test_models import TINY, build

Tensors = dict[str, torch.Tensor]
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
VOCAB = TINY["vocab_size"]
LAYERS = 7
THETA, EPS = 10_000.0, 1e-6
DRAFT_IDS = torch.arange(3, VOCAB, 2)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
}


def target(tied: bool = False) -> Reference:
    return build("llama", num_hidden_layers=LAYERS, tie_word_embeddings=tied)


def write(folder: Path, tensors: Tensors, config: dict[str, Any], name: str = "model") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layer_tensors(prefix: str, num_inputs: int = 1, *, norms: Sequence[str], num_heads: int = HEADS) -> Tensors:
    sizes = {
        "self_attn.q_proj": (num_heads * HEAD_DIM, num_inputs * HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, num_inputs * HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, num_inputs * HIDDEN),
        "self_attn.o_proj": (HIDDEN, num_heads * HEAD_DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    tensors = {f"{prefix}.{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    return tensors | {f"{prefix}.{name}.weight": torch.rand(HIDDEN) + 0.3 for name in norms}


def eagle3_tensors(num_heads: int = HEADS) -> Tensors:
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[DRAFT_IDS] = True
    return layer_tensors("midlayer", 2, norms=norms, num_heads=num_heads) | {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * 0.2,
        "norm.weight": torch.rand(HIDDEN) + 0.3,
        "lm_head.weight": torch.randn(len(DRAFT_IDS), HIDDEN),
        "d2t": DRAFT_IDS - torch.arange(len(DRAFT_IDS)),
        "t2d": t2d,
    }


def eagle_tensors(num_layers: int) -> Tensors:
    tensors = {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),  # a copy of the target's in real files; not to be read
        "fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) * 0.2,
        "fc.bias": torch.randn(HIDDEN),
    }
    for i in range(num_layers):
        norms = ("post_attention_layernorm",) if i == 0 else ("input_layernorm", "post_attention_layernorm")
        tensors |= layer_tensors(f"layers.{i}", norms=norms)
    return tensors


def mtp_tensors(*, with_head: bool) -> Tensors:
    prefix = f"model.layers.{LAYERS}"
    norms = ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
    tensors = layer_tensors(prefix, norms=norms)
    tensors[f"{prefix}.eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.2
    if with_head:
        tensors[f"{prefix}.shared_head.head.weight"] = torch.randn(VOCAB, HIDDEN)
    return tensors


def medusa_tensors(num_heads: int, num_blocks: int) -> Tensors:
    tensors: Tensors = {}
    for i in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{i}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN) * 0.2
            tensors[f"{i}.{block}.linear.bias"] = torch.randn(HIDDEN)
        tensors[f"{i}.{num_blocks}.weight"] = torch.randn(VOCAB, HIDDEN)
    return tensors


@dataclass(frozen=True)
class PlainChain:
    """A network over whole sequences: what its passes read, and what becomes of it."""

    fuse: Callable[[torch.Tensor], torch.Tensor]  # of the target's features [length, taps, hidden]
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (h, embedded), both [length, hidden]
    logits: Callable[[torch.Tensor], torch.Tensor]

    def draft(self, features: torch.Tensor, embed: torch.Tensor, following: list[int], num: int) -> list[torch.Tensor]:
        """Greedy: the logits of each of `num` drafts after the last token."""
        h, tokens = self.fuse(features), list(following)
        drafts: list[torch.Tensor] = []
        for _ in range(num):
            out = self.run(h, embed[torch.tensor(tokens)])
            drafts.append(self.logits(out[-1]))
            h = torch.cat((h, out[-1:]))
            tokens.append(int(drafts[-1].argmax()))
        return drafts


def plain_eagle3(t: Tensors, _: Reference) -> PlainChain:
    def run(h: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        x = torch.cat((_norm(embedded, t, "midlayer.input_layernorm"), _norm(h, t, "midlayer.hidden_norm")), dim=-1)
        return _rest(h, x, t, "midlayer")

    return PlainChain(
        lambda features: features.flatten(1) @ t["fc.weight"].T,
        run,
        lambda h: _at_draft_ids(_norm(h, t, "norm") @ t["lm_head.weight"].T),
    )


def plain_eagle(t: Tensors, model: Reference, num_layers: int) -> PlainChain:
    def run(h: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        h = torch.cat((embedded, h), dim=-1) @ t["fc.weight"].T + t["fc.bias"]
        for i in range(num_layers):
            h = _rest(h, _norm(h, t, f"layers.{i}.input_layernorm") if i else h, t, f"layers.{i}")
        return h

    return PlainChain(lambda features: model.model.norm(features[:, 0]), run, model.lm_head)


def plain_mtp(t: Tensors, model: Reference, *, is_reduced: bool = False) -> PlainChain:
    prefix = f"model.layers.{LAYERS}"

    def run(h: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        x = torch.cat((_norm(embedded, t, f"{prefix}.enorm"), _norm(h, t, f"{prefix}.hnorm")), dim=-1)
        h = x @ t[f"{prefix}.eh_proj.weight"].T
        return _rest(h, _norm(h, t, f"{prefix}.input_layernorm"), t, prefix)

    def logits(h: torch.Tensor) -> torch.Tensor:
        head = t.get(f"{prefix}.shared_head.head.weight", model.lm_head.weight)
        h = _norm(h, t, f"{prefix}.shared_head.norm")
        return _at_draft_ids(h @ head[DRAFT_IDS].T) if is_reduced else h @ head.T

    return PlainChain(lambda features: features[:, 0], run, logits)


def plain_medusa(t: Tensors, num_blocks: int, h: torch.Tensor, head: int) -> torch.Tensor:
    for block in range(num_blocks):
        h = h + F.silu(h @ t[f"{head}.{block}.linear.weight"].T + t[f"{head}.{block}.linear.bias"])
    return h @ t[f"{head}.{num_blocks}.weight"].T


def _at_draft_ids(logits: torch.Tensor) -> torch.Tensor:
    full = torch.full((VOCAB,), float("-inf"))
    full[DRAFT_IDS] = logits
    return full


def _norm(x: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    return x * (x.pow(2).mean(dim=-1, keepdim=True) + EPS).rsqrt() * t[f"{name}.weight"]


def _rest(h: torch.Tensor, x: torch.Tensor, t: Tensors, prefix: str) -> torch.Tensor:
    """The layer after its first norms, of which `x` comes."""
    q, k, v = ((x @ t[f"{prefix}.self_attn.{n}_proj.weight"].T).view(len(x), -1, HEAD_DIM) for n in "qkv")
    num_heads = q.shape[1]
    q, k = _rotate(q), _rotate(k)
    mixed = torch.zeros(len(x), num_heads, HEAD_DIM)
    for head in range(num_heads):
        shared = head // (num_heads // KV_HEADS)
        scores = (q[:, head] @ k[:, shared].T) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        mixed[:, head] = scores.softmax(dim=-1) @ v[:, shared]
    h = h + mixed.flatten(1) @ t[f"{prefix}.self_attn.o_proj.weight"].T
    x = _norm(h, t, f"{prefix}.post_attention_layernorm")
    gate, up = (x @ t[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return h + (F.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T


def _rotate(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1)[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
