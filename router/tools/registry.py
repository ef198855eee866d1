"""Which dialect a model speaks, told from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.router.tools.dialect import Dialect
from baton.router.tools.hermes import Hermes
from baton.router.tools.llama3 import Llama3
from baton.router.tools.mistral import Mistral
from baton.router.tools.pythonic import Pythonic

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "mistral": Mistral,
    "pythonic": Pythonic,
}


def find_dialect(name: str, chat_template: str) -> Dialect:
    """`auto` reads the template; a model that knows no tools is told of them as Hermes is."""
    if name != "auto":
        return DIALECTS[name]()
    if "[TOOL_CALLS]" in chat_template:
        return Mistral()
    if "tools" in chat_template and "<tool_call>" not in chat_template:
        if "pythonic" in chat_template or "[func_name1(" in chat_template:
            return Pythonic()
        if "<|python_tag|>" in chat_template or '"parameters"' in chat_template:
            return Llama3()
    return Hermes()
