"""What the engine refuses, as typed exceptions.

EngineError
|-- DuplicateRequest     two live requests with one id
|-- RequestTooLarge      no state of this worker could ever serve the request
|-- RequestEnded         the request came with its last token: there is no KV to fetch for it
|-- ImportStateError     a hand-over call that its import is not ready for
|-- RankLost             a process that computes this worker's batches with it has ended
|-- NoProgress           work is left, nothing runs and nobody outside holds blocks: a bug, not a load
`-- IntegrityError       the block accounting does not add up: a bug
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of the engine's exceptions. None is retryable on the same worker."""


class DuplicateRequest(EngineError):
    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is already live on this worker; use a fresh id for each request")
        self.request_id = request_id


class RequestTooLarge(EngineError):
    def __init__(self, num_tokens: int, capacity: int, needed_blocks: int, present_blocks: int) -> None:
        super().__init__(
            f"a prompt of {num_tokens} tokens plus one output token needs {needed_blocks} KV blocks; this worker has "
            f"{present_blocks} and serves at most {capacity} tokens a request; shorten the prompt, or raise num_blocks "
            f"or max_context"
        )
        self.needed_blocks = needed_blocks
        self.present_blocks = present_blocks


class RequestEnded(EngineError):
    def __init__(self, request_id: str, finish: str) -> None:
        super().__init__(f"request {request_id!r} came with its last token ({finish}); submit it to hear so")


class ImportStateError(EngineError):
    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"import of request {request_id!r}: {problem}")


class RankLost(EngineError):
    def __init__(self, rank: int, how: str) -> None:
        super().__init__(
            f"tensor-parallel rank {rank} of this worker {how}; the others cannot go on without it, so the worker must "
            f"start anew. What the rank itself logged says why it ended"
        )
        self.rank = rank


class NoProgress(EngineError):
    def __init__(self, num_waiting: int, num_running: int, num_available: int) -> None:
        super().__init__(
            f"{num_waiting} waiting and {num_running} running sequences, {num_available} blocks available, "
            f"yet nothing can be scheduled and no export, import or quarantine is left to wait for"
        )


class IntegrityError(EngineError):
    pass
