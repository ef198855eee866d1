"""`baton train-drafter` on a tiny model: stopped, run again, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from baton.cluster.cli import app

TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}<|turn|>"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend: Any = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, additional_special_tokens=["<|turn|>"]
    ).save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=259,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def run(model: Path, folder: Path, *options: str) -> Any:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"tell me {i}"}) + "\n" for i in range(9)))
    small = ["--max-prompt-tokens", "64", "--max-new-tokens", "8", "--wave-size", "4", "--hold-every", "3"]
    small += ["--draft-vocab", "64", "--epochs", "20", "--unrolled-steps", "2"]
    command = ["train-drafter", "--model", str(model), "--prompts", str(prompts), "--out", str(folder / "out")]
    return CliRunner().invoke(app, [*command, *small, *options])


def test_a_stopped_run_goes_on_and_leaves_a_checkpoint_with_its_record(tiny_model: Path, tmp_path: Path):
    stopped = run(tiny_model, tmp_path, "--stop-after", "1")
    while "the same command goes on" in stopped.output:
        assert not (tmp_path / "out/model.safetensors").exists()
        stopped = run(tiny_model, tmp_path, "--stop-after", "1")
    ended = run(tiny_model, tmp_path, "--plot", str(tmp_path / "plot.png"))
    assert ended.exit_code == 0, ended.output
    assert "tokens a step" in ended.output
    assert (tmp_path / "plot.png").stat().st_size > 1000

    record = json.loads((tmp_path / "out/training.json").read_text())
    assert record["options"]["draft_vocab"] == 64
    assert [entry["step"] for entry in record["history"]["train"]] == [10, 20, 30, 40]
    assert record["history"]["held_out"][-1]["step"] == 40
    assert record["held_out"]["acceptance_length"] >= 1
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (64, 260)


def test_a_folder_of_other_options_is_refused_by_the_option(tiny_model: Path, tmp_path: Path):
    work = tmp_path / "out/work"
    work.mkdir(parents=True)
    (work / "options.json").write_text('{"kind": "mtp"}')
    result = run(tiny_model, tmp_path)
    assert result.exit_code == 1
    assert "was begun with" in result.output and "--work" in result.output


def test_a_bad_prompt_file_is_refused_by_its_line(tiny_model: Path, tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"answer": "x"}\n')
    result = run(tiny_model, tmp_path, "--prompts", str(tmp_path / "bad.jsonl"))
    assert result.exit_code == 1
    assert "bad.jsonl:1" in result.output
