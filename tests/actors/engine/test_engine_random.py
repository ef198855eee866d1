"""Random life on a tiny pool: whatever happens, tokens are the pure function's and no block is lost."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.actors.engine.imports import QuarantineKey
from baton.actors.engine.request import Request
from tests.actors.engine.rig import Rig, make_request
from tests.actors.engine.scripted import scripted, some_right
from tests.fakes import fake_kv, fake_output

BLOCK_SIZE = 4
lengths = st.integers(1, 60)


@dataclass
class Handover:
    request: Request
    skip_blocks: int
    blocks: tuple[int, ...] | None = None


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        is_wired=st.booleans(),
        overlap=st.booleans(),
        prefix_cache=st.booleans(),
        num_blocks=st.integers(10, 24),
        max_num_seqs=st.integers(1, 5),
        max_step_tokens=st.integers(5, 40),
        max_prefill_chunk=st.integers(1, 20),
        headroom_blocks=st.integers(0, 1),
        max_overtakes=st.integers(0, 3),
        most_drafts=st.integers(0, 6),
        by_cost=st.booleans(),
    )
    def build(self, num_blocks: int, is_wired: bool, most_drafts: int, by_cost: bool, **config: int) -> None:
        speculation = scripted(some_right, most_drafts, by_cost=by_cost) if most_drafts else None
        self.rig = Rig(num_blocks, BLOCK_SIZE, config=config, is_wired=is_wired, speculation=speculation)
        self.number = 0
        self.exports: dict[str, Request] = {}
        self.imports: list[Handover] = []
        self.quarantines: list[tuple[QuarantineKey, tuple[int, ...]]] = []

    def make(self, prompt: int, max_tokens: int, family: int, priority: int, num_output: int = 0) -> Request:
        """Requests of one family share prefixes; their seeds do not."""
        self.number += 1
        id = f"r{self.number}"
        tokens = tuple(2 + (family + position) * position % 41 for position in range(prompt))
        options = {"max_tokens": max_tokens, "seed": self.number % 3, "min_tokens": min(max_tokens, family)}
        request = make_request(id, tokens, priority=priority, **options)
        output = fake_output(request, num_output)
        migrated = make_request(id, (*tokens, *output), num_output=num_output, priority=priority, **options)
        self.rig.expect(migrated)
        return migrated

    def is_servable(self, prompt: int) -> bool:
        return prompt < self.rig.capacity

    @rule(prompt=lengths, max_tokens=st.integers(1, 30), family=st.integers(0, 2), priority=st.integers(0, 1))
    def submit(self, prompt: int, max_tokens: int, family: int, priority: int) -> None:
        request = self.make(prompt, max_tokens, family, priority)
        self.rig.engine.submit(request)
        if not self.is_servable(prompt):
            self.rig.run()
            assert self.rig.finished[request.id].finish == "error"
            del self.rig.requests[request.id]

    @rule(prompt=st.integers(1, 30), more=st.integers(1, 9), num_output=st.integers(1, 9), family=st.integers(0, 2))
    def migrate(self, prompt: int, more: int, num_output: int, family: int) -> None:
        self.rig.engine.submit(self.make(prompt, num_output + more, family, 0, num_output))

    @rule(prompt=st.integers(1, 39), family=st.integers(0, 2))
    def export(self, prompt: int, family: int) -> None:
        request = self.make(prompt, 9, family, 0)
        self.rig.engine.submit(request, export=True)
        self.exports[request.id] = request
        del self.rig.requests[request.id]

    @rule(data=st.data(), is_cancel=st.booleans())
    @precondition(lambda self: self.exports)
    def end_export(self, data: st.DataObject, is_cancel: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.exports)))
        if is_cancel:
            self.rig.engine.cancel(id)
            del self.exports[id]
        elif id in self.rig.finished:
            self.check_export(id)
            self.rig.engine.release(id)
            del self.exports[id]

    def check_export(self, id: str) -> None:
        update, request = self.rig.finished[id], self.exports[id]
        assert self.rig.tokens[id] == fake_output(request, 1)
        contents = fake_kv(request.tokens, BLOCK_SIZE)
        for block, content in zip(update.blocks, contents, strict=True):
            assert self.rig.runner.kv[block][: len(content)] == content

    @rule(prompt=st.integers(1, 39), max_tokens=st.integers(1, 20), family=st.integers(0, 2))
    def open_import(self, prompt: int, max_tokens: int, family: int) -> None:
        request = self.make(prompt, max_tokens, family, 0)
        opened = self.rig.engine.open_import(request)
        self.imports.append(Handover(request, opened.skip_blocks))

    @rule(data=st.data())
    @precondition(lambda self: self.imports)
    def advance_import(self, data: st.DataObject) -> None:
        handover = data.draw(st.sampled_from(self.imports))
        if handover.blocks is None:
            handover.blocks = self.rig.engine.reserve_import(handover.request.id)
            return
        self.adopt(handover)

    def adopt(self, handover: Handover) -> None:
        request = handover.request
        assert handover.blocks is not None
        contents = fake_kv(request.tokens, BLOCK_SIZE)[handover.skip_blocks :]
        for block, content in zip(handover.blocks, contents, strict=True):
            self.rig.runner.write_block(block, content)
        first = tuple(fake_output(request, 1))
        self.rig.tokens[request.id].extend(first)
        self.rig.engine.adopt_import(request.id, first)
        self.imports.remove(handover)

    @rule(data=st.data(), is_cancel=st.booleans(), resubmit=st.booleans())
    @precondition(lambda self: self.imports)
    def abandon_import(self, data: st.DataObject, is_cancel: bool, resubmit: bool) -> None:
        handover = data.draw(st.sampled_from(self.imports))
        self.imports.remove(handover)
        id = handover.request.id
        key = self.rig.engine.cancel(id) if is_cancel else self.rig.engine.abandon_import(id, quarantine=True)
        assert (key is not None) == (handover.blocks is not None)
        if key is not None and handover.blocks is not None:
            self.quarantines.append((key, handover.blocks))
        if resubmit:
            self.rig.engine.submit(handover.request)
        else:
            del self.rig.requests[id]

    @rule(data=st.data())
    @precondition(lambda self: self.quarantines)
    def release_quarantine(self, data: st.DataObject) -> None:
        key, _ = quarantine = data.draw(st.sampled_from(self.quarantines))
        self.rig.engine.release_quarantine(key)
        self.quarantines.remove(quarantine)

    @rule(data=st.data())
    @precondition(lambda self: self.rig.requests.keys() - self.rig.finished.keys())
    def cancel(self, data: st.DataObject) -> None:
        importing = {handover.request.id for handover in self.imports}
        live = self.rig.requests.keys() - self.rig.finished.keys() - importing
        if live:
            id = data.draw(st.sampled_from(sorted(live)))
            self.rig.engine.cancel(id)
            del self.rig.requests[id]

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for _, blocks in self.quarantines:  # a peer that was told to stop may write until it says that it did
                for block in blocks:
                    self.rig.runner.write_block(block, [-999] * BLOCK_SIZE)
            if self.rig.engine.has_work:
                self.rig.step()

    @rule()
    @precondition(lambda self: self.number % 7 == 3)
    def flush(self) -> None:
        self.rig.engine.flush_cache()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.rig.engine.check_integrity()

    def teardown(self) -> None:
        for key, _ in self.quarantines:
            self.rig.engine.release_quarantine(key)
        for handover in list(self.imports):
            self.place_or_prefill(handover)
        self.drain_exports()
        while self.rig.engine.has_work:
            self.rig.step()
            self.drain_exports()
        self.rig.check_idle()

    def place_or_prefill(self, handover: Handover) -> None:
        """Wait for room as a worker would; imports that wait only for each other are prefilled here instead."""
        engine, id = self.rig.engine, handover.request.id
        while handover.blocks is None:
            handover.blocks = engine.reserve_import(id)
            self.drain_exports()
            if engine.has_work:
                self.rig.step()
            elif handover.blocks is None:
                engine.abandon_import(id, quarantine=False)
                engine.submit(handover.request)
                return
        self.adopt(handover)

    def drain_exports(self) -> None:
        for id in self.exports.keys() & self.rig.finished.keys():
            self.check_export(id)
            self.rig.engine.release(id)
            del self.exports[id]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
