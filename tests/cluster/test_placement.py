from __future__ import annotations

import pytest

from baton.cluster.errors import ResourcesShortError
from baton.cluster.placement import Bundle, Node, Spread, check_fits

CPU = Bundle(1, 0)
GPU = Bundle(1, 1)
LAPTOP = {"CPU": 2.0, "memory": 1e9}
SERVER = {"CPU": 16.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ([CPU, CPU], [LAPTOP]),
        ([GPU] * 4, [SERVER]),
        ([GPU] * 4 + [CPU] * 2, [SERVER, LAPTOP]),
        ([Bundle(0.3, 0)] * 3, [{"CPU": 0.9}]),
        ([Bundle(1, 0.5)] * 8, [SERVER]),
        ([], []),
    ],
)
def test_what_fits_is_let_through(wanted: list[Bundle], nodes: list[dict[str, float]]) -> None:
    check_fits(wanted, nodes)


@pytest.mark.parametrize(
    ("wanted", "nodes", "why"),
    [
        ([CPU] * 3, [LAPTOP], r"3 x \(1 CPU\) needed, room for 2"),
        ([GPU], [LAPTOP], r"1 x \(1 CPU \+ 1 GPU\) needed, room for 0"),
        ([Bundle(3, 0)], [LAPTOP, LAPTOP], r"1 x \(3 CPU\) needed, room for 0"),  # on no single node
        ([Bundle(1, 3)] * 2, [SERVER], "needed, room for 1"),  # 6 of 4
        ([GPU] * 3 + [Bundle(1, 2)], [SERVER], "5 GPU needed in all, 4 there"),
        ([CPU], [], "present no nodes"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_reason(
    wanted: list[Bundle], nodes: list[dict[str, float]], why: str
) -> None:
    with pytest.raises(ResourcesShortError, match=why):
        check_fits(wanted, nodes)


def test_the_refusal_names_what_is_wanted_and_what_is_present() -> None:
    with pytest.raises(ResourcesShortError) as refusal:
        check_fits([GPU, GPU, CPU], [LAPTOP, LAPTOP])
    assert refusal.value.wanted == "2 x (1 CPU + 1 GPU), 1 x (1 CPU)"
    assert refusal.value.present == "2 nodes of 2 CPU"


TWO = [Node("a", {"CPU": 2.0}), Node("b", {"CPU": 2.0})]
HALF = Bundle(0.5, 0)


def test_every_pool_is_spread_over_the_nodes() -> None:
    spread = Spread()
    chosen = [spread.choose(f"{pool}-{i}", pool, HALF, TWO) for pool in ("prefill", "decode") for i in range(2)]
    assert chosen == ["a", "b", "a", "b"]


def test_a_full_node_is_not_wished_for_and_a_free_place_is_taken_again() -> None:
    spread = Spread()
    assert [spread.choose(f"w{i}", "both", Bundle(1, 0), TWO) for i in range(5)] == ["a", "b", "a", "b", None]
    spread.forget("w1")
    assert spread.choose("w5", "both", Bundle(1, 0), TWO) == "b"
