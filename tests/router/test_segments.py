from __future__ import annotations

from baton.router.parts import CallArguments, CallStart, Content, Reasoning
from baton.router.segments import Begun, Ended, Grown, Segments


def test_parts_of_one_kind_are_one_segment_and_each_call_is_its_own() -> None:
    segments = Segments()
    parts = [
        Reasoning("hm"), Reasoning("m"), Content("a"), Content("b"), CallStart(0, "c0", "f"), CallArguments(0, "{"),
        CallArguments(0, "}"), CallStart(1, "c1", "g"), CallArguments(1, "{}"), Content("end"),
    ]  # fmt: skip
    steps = [step for part in parts for step in segments.push([part])] + segments.end()
    assert [(s.index, s.kind, s.call_id, s.text) for s in segments.all] == [
        (0, "reasoning", "", "hmm"), (1, "text", "", "ab"), (2, "call", "c0", "{}"), (3, "call", "c1", "{}"),
        (4, "text", "", "end"),
    ]  # fmt: skip
    for segment in segments.all:
        own = [step for step in steps if step.segment is segment]
        assert isinstance(own[0], Begun) and isinstance(own[-1], Ended)
        assert "".join(step.text for step in own if isinstance(step, Grown)) == segment.text
    assert segments.end() == []
