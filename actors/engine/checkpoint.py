"""From a Hugging Face directory or a .gguf file to a model on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.actors.engine.loader_gguf import GGUFWeights
from baton.actors.engine.loader_safetensors import SafetensorsWeights, read_hf_config
from baton.actors.engine.model_config import ModelConfig, UnsupportedModelError
from baton.actors.engine.models.gemma3 import Gemma3
from baton.actors.engine.models.llama import Llama
from baton.actors.engine.models.model import Model
from baton.actors.engine.models.qwen import Qwen2, Qwen3
from baton.actors.engine.vocabulary import num_token_ids
from baton.actors.engine.weights import DummyWeights, Placement, Weights, WeightSource

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,  # its sliding window is the config's to say
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Gemma3ForCausalLM": Gemma3,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    config: ModelConfig
    source: WeightSource


def open_checkpoint(path: Path, *, dummy: bool = False) -> Checkpoint:
    """Read the config and find the tensors; no weight is read yet. A dummy needs no tensors: config.json will do."""
    gguf = GGUFWeights(path) if path.suffix == ".gguf" else None
    hf = gguf.hf_config() if gguf else read_hf_config(path)
    config = ModelConfig.from_hf(hf | {"num_token_ids": num_token_ids(path)})
    return Checkpoint(config, DummyWeights() if dummy else gguf or SafetensorsWeights(path))


def build_model(checkpoint: Checkpoint, placement: Placement, *, block_size: int, max_context: int) -> Model:
    config = checkpoint.config
    if config.architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    config.check_splits_over(placement.collective.world)
    if max_context > config.max_context:
        raise UnsupportedModelError(
            f"max_context {max_context} exceeds the model's {config.max_context}; lower it to that or less"
        )
    weights = Weights(checkpoint.source, placement)
    model = MODELS[config.architecture](config, weights, block_size, max_context)
    tied = ("lm_head.weight",) if config.tie_embeddings else ()
    weights.check_all_read(*tied, *(name for name in checkpoint.source.names() if _is_behind(name, config)))
    return model


def _is_behind(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is of a layer behind the last: a multi-token-prediction module, which a drafter may load."""
    stem, _, rest = name.partition("model.layers.")
    index = rest.partition(".")[0]
    return not stem and index.isdigit() and int(index) >= config.num_layers
