"""Whether the wanted workers fit into a Ray cluster: plain arithmetic, asked before anything is started.

Only certain misfits are refused here (each condition is necessary, none sufficient); resources that others hold, and
fragments that no arithmetic on totals shows, meet the deadline that `RayLauncher.place` sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cluster.errors import ResourcesShortError
from baton.cluster.processes import Place


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one worker needs on one node."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        gpus = f" + {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{self.num_cpus:g} CPU{gpus}"

    def resources(self) -> dict[str, float]:
        return {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})

    def num_fitting(self, node: Mapping[str, float]) -> int:
        """Return how many of these one node can hold, were it empty."""
        # Ray counts in ten-thousandths; so do we, or 0.3 would fit into 0.9 only twice.
        return min(
            round(node.get(name, 0.0) * 10_000) // round(amount * 10_000) for name, amount in self.resources().items()
        )


def host_of_this_node() -> str:
    """Return the address by which Ray's other nodes reach this one."""
    import ray.util

    return ray.util.get_node_ip_address()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def place_of_this_process() -> Place:
    """Return where Ray has put the actor that asks."""
    import ray

    context = ray.get_runtime_context()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    devices = context.get_accelerator_ids().get("GPU", [])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Place(context.get_node_id(), host_of_this_node(), tuple(devices))


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    resources: Mapping[str, float]  # all it has


class Spread:
    """Chooses a node for each worker, so that the loss of one takes a small part of every pool.

    That also puts prefill beside decode, where blocks travel fastest. It knows only its own workers: what it says is
    a wish, and Ray decides.
    """

    def __init__(self) -> None:
        self._placed: dict[str, tuple[str, str, Bundle]] = {}  # worker -> node, pool, what it takes there

    def choose(self, worker_id: str, pool: str, bundle: Bundle, nodes: Sequence[Node]) -> str | None:
        """Take the node with room that has the fewest of the pool, then of all; None where none seems to have room."""
        roomy = [node for node in nodes if self._has_room(node, bundle)]
        if not roomy:
            return None
        chosen = min(roomy, key=lambda node: (self._count(node.id, pool), self._count(node.id), node.id)).id
        self._placed[worker_id] = (chosen, pool, bundle)
        return chosen

    def forget(self, worker_id: str) -> None:
        self._placed.pop(worker_id, None)

    def _count(self, node_id: str, pool: str | None = None) -> int:
        return sum(node == node_id and pool in (None, its_pool) for node, its_pool, _ in self._placed.values())

    def _has_room(self, node: Node, bundle: Bundle) -> bool:
        taken = [theirs for its_node, _, theirs in self._placed.values() if its_node == node.id]
        left = {
            name: amount - sum(theirs.resources().get(name, 0.0) for theirs in taken)
            for name, amount in node.resources.items()
        }
        return bundle.num_fitting(left) > 0


def check_fits(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ResourcesShortError if `wanted` can never be placed on `nodes` (each node's total resources)."""
    for bundle, count in Counter(wanted).items():
        room = sum(bundle.num_fitting(node) for node in nodes)
        if room < count:
            raise _short(wanted, nodes, f"{count} x ({bundle}) needed, room for {room}")
    for name in ("CPU", "GPU"):
        needed = sum(bundle.resources().get(name, 0.0) for bundle in wanted)
        present = sum(node.get(name, 0.0) for node in nodes)
        if needed > present + 1e-6:
            raise _short(wanted, nodes, f"{needed:g} {name} needed in all, {present:g} there")


def _short(wanted: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], why: str) -> ResourcesShortError:
    fix = f"{why}: lower replicas, num_cpus or num_gpus of a pool, or add nodes"
    return ResourcesShortError(describe_bundles(wanted), describe_nodes(nodes), fix)


def describe_bundles(bundles: Sequence[Bundle]) -> str:
    return ", ".join(f"{count} x ({bundle})" for bundle, count in Counter(bundles).items())


def describe_nodes(nodes: Sequence[Mapping[str, float]]) -> str:
    kinds = Counter(str(Bundle(node.get("CPU", 0.0), node.get("GPU", 0.0))) for node in nodes)
    return ", ".join(f"{count} node{'s'[: count > 1]} of {kind}" for kind, count in kinds.items()) or "no nodes"
