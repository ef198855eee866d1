from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from baton.actors.config import LogConfig
from baton.actors.logs import set_up_logs


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    set_up_logs(LogConfig(), stream, worker="decode-0")
    yield stream
    root.handlers, root.level = handlers, level


def test_a_line_is_an_object_with_the_process_and_the_request(log: io.StringIO) -> None:
    logging.getLogger("baton.x").warning("goes on after %d tokens", 3, extra={"request_id": "r1", "trace": ""})
    logging.getLogger("baton.x").debug("unseen")
    line = json.loads(log.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning", "logger": "baton.x", "message": "goes on after 3 tokens",
        "worker": "decode-0", "request_id": "r1",
    }  # fmt: skip


def test_what_was_raised_stays_one_line(log: io.StringIO) -> None:
    """Entry S4: nor does text that no encoder likes break the log."""
    try:
        raise ValueError("line one\nline two \ud83d")
    except ValueError:
        logging.getLogger("baton.x").exception("failed \ud83d")
    (text,) = log.getvalue().splitlines()
    assert "line two" in json.loads(text)["exception"]
    text.encode()
