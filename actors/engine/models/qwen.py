"""Qwen 2 and 3: Llama with a bias on q, k and v, or with a norm over each head of q and k."""

from __future__ import annotations

from baton.actors.engine.models.llama import Llama, LlamaLayer


class Qwen2Layer(LlamaLayer):
    has_qkv_bias = True


class Qwen2(Llama):
    layer_type = Qwen2Layer


class Qwen3Layer(LlamaLayer):
    has_qk_norm = True


class Qwen3(Llama):
    layer_type = Qwen3Layer
