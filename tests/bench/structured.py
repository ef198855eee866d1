"""Structured output, measured: real schemas, tool transcripts, prompts with a schema, and what masks cost in decoding.

    PYTHONPATH=. python tests/bench/structured.py DATA [schemas|tools|prompts|cost]...

DATA is a folder with schemastore_sample, bfcl, gsm8k, mt_bench as SOURCES.md beside them describes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import tokenizers
import torch
import xgrammar
from rich.console import Console

from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.vocabulary import load_vocabulary
from baton.actors.grammar_process import CompileLimits, CompilerSeat
from baton.actors.grammars import GrammarRefused, WorkerGrammars
from baton.kernels.attention_torch import TorchAttention
from baton.router.structured.alternatives import UnsupportedSchema
from baton.router.structured.schema import lower_schema
from baton.router.tokenizer import Tokenizer
from baton.router.tools.dialect import json_format
from baton.router.tools.registry import DIALECTS
from tests.actors.engine.model_cases import BLOCK_SIZE, NUM_BLOCKS, kv_cache, smollm2, smollm2_path

OUT = Console(width=140)
EOS, VOCAB = 2, 49152
ANSWER = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 80},
        "confidence": {"enum": ["low", "medium", "high"]},
        "topics": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
    },
    "required": ["answer", "confidence", "topics", "score"],
    "additionalProperties": False,
}


def tag(schema: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": json_format(schema)})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def quantiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    picks = (ordered[min(int(len(ordered) * q), len(ordered) - 1)] for q in (0.5, 0.9, 0.99, 1.0))
    return " / ".join(f"{pick * 1e3:.2f}" for pick in picks) + " ms (p50 / p90 / p99 / max)"


@cache
def store() -> GrammarStore:
    return GrammarStore(lambda: load_vocabulary(smollm2_path(), (EOS,)), VOCAB)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(smollm2_path())


async def schemas(data: Path) -> None:
    """Real schemas: how many are honoured, how long until a sequence may start, and the cost of each token's mask."""
    seat = CompilerSeat(smollm2_path(), (EOS,), VOCAB, CompileLimits(10, 1 << 30))
    grammars = WorkerGrammars(store(), lambda: seat)
    await grammars.compiled(tag(True))  # starts the process
    kept: list[tuple[dict[str, Any], xgrammar.CompiledGrammar]] = []
    compile_s: list[float] = []
    lower_s: list[float] = []
    refusals: dict[str, int] = {}
    for row in rows(data / "schemastore_sample" / "schemas.first116.jsonl"):
        started = time.perf_counter()
        try:
            lowered = lower_schema(row["schema"])
            lower_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            kept.append((row, await grammars.compiled(tag(lowered))))  # type: ignore[arg-type]
            compile_s.append(time.perf_counter() - started)
        except (UnsupportedSchema, GrammarRefused) as refusal:
            reason = str(refusal).rpartition(": ")[2][:60]
            refusals[reason] = refusals.get(reason, 0) + 1
    await grammars.close()
    OUT.print(f"schemas honoured {len(kept)}, refused {sum(refusals.values())}")
    for reason, count in sorted(refusals.items(), key=lambda item: -item[1]):
        OUT.print(f"    {count:3} {reason}")
    OUT.print(f"lowering: {quantiles(lower_s)}")
    OUT.print(f"tried out and compiled: {quantiles(compile_s)}")
    OUT.print(f"largest compiled: {max(g.memory_size_bytes for _, g in kept) / 1e6:.2f} MB before any mask")
    _instances(kept)
    OUT.print(f"largest compiled: {max(g.memory_size_bytes for _, g in kept) / 1e6:.2f} MB with the masks used")


def _instances(kept: list[tuple[dict[str, Any], xgrammar.CompiledGrammar]]) -> None:
    encoder: tokenizers.Tokenizer = tokenizer()._backend
    lowered = {row["name"]: lower_schema(row["schema"]) for row, _ in kept}
    for visit in ("first", "second"):
        fill_s: list[float] = []
        accepted, refused, wrong = 0, 0, []
        for row, grammar in kept:
            for is_valid in (True, False):
                for value in row["valid" if is_valid else "invalid"]:
                    schema = lowered[row["name"]]
                    text = json.dumps(_ordered(value, schema, schema), ensure_ascii=False)
                    ids = encoder.encode(text, add_special_tokens=False).ids
                    matches = _matches(grammar, ids, fill_s)
                    accepted += is_valid and matches
                    refused += not is_valid and not matches
                    if matches != is_valid:
                        wrong.append((row["name"], is_valid))
        OUT.print(f"{visit} visit: valid accepted {accepted}, invalid refused {refused}, otherwise {len(wrong)}")
        OUT.print(
            f"    mask a token, processor time: {quantiles(fill_s)}, mean {sum(fill_s) / len(fill_s) * 1e6:.0f} µs"
        )
    OUT.print(f"    otherwise: {sorted({name for name, _ in wrong})}")


ANY_PATTERN = jsonschema.validators.extend(  # a lowered pattern is one of JSON text
    jsonschema.Draft202012Validator, {"pattern": lambda *_: (), "patternProperties": lambda *_: ()}
)


