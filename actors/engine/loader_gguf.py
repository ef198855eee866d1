# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Weights and config of a GGUF file, under Hugging Face's names and in Hugging Face's layout.

GGUF interleaves the rows of llama's q and k; that is undone here, so that a model never knows which file it came from.
"""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize

from baton.actors.engine.model_config import UnsupportedModelError
from baton.actors.engine.weights import CheckpointError, check_shape

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_ROPE_SCALINGS = {"none": "default", "linear": "linear"}
_CHUNK_ELEMENTS = 1 << 20  # what is dequantised at a time: bounds the temporary arrays
_GEMMA3_27B_LAYERS = 62


class _Reader(gguf.GGUFReader):
    """Slices a plain array over the mapped file: slices of np.memmap cost 3 times more, and a tokenizer has 10^5."""

    def _get(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        return super()._get(*args, **kwargs)


class GGUFWeights:
    def __init__(self, path: Path) -> None:
        try:
            reader = _Reader(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
        self._path = path
        # The vocabulary is the tokenizer's business, and 100 MB of little arrays: it must not outlive this call.
        self._fields = {key: field.contents() for key, field in reader.fields.items() if not _is_vocabulary(key)}
        self._arch = self._field("general.architecture", required=True)
        if self._arch not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise UnsupportedModelError(f"{path.name}: GGUF architecture {self._arch!r}; supported: {known}")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._tensors = {hf: tensors[name] for hf, name in self._hf_names(tensors.keys()).items()}

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dest: torch.Tensor) -> None:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path.name} has no tensor for {name}")
        tensor = self._tensors[name]
        check_shape(name, tuple(int(size) for size in reversed(tensor.shape)), shape)
        first: int = part[0].start
        last: int = part[0].stop
        rows = np.arange(first, last)
        if self._arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            rows = _interleaved_rows(shape[0], self._head_dim())[rows]
        step = max(1, _CHUNK_ELEMENTS // int(np.prod(shape[1:], dtype=np.int64)))
        for start in range(0, len(rows), step):
            values = dequantize(tensor.data[rows[start : start + step]], tensor.tensor_type)
            dest[start : start + step].copy_(torch.from_numpy(values)[:, *part[1:]])

    def hf_config(self) -> dict[str, Any]:
        """This file's metadata, spelt as config.json spells it."""
        vocab_size = int(self._tensors["model.embed_tokens.weight"].shape[1])
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self._arch]],
            "vocab_size": vocab_size,
            "hidden_size": self._arch_field("embedding_length", required=True),
            "intermediate_size": self._arch_field("feed_forward_length", required=True),
            "num_hidden_layers": self._arch_field("block_count", required=True),
            "num_attention_heads": self._arch_field("attention.head_count", required=True),
            "num_key_value_heads": self._arch_field("attention.head_count_kv"),
            "head_dim": self._head_dim(),
            "rms_norm_eps": self._arch_field("attention.layer_norm_rms_epsilon", required=True),
            "max_position_embeddings": self._arch_field("context_length", required=True),
            "rope_theta": self._arch_field("rope.freq_base") or 10_000.0,
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_ids(),
        }
        if self._arch == "gemma3":
            config |= self._gemma3_config(config)
        return config

    def _gemma3_config(self, config: dict[str, Any]) -> dict[str, Any]:
        # What the format leaves out, every Gemma 3 shares, save for the attention scale of its largest.
        is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
        per_head = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self._arch_field("attention.sliding_window", required=True),
            "rope_local_base_freq": self._arch_field("rope.freq_base_swa") or 10_000.0,
            "query_pre_attn_scalar": per_head,
            "norm_offset": 0.0,  # the file's norms hold 1 + w already
        }

    def _rope_scaling(self) -> dict[str, Any]:
        kind = self._arch_field("rope.scaling.type") or "none"
        if kind not in _ROPE_SCALINGS:
            known = ", ".join(_ROPE_SCALINGS)
            raise UnsupportedModelError(f"{self._arch}.rope.scaling.type={kind!r}; supported: {known}")
        return {"rope_type": _ROPE_SCALINGS[kind], "factor": self._arch_field("rope.scaling.factor")}

    def _eos_ids(self) -> list[int]:
        found = (self._field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return sorted({token for token in found if token is not None})

    def _head_dim(self) -> int:
        by_file = self._arch_field("attention.key_length") or self._arch_field("rope.dimension_count")
        if by_file is not None:
            return by_file
        return self._arch_field("embedding_length", required=True) // self._arch_field(
            "attention.head_count", required=True
        )

    def _arch_field(self, key: str, *, required: bool = False) -> Any:
        return self._field(f"{self._arch}.{key}", required=required)

    def _field(self, key: str, *, required: bool = False) -> Any:
        value = self._fields.get(key)
        if value is None and required:
            raise CheckpointError(f"{self._path.name} lacks the metadata field {key}")
        return value

    def _hf_names(self, names: Set[str]) -> dict[str, str]:
        """Map Hugging Face's name of each tensor to the file's, by the gguf package's own table."""
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch)
        num_layers = self._arch_field("block_count", required=True)
        table = gguf.get_tensor_name_map(arch, num_layers)
        modules = [f"model.layers.{layer}.{module}" for layer in range(num_layers) for module in _LAYER_MODULES]
        hf_names = {name: name for name in names}  # whatever the table does not know keeps its own name, and is noticed
        for module in (*_MODULES, *modules):
            for suffix in (".weight", ".bias"):
                name = f"{table.get_name(module)}{suffix}"
                if name in names:
                    hf_names.pop(name, None)
                    hf_names[module + suffix] = name
        return hf_names


_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "input_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _is_vocabulary(key: str) -> bool:
    return key.startswith("tokenizer.") and not key.endswith("_id")


def _interleaved_rows(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """For each row in Hugging Face's order, its row in GGUF, which stores dims i and i + head_dim / 2 side by side."""
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
