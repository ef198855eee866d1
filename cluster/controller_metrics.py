"""The controller's Prometheus series. Labels: names of processes, roles and states, all of them few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.cluster.desired import Desired
from baton.cluster.planning import Plan
from baton.cluster.tracking import State
from baton.cluster.watched import ProcessStatus


class ControllerMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._up = Gauge("baton_process_up", "1 while a process serves", ["process", "kind"], registry=registry)
        self._states = Gauge("baton_processes", "Processes by state", ["kind", "state"], registry=registry)
        self._restarts = Counter(
            "baton_process_restarts", "Processes that ended and were begun anew", ["process", "kind"], registry=registry
        )
        self._desired = Gauge("baton_workers_desired", "Workers that are wanted", ["role"], registry=registry)
        self._ready = Gauge("baton_workers_ready", "Workers that serve", ["role"], registry=registry)
        self._quarantined = Gauge(
            "baton_quarantined_places", "GPUs and nodes that no worker is put on", registry=registry
        )
        self._workers = Gauge(
            "baton_planner_workers",
            "Workers by role: there, best for the load, and as the load needs",
            ["role", "kind"],
            registry=registry,
        )
        self._load = Gauge("baton_planner_load", "Workers' worth of work, forecast", ["role"], registry=registry)
        self._moves = Counter(
            "baton_planner_moves", "Workers that the planner has switched", ["role"], registry=registry
        )
        for role in ("prefill", "decode"):
            self._moves.labels(role)
        self._num_restarts: dict[str, int] = {}

    def set_plan(self, plan: Plan) -> None:
        decision = plan.decision
        splits = {"there": plan.now} | ({"best": decision.split, "needed": decision.wanted} if decision else {})
        for row, role in enumerate(("prefill", "decode")):
            for kind, split in splits.items():
                self._workers.labels(role, kind).set(split[row])
            self._load.labels(role).set(decision.load[row] if decision else 0)
            self._moves.labels(role).inc(plan.num_moved[row])

    def set_processes(self, statuses: Sequence[ProcessStatus], desired: Desired) -> None:
        self._quarantined.set(len(desired.quarantine))
        names = {status.name for status in statuses}
        for gone in self._num_restarts.keys() - names:  # a removed worker's series would stay for ever
            kind = "gateway" if gone.startswith("gateway") else "worker"
            self._up.remove(gone, kind)
            self._restarts.remove(gone, kind)
            del self._num_restarts[gone]
        for status in statuses:
            self._up.labels(status.name, status.kind).set(status.state == "ready")
            before = self._num_restarts.setdefault(status.name, 0)
            self._restarts.labels(status.name, status.kind).inc(max(0, status.num_restarts - before))
            self._num_restarts[status.name] = status.num_restarts
        for kind in ("worker", "gateway"):
            for state in get_args(State):
                count = sum(status.kind == kind and status.state == state for status in statuses)
                self._states.labels(kind, state).set(count)
        for role in desired.config.pools:
            ready = sum(status.role == role and status.state == "ready" for status in statuses)
            self._desired.labels(role).set(len(desired.of_role(role)))
            self._ready.labels(role).set(ready)
