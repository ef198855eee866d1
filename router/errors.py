"""Everything that a gateway can answer with instead of tokens.

    RouterError
    ├── InvalidRequest       400  the client must change the request; `param` names the field
    ├── Unauthorized         401
    ├── ModelNotFound        404
    ├── BodyTooLarge         413
    ├── RateLimited          429  retryable after `retry_after_s`: this key has used what it may
    ├── Overloaded           429  retryable after `retry_after_s`: the server has no room
    ├── WorkerFailed         500  a worker refused or broke this request
    ├── NoWorkers            503  retryable: nobody can serve right now
    ├── WorkerLost           503  retryable: the worker died and nobody could go on
    └── DeadlineExceeded     504

Messages are for the client: they never hold what the client sent.
"""

from __future__ import annotations

from typing import ClassVar

MAX_MESSAGE_LEN = 600


class RouterError(Exception):
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message[:MAX_MESSAGE_LEN])
        self.message = message[:MAX_MESSAGE_LEN]
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """Return the OpenAI-shaped error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequest(RouterError):
    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class Unauthorized(RouterError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(RouterError):
    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(RouterError):
    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class RateLimited(RouterError):
    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    retryable = True


class Overloaded(RouterError):
    status = 429
    kind = "rate_limit_error"
    code = "overloaded"
    retryable = True


class WorkerFailed(RouterError):
    code = "worker_failed"


class NoWorkers(RouterError):
    status = 503
    kind = "service_unavailable"
    code = "no_workers"
    retryable = True


class WorkerLost(RouterError):
    status = 503
    kind = "service_unavailable"
    code = "worker_lost"
    retryable = True


class DeadlineExceeded(RouterError):
    status = 504
    kind = "timeout"
    code = "deadline_exceeded"
