"""Weights of a Hugging Face directory: config.json beside *.safetensors.

Only the part of a tensor that is asked for is read.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.actors.engine.weights import CheckpointError, check_shape


def read_hf_config(directory: Path) -> dict[str, Any]:
    """config.json, with the end-of-sequence ids of generation_config.json, where chat models keep the full list."""
    config = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = _read_json(generation).get("eos_token_id")
        if eos is not None:
            config["eos_token_id"] = eos
    return config


class SafetensorsWeights:
    def __init__(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{directory} holds no *.safetensors file; convert the checkpoint to safetensors")
        index = directory / "model.safetensors.index.json"
        if index.exists():
            listed = set(_read_json(index)["weight_map"].values())
            missing = listed - {file.name for file in files}
            if missing:
                raise CheckpointError(f"{directory} lacks {', '.join(sorted(missing))}, which {index.name} lists")
            files = [file for file in files if file.name in listed]
        handles: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._home: dict[str, Any] = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118

    def names(self) -> Set[str]:
        return self._home.keys()

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dest: torch.Tensor) -> None:
        if name not in self._home:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        lazy = self._home[name].get_slice(name)
        check_shape(name, tuple(lazy.get_shape()), shape)
        dest.copy_(lazy[part])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