def _ordered(value: Any, schema: Any, root: Any) -> Any:
    """Put properties in the order of the alternative that the value satisfies; integral numbers become integers.

    That order is what a schema asks for here, beside what the standard has it ask: router/README.md.
    """
    definitions = {"$defs": root.get("$defs", {})} if isinstance(root, dict) else {}
    options = (option for option in _options(schema, root) if ANY_PATTERN(option | definitions).is_valid(value))
    option = next(options, {})
    if isinstance(value, list):
        prefix, rest = option.get("prefixItems", []), option.get("items", True)
        return [_ordered(item, prefix[i] if i < len(prefix) else rest, root) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return int(value) if isinstance(value, float) and value.is_integer() else value
    properties = option.get("properties", {})
    names = [*properties, *value]
    rest = next(iter(option.get("patternProperties", {}).values()), option.get("additionalProperties", True))
    return {key: _ordered(value[key], properties.get(key, rest), root) for key in sorted(value, key=names.index)}


def _options(schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield from _options(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in schema:
        for branch in schema["anyOf"]:
            yield from _options(branch, root)
    else:
        yield schema


def _matches(grammar: xgrammar.CompiledGrammar, ids: Sequence[int], fill_s: list[float]) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = torch.empty(1, -(-VOCAB // 32), dtype=torch.int32)
    for token in (*ids, EOS):
        started = time.thread_time()  # on a machine that others use too, the clock says little
        matcher.fill_next_token_bitmask(mask, 0)
        fill_s.append(time.thread_time() - started)
        if not matcher.accept_token(token):
            return False
    return True


def tools(data: Path) -> None:
    """Every answer of BFCL in every dialect, cut at every size up to 16 and at none: always the same calls."""
    from tests.router.tools.test_dialects import SPELLINGS, read

    num = 0
    for name in ("simple_python", "parallel", "parallel_multiple"):
        for row in rows(data / "bfcl" / f"answers_{name}.jsonl"):
            calls = [
                (called, {key: values[0] for key, values in arguments.items()})
                for call in row["ground_truth"]
                for called, arguments in call.items()
            ]
            for dialect, spell in SPELLINGS.items():
                text = spell(calls)
                for size in (*range(1, 17), len(text)):
                    assert read(DIALECTS[dialect]().parser(forced=False), text, size) == ("", "", calls)
                num += 1
    OUT.print(f"{num} transcripts: streamed calls equal those of the whole text for every cut")


def questions(data: Path) -> list[str]:
    asked = [turn for row in rows(data / "mt_bench" / "question.jsonl") for turn in row["turns"][:1]]
    asked += [row["turns"][0] for row in rows(data / "mt_bench" / "vicuna_question.jsonl")]
    return (asked + [row["question"] for row in rows(data / "gsm8k" / "test.first700.jsonl")])[:200]


def make_engine(num_seqs: int) -> Engine:
    runner = TorchRunner(
        smollm2(), kv_cache(smollm2()), num_slots=num_seqs, make_attention=TorchAttention, grammars=store()
    )
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=num_seqs, overlap=False)
    return Engine(config, runner, num_blocks=NUM_BLOCKS, max_context=1024, eos_token_ids=frozenset({EOS}))


def prompts(data: Path) -> None:
    """200 prompts with a schema: every output that was allowed to end is a valid object."""
    engine = make_engine(8)
    grammar = tag(ANSWER)
    asked = questions(data)
    for i, text in enumerate(asked):
        tokens = tokenizer().encode_chat_now([{"role": "user", "content": text[:800]}])
        sampling = SamplingParams(max_tokens=400, seed=i, temperature=0.7)
        engine.submit(Request(id=str(i), tokens=tokens, sampling=sampling, grammar=grammar))
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    finishes: dict[str, int] = {}
    started = time.perf_counter()
    while engine.has_work:
        for update in engine.step():
            outputs[update.request_id] += update.tokens
            if update.finish is not None:
                finishes[update.finish] = finishes.get(update.finish, 0) + 1
    num_valid = sum(_is_valid(tokenizer().decode(tokens)) for tokens in outputs.values())
    num_tokens = sum(map(len, outputs.values()))
    seconds = time.perf_counter() - started
    OUT.print(
        f"{len(asked)} prompts: {num_valid} valid objects, finishes {finishes}, {num_tokens} tokens, {seconds:.0f} s"
    )


def _is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), ANSWER)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def cost(data: Path) -> None:
    """Decode steps with and without a grammar, in turns; medians over the steps, of the clock and of processor time.

    The second is what counts on a machine that others use too.
    """
    items = {"type": "array", "items": ANSWER, "minItems": 100}
    for num_seqs in (1, 8):
        pairs = [(_decode(num_seqs, ""), _decode(num_seqs, tag(items))) for _ in range(4)]
        free, constrained = ([step for run in runs for step in run] for runs in zip(*pairs, strict=True))
        for name, i in (("clock", 0), ("processor", 1)):
            without, with_grammar = (median(step[i] for step in steps) for steps in (free, constrained))
            OUT.print(
                f"batch {num_seqs}, {name}: {without * 1e3:.2f} ms a step free, {with_grammar * 1e3:.2f} constrained: "
                f"{100 * (1 - without / with_grammar):+.1f} % of throughput"
            )


def _decode(num_seqs: int, grammar: str) -> list[tuple[float, float]]:
    engine = make_engine(num_seqs)
    for i in range(num_seqs):
        sampling = SamplingParams(max_tokens=33, seed=i, temperature=0.7, ignore_eos=True)
        tokens = tuple(range(100 + i, 164 + i))
        engine.submit(Request(id=str(i), tokens=tokens, sampling=sampling, grammar=grammar))
    engine.step()
    steps: list[tuple[float, float]] = []
    while engine.has_work:
        started = time.perf_counter(), time.process_time()
        engine.step()
        steps.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    return steps


SECTIONS: dict[str, Callable[[Path], Any]] = {"schemas": schemas, "tools": tools, "prompts": prompts, "cost": cost}


def main(arguments: Sequence[str]) -> None:
    data, *wanted = arguments
    for name in wanted or SECTIONS:
        OUT.rule(name)
        result = SECTIONS[name](Path(data))
        if asyncio.iscoroutine(result):
            asyncio.run(result)


if __name__ == "__main__":
    main(sys.argv[1:])
