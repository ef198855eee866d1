"""Everything that can keep a cluster from coming up, said so that an operator can act on it.

ClusterError
├── ConfigError           a setting is wrong; each problem names its key, the limit and the fix
├── ModelNotFoundError    the model reference leads to no weights
├── MissingPackageError   an optional package is needed by this configuration
├── ResourcesShortError   the Ray cluster cannot hold the wanted workers, now or at all
├── StartError            a worker or gateway did not come up
├── OperationRefusedError the running cluster cannot do what the operator asks
└── ProcessLostError      a worker or gateway does not answer; raised and handled inside this folder
"""

from __future__ import annotations

from collections.abc import Sequence


class ClusterError(Exception):
    """The root: a command line shows its text and exits with 1."""


class ConfigError(ClusterError):
    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__("\n".join([f"{source}:", *(f"  {problem}" for problem in problems)]))
        self.source = source
        self.problems = tuple(problems)


class ResourcesShortError(ClusterError):
    def __init__(self, wanted: str, present: str, fix: str) -> None:
        super().__init__(f"not enough resources: wanted {wanted}; present {present}; {fix}")
        self.wanted = wanted
        self.present = present


class StartError(ClusterError):
    def __init__(self, process: str, problem: str) -> None:
        super().__init__(f"{process} did not start: {problem}")
        self.process = process
        self.problem = problem


class OperationRefusedError(ClusterError):
    """The message says what cannot be done and what can."""


class RequestFailedError(ClusterError):
    """The message is the server's own, or what the connection said."""


class ProcessLostError(ClusterError):
    """`certain`: the process is known to have ended; otherwise it may still run somewhere."""

    def __init__(self, process: str, reason: str, *, certain: bool) -> None:
        super().__init__(f"{process} {'has died' if certain else 'cannot be reached'}: {reason}")
        self.process = process
        self.certain = certain
