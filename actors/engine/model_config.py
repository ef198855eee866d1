"""What a model is, as frozen data: read from a Hugging Face config dict (GGUF metadata is translated into one first).

Knows the quirks of config keys; knows no tensors and no files. Whatever it does not understand it refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.kernels.gated_activation import ActivationKind

HFConfig = Mapping[str, Any]

_ACTIVATIONS: dict[str, ActivationKind] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS = ("default", "linear", "llama3")
_MUST_BE_UNSET = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "mlp_bias",
    "quantization_config",
    "use_bidirectional_attention",
)


class UnsupportedModelError(ValueError):
    """The model is well-formed, but Baton cannot run it. The message names the field and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    # llama3 only: wavelengths between original_context / high and original_context / low are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class LayerConfig:
    rope: RopeConfig
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # Hugging Face's class name, e.g. LlamaForCausalLM
    vocab_size: int
    num_token_ids: int | None = None  # of them, where fewer are tokens: the others are never sampled
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    attention_scale: float
    activation: ActivationKind
    max_context: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    tie_embeddings: bool
    attention_bias: bool  # on q, k, v and o
    norm_offset: float  # added to norm weights at load: Gemma's checkpoints hold the w of (1 + w)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def check_splits_over(self, world: int) -> None:
        """Raise UnsupportedModelError unless every rank of `world` can hold an equal share of each layer."""
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if (size := getattr(self, name)) % world:
                raise UnsupportedModelError(
                    f"tensor_parallel = {world} cannot split the model's {name} = {size}; set it to a divisor of {size}"
                )

    @classmethod
    def from_hf(cls, hf: HFConfig) -> ModelConfig:
        _refuse_unknown(hf)
        num_heads = _need(hf, "num_attention_heads")
        hidden_size = _need(hf, "hidden_size")
        head_dim = hf.get("head_dim") or hidden_size // num_heads
        is_gemma = _architecture(hf) == "Gemma3ForCausalLM"
        return cls(
            architecture=_architecture(hf),
            vocab_size=_need(hf, "vocab_size"),
            num_token_ids=_num_token_ids(hf),
            hidden_size=hidden_size,
            intermediate_size=_need(hf, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            layers=_layers(hf),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            attention_scale=(hf.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            activation=_activation(hf),
            max_context=_need(hf, "max_position_embeddings"),
            eos_ids=_ids(hf.get("eos_token_id")),
            bos_id=hf.get("bos_token_id"),
            tie_embeddings=hf.get("tie_word_embeddings", is_gemma),  # its files leave the key out
            attention_bias=hf.get("attention_bias", False),
            norm_offset=hf.get("norm_offset", 1.0 if is_gemma else 0.0),
        )


def _refuse_unknown(hf: HFConfig) -> None:
    for key in _MUST_BE_UNSET:
        if hf.get(key):
            raise UnsupportedModelError(f"{key}={hf[key]!r} is not supported; only models without it can be served")


def _architecture(hf: HFConfig) -> str:
    names = hf.get("architectures") or ()
    if len(names) != 1:
        raise UnsupportedModelError(f"architectures={names!r}: expected exactly one class name in config.json")
    return names[0]


def _need(hf: HFConfig, key: str) -> Any:
    value = hf.get(key)
    if value is None:
        raise UnsupportedModelError(f"the model's config lacks {key}")
    return value


def _num_token_ids(hf: HFConfig) -> int | None:
    known = hf.get("num_token_ids")  # of the tokenizer
    return known if known is not None and known < _need(hf, "vocab_size") else None


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _activation(hf: HFConfig) -> ActivationKind:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layers(hf: HFConfig) -> tuple[LayerConfig, ...]:
    ropes = _ropes(hf)
    window = hf.get("sliding_window")
    return tuple(
        LayerConfig(ropes[kind], window if kind == "sliding_attention" else None)
        for kind in hf.get("layer_types") or _default_layer_types(hf)
    )


def _default_layer_types(hf: HFConfig) -> list[str]:
    """Name each layer's attention as the family's own code does where the config has no layer_types."""

    def none(_: int) -> bool:
        return False

    def every(_: int) -> bool:
        return hf.get("sliding_window") is not None

    def upper(layer: int) -> bool:
        return bool(hf.get("use_sliding_window")) and layer >= hf.get("max_window_layers", 28)

    def all_but_each_nth(layer: int) -> bool:
        return (layer + 1) % hf.get("sliding_window_pattern", 6) != 0

    is_windowed: dict[str, Callable[[int], bool]] = {
        "MistralForCausalLM": every,
        "Qwen2ForCausalLM": upper,
        "Qwen3ForCausalLM": upper,
        "Gemma3ForCausalLM": all_but_each_nth,
    }
    windowed = is_windowed.get(_architecture(hf), none)
    num_layers = _need(hf, "num_hidden_layers")
    return ["sliding_attention" if windowed(layer) else "full_attention" for layer in range(num_layers)]


def _ropes(hf: HFConfig) -> dict[str, RopeConfig]:
    """RoPE of each kind of layer, in any of its spellings: rope_parameters per kind, or for all, or rope_scaling."""
    parameters: dict[str, Any] | None = hf.get("rope_parameters")
    if parameters is None:
        parameters = {"rope_theta": hf.get("rope_theta", 10_000.0), **(hf.get("rope_scaling") or {})}
    if "full_attention" in parameters:
        return {kind: _rope(values, hf) for kind, values in parameters.items()}
    rope = _rope(parameters, hf)
    local_theta = hf.get("rope_local_base_freq")
    return {
        "full_attention": rope,
        "sliding_attention": rope if local_theta is None else RopeConfig(theta=local_theta),
    }


def _rope(parameters: Mapping[str, Any], hf: HFConfig) -> RopeConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(f"rope_type={kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    if parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor must be 1: every dim of a head is rotated")
    return RopeConfig(
        theta=float(_need(parameters, "rope_theta")),
        kind=kind,
        factor=1.0 if kind == "default" else float(_need(parameters, "factor")),
        low_freq_factor=parameters.get("low_freq_factor", 1.0),
        high_freq_factor=parameters.get("high_freq_factor", 1.0),
        original_context=parameters.get("original_max_position_embeddings", 0),
    )
