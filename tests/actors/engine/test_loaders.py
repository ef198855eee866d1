"""Loading: exact values, little memory, little time, and files that do not fit are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_cases import load, smollm2_path, smollm2_reference
from safetensors.torch import save_file
from test_models import build

from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.loader_gguf import GGUFWeights
from baton.actors.engine.loader_safetensors import SafetensorsWeights, read_hf_config
from baton.actors.engine.model_config import UnsupportedModelError
from baton.actors.engine.weights import CheckpointError, Placement, Weights, WeightSource
from baton.kernels.collective import NoCollective

MEASURE_LOADING = """
import gc, json, sys, time, psutil, torch
from pathlib import Path
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.weights import Placement
process = psutil.Process()
torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
before, start = process.memory_info().rss, time.process_time()
model = build_model(open_checkpoint(Path(sys.argv[1])), Placement(), block_size=16, max_context=64)
seconds = time.process_time() - start
gc.collect()
print(json.dumps({"bytes": process.memory_info().rss - before, "cpu_s": seconds}))
"""


def whole(source: WeightSource, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dest = torch.empty(shape)
    source.read(name, shape, tuple(slice(0, size) for size in shape), dest)
    return dest


def test_gguf_weights_equal_transformers_bit_for_bit():
    source = GGUFWeights(smollm2_path())
    state = smollm2_reference().state_dict()
    state.pop("lm_head.weight")  # tied
    assert source.names() == state.keys()
    for name, expected in state.items():
        assert torch.equal(whole(source, name, tuple(expected.shape)), expected), name


def test_a_part_of_a_gguf_tensor_is_that_part_of_the_whole():
    source = GGUFWeights(smollm2_path())
    name = "model.layers.3.self_attn.k_proj.weight"
    part = torch.empty(64, 100)
    source.read(name, (192, 576), (slice(64, 128), slice(17, 117)), part)
    assert torch.equal(part, whole(source, name, (192, 576))[64:128, 17:117])


def test_loading_smollm2_is_quick_and_keeps_no_second_copy():
    output = subprocess.run(
        [sys.executable, "-c", MEASURE_LOADING, str(smollm2_path())], capture_output=True, check=True, timeout=120
    )
    measured = json.loads(output.stdout)
    weight_bytes = 4 * sum(parameter.numel() for parameter in smollm2_reference().parameters())
    assert measured["bytes"] < 1.15 * weight_bytes
    assert measured["cpu_s"] < 10


def test_llama3_frequencies_of_a_gguf_file_equal_those_of_its_config(tmp_path: Path):
    """GGUF holds llama3's scaling as a tensor of divisors; transformers' table is the reference."""
    reference = build("llama-llama3-tied")
    reference.save_pretrained(tmp_path)
    by_config = load(tmp_path, max_context=128)
    path = tmp_path / "tiny.gguf"
    plain = 1.0 / 500.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    scaled = reference.model.rotary_emb.inv_freq.numpy()
    write_llama_gguf(path, reference.state_dict(), plain / scaled)
    by_tensor = load(path, max_context=128)
    torch.testing.assert_close(by_tensor._cos_sins[0], by_config._cos_sins[0], atol=1e-4, rtol=0)  # type: ignore[attr-defined]


def write_llama_gguf(path: Path, state: dict[str, torch.Tensor], rope_freqs: npt.NDArray[np.float32]) -> None:
    """A GGUF file of build("llama...")'s shape, in float32 and without a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, tensor in state.items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(str(names.get_name(name, (".weight",))), tensor.numpy())
    writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_architecture_that_is_unknown_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'mamba'; supported: llama, qwen2, qwen3, gemma3"):
        GGUFWeights(tmp_path / "model.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"PK" * 64)
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_sharded_directory_reads_as_one(tmp_path: Path):
    reference = build("qwen3")
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source = SafetensorsWeights(tmp_path)
    for name, expected in reference.state_dict().items():
        assert torch.equal(whole(source, name, tuple(expected.shape)), expected)
    next(tmp_path.glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002"):
        SafetensorsWeights(tmp_path)


def test_each_rank_reads_its_share(tmp_path: Path):
    save_file(
        {"a.weight": torch.arange(24.0).view(6, 4), "b.weight": torch.arange(8.0).view(2, 4)},
        tmp_path / "x.safetensors",
    )
    x = torch.randn(3, 4)
    weights = [rank_weights(tmp_path, rank, 2) for rank in (0, 1)]
    merged = torch.cat([w.merged_linear({"a": 6, "b": 2}, 4)(x) for w in weights], dim=1)
    a, b = torch.arange(24.0).view(6, 4), torch.arange(8.0).view(2, 4)
    torch.testing.assert_close(merged, x @ torch.cat((a[:3], b[:1], a[3:], b[1:])).T)
    reduced = [w.reduced_linear("a", 6, 4)(x[:, 2 * rank : 2 * rank + 2]) for rank, w in enumerate(weights)]
    torch.testing.assert_close(reduced[0] + reduced[1], x @ a.T)
    with pytest.raises(ValueError, match="a's outputs = 6 cannot be split over 4 ranks"):
        rank_weights(tmp_path, 1, 4).merged_linear({"a": 6}, 4)


def rank_weights(path: Path, rank: int, world: int) -> Weights:
    """The share of one rank, which nothing joins with the others'."""
    return Weights(SafetensorsWeights(path), Placement(collective=NoCollective(rank, world)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": torch.ones(2)}, "1 tensors that this architecture does not use: extra.weight"),
        ({"model.norm.weight": torch.ones(7)}, r"model.norm.weight has shape \[7\].*asks for \[64\]"),
        ({"model.norm.weight": None}, "no tensor model.norm.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
):
    reference = build("llama")
    reference.save_pretrained(tmp_path)
    state = {name: change.get(name, tensor) for name, tensor in (reference.state_dict() | change).items()}
    save_file({name: t.contiguous() for name, t in state.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, max_context=64)


def test_dummy_weights_need_only_a_config(tmp_path: Path):
    build("gemma3").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Gemma3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        open_checkpoint(tmp_path)
    model = build_model(open_checkpoint(tmp_path, dummy=True), Placement(), block_size=16, max_context=64)
    assert model.config.num_layers == 7


def test_generation_config_holds_the_full_list_of_eos_ids(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert read_hf_config(tmp_path)["eos_token_id"] == 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    assert read_hf_config(tmp_path)["eos_token_id"] == [1, 9]


def test_more_context_than_the_model_has_is_refused(tmp_path: Path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="max_context 257 exceeds the model's 256"):
        load(tmp_path, max_context=257)
