"""Fast transformers tokenizers from what lies beside a model's weights; imports no torch.

Slow (seconds): called off the event loop, and transformers is imported here only when asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tokenizers import pre_tokenizers

from baton.actors.engine.gguf_metadata import read_metadata
from baton.actors.engine.vocabulary import UnsupportedTokenizer


def load_tokenizer(path: Path) -> Any:
    """Load from a `.gguf` file or a Hugging Face folder with a tokenizer.json."""
    if path.suffix == ".gguf":
        return _from_gguf(read_metadata(path))
    if not (path / "tokenizer.json").exists():
        raise UnsupportedTokenizer(f"{path} has no tokenizer.json; save the model's tokenizer as a fast one there")
    import transformers

    return cast(Any, transformers).PreTrainedTokenizerFast.from_pretrained(str(path))


def _from_gguf(metadata: dict[str, Any]) -> Any:
    import transformers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    mapping = cast(Any, gguf_tokenizer_mapping)
    settings = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in mapping.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    try:
        backend, _ = mapping.convert_gguf_tokenizer(metadata["general.architecture"], settings)
    except (KeyError, ValueError) as error:
        raise UnsupportedTokenizer(f"the GGUF file's tokenizer cannot be rebuilt: {error}") from error
    if settings.get("pre_tokenizer_type") == "smollm":  # transformers forgets that it splits digits: see "\n\n1"
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    is_sentencepiece = settings.get("tokenizer_type") == "llama"  # those add BOS unless the file says no
    return cast(Any, transformers).PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_special(metadata, "bos"),
        eos_token=_special(metadata, "eos"),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece),
    )


def _special(metadata: dict[str, Any], name: str) -> str | None:
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if id is None else metadata["tokenizer.ggml.tokens"][id]
