"""The gateway process: OpenAI's HTTP API in front of the workers that `set_workers` names.

`Gateway` owns everything that lives as long as the process. A Ray actor only forwards to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator, Sequence
from pathlib import Path

import uvicorn

from baton.actors.messages import WorkerInfo
from baton.actors.spans import NoSpans, Spans
from baton.router.admission import AdmissionLimits
from baton.router.config import RouterConfig
from baton.router.dispatch import Dispatcher
from baton.router.generation_config import SamplingDefaults, sampling_defaults
from baton.router.health import Health
from baton.router.http_protocol import BoundedHttp
from baton.router.membership import Membership
from baton.router.metrics import Metrics
from baton.router.policies import make_policy
from baton.router.prefix_index import PrefixIndex
from baton.router.routes import make_app
from baton.router.routing import Router
from baton.router.service import Backend, Service
from baton.router.tokenizer import Tokenizer
from baton.router.tools.registry import find_dialect
from baton.router.usage import Usage, usage
from baton.router.worker_stream import Reconnect

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than clients keep theirs, or a request may meet the end of its connection
GRACE_S = 2.0  # for a lost worker to be found again, or for the controller to say what becomes of it
WILDCARDS = ("0.0.0.0", "::", "")


class Gateway:
    """Start, feed with workers, stop; each once, on one event loop."""

    def __init__(self, config: RouterConfig, model_path: str | Path, model_name: str) -> None:
        self._config = config
        self._model_path = model_path
        self._model_name = model_name
        self._index = PrefixIndex(predicted_s=config.predicted_prefix_s)
        reconnect = Reconnect(config.reconnect_first_s, config.reconnect_max_s)
        self.membership = Membership(self._index, reconnect, grace_s=GRACE_S)
        self.metrics = Metrics()
        self.spans: Spans = NoSpans()  # set it before `start`
        self._tokenizer: Tokenizer | None = None
        self._service: Service | None = None
        self._server: LeavingSignals | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Load the tokenizer, listen, and return the address to send requests to, as SCHEME://host:port."""
        self._tokenizer = await asyncio.to_thread(
            Tokenizer.load, self._model_path, num_threads=self._config.tokenizer_threads
        )
        return await self.serve(self._tokenizer, await asyncio.to_thread(sampling_defaults, Path(self._model_path)))

    async def serve(self, tokenizer: Tokenizer, defaults: SamplingDefaults) -> str:
        """Do what `start` does, with a tokenizer that is loaded already and stays the caller's."""
        self._service = self._make_service(tokenizer, defaults)
        listener = listen(self._config.host, self._config.port)
        config = uvicorn.Config(
            make_app(self._service, Health(self.membership)),
            http=BoundedHttp,
            ws="none",
            proxy_headers=False,  # nobody asks whence a request comes
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=self._config.tls_cert_file,
            ssl_keyfile=self._config.tls_key_file,
        )
        self._server = LeavingSignals(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway http")
        host = self._config.advertise_host or self._config.host
        scheme = "http" if self._config.tls_cert_file is None else "https"
        return f"{scheme}://{'127.0.0.1' if host in WILDCARDS else host}:{listener.getsockname()[1]}"

    async def set_workers(self, workers: Sequence[WorkerInfo], *, is_decoder_coming: bool = False) -> None:
        """Make `workers` all that requests may go to; where none decodes, they wait if one `is_decoder_coming`."""
        await self.membership.set_workers(workers, is_decoder_coming=is_decoder_coming)

    def usage(self) -> Usage:
        return usage(self.metrics.registry, self.membership)

    def is_connected(self) -> bool:
        """Return whether requests can go to each of these workers: their streams open a moment after the news."""
        return self.membership.is_connected()

    async def stop(self) -> None:
        """Refuse new requests, let the running ones end for `drain_s`, then close everything. Idempotent."""
        if self._service is not None:
            self._service.is_draining = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_s):
                    await self._service.wait_idle()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await self.membership.close()
        if self._tokenizer is not None:
            self._tokenizer.close()
        await asyncio.to_thread(self.spans.close)

    def _make_service(self, tokenizer: Tokenizer, defaults: SamplingDefaults) -> Service:
        config = self._config
        limits = AdmissionLimits(
            max_requests=config.max_queued_requests,
            max_tokens=config.max_queued_tokens,
            max_wait_s=config.max_queue_s,
        )
        router = Router(self.membership, self._index, make_policy(config))
        dispatcher = Dispatcher(self.membership, router, limits, self.metrics, max_attempts=config.max_attempts)
        dispatcher.spans = self.spans
        backend = Backend(self.membership, dispatcher, self.metrics, self.spans)
        tokenizer.dialect = find_dialect(config.tool_dialect, tokenizer.chat_template)
        return Service(config, self._model_name, tokenizer, backend, defaults)


class LeavingSignals(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process that hosts the gateway."""
        yield


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    listener.setblocking(False)
    return listener
