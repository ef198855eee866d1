"""Structured logs: one JSON object a line, with the process and, where there is one, the request."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import TextIO

from baton.actors.config import LogConfig

FIELDS = ("request_id", "trace")  # of a call's `extra`


class JsonFormatter(logging.Formatter):
    def __init__(self, **process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(config: LogConfig, stream: TextIO = sys.stderr, **process: str) -> None:
    """Send this process's log to `stream` in the configured format. Call once, from the process's entry."""
    handler = logging.StreamHandler(stream)
    if config.format == "json":
        handler.setFormatter(JsonFormatter(**process))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.level.upper())
