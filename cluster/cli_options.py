"""Command-line options from a dataclass: its fields are the options, with their annotations, defaults and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar, get_type_hints

T = TypeVar("T")


def takes(options: type[T], run: Callable[[T], None]) -> Callable[..., None]:
    """Make a command for typer that calls `run` with an instance of the dataclass `options`; it keeps run's doc."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(options).parameters.items()
    ]

    def command(**values: object) -> None:
        run(options(**values))

    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command
