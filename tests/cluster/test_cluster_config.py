from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import load_config, parse_config
from baton.cluster.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
WORKER: dict[str, Any] = {"model": "m.gguf", "served_name": "m"}
MINIMAL: dict[str, Any] = {"worker": WORKER, "pools": {"both": None}}


def problems(tree: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        parse_config(tree, {}, source="test")
    return raised.value.problems


def pools(**pools: Any) -> dict[str, Any]:
    return {"worker": WORKER, "pools": pools}


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_example_is_valid(path: Path) -> None:
    assert load_config(path, {}).worker_specs()


def test_a_misspelt_key_is_named_with_the_nearest_right_one() -> None:
    assert problems(MINIMAL | {"router": {"prot": 1}}) == ("router.prot: unknown key; did you mean 'port'?",)


def test_a_misspelt_key_inside_a_pool_is_found() -> None:
    (problem,) = problems(pools(both={"worker": {"engine": {"blok_size": 3}}}))
    assert problem == "pools.both.worker.engine.blok_size: unknown key; did you mean 'block_size'?"


def test_a_key_like_no_other_lists_the_known_ones() -> None:
    (problem,) = problems(MINIMAL | {"ray": {"xyzzy": 1}})
    assert problem.startswith("ray.xyzzy: unknown key; known keys: address, ")


def test_a_problem_that_pools_inherit_is_reported_once() -> None:
    tree = {"worker": WORKER | {"engine": {"num_blocks": 0}}, "pools": {"prefill": {}, "decode": {}}}
    (problem,) = problems(tree)
    assert problem == "worker.engine.num_blocks: Input should be greater than or equal to 1 (it is 0)"


def test_every_problem_is_reported_at_once() -> None:
    assert len(problems(pools(both={"replicas": -1}, decoed={}) | {"health": {"poll_s": -1}})) == 3


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    assert any("'prefill', 'decode' or 'both'" in problem for problem in problems(pools(p={})))


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "both"), ()])
def test_pools_that_cannot_serve_together_are_refused(roles: tuple[str, ...]) -> None:
    assert problems(pools(**{role: {} for role in roles}))[0].startswith("pools: ")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dtype", {"dtype": "float16"}),
        ("model", {"model": "n"}),
        ("engine.speculation", {"engine": {"speculation": {"drafter": "mtp"}}}),
    ],
)
def test_pools_whose_blocks_differ_are_refused_with_both_values(name: str, settings: dict[str, Any]) -> None:
    (problem,) = problems(pools(prefill={}, decode={"worker": settings}))
    assert problem.startswith(f"pools: worker.{name} must be equal to hand blocks over; it is {{'prefill': ")


def test_a_drafter_without_kv_in_the_block_may_be_of_one_pool_alone() -> None:
    speculation = {"drafter": "ngram"}
    parse_config(pools(prefill={}, decode={"worker": {"engine": {"speculation": speculation}}}), {}, source="test")


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"drafter": "eagle"}, "speculation.drafter = eagle needs speculation.model; set it"),
        ({"drafter": "ngram", "model": "m"}, "speculation.drafter = ngram takes no speculation.model; remove it"),
        ({"drafter": "suffix", "acceptance": "rejection"}, "rejection gains nothing with suffix"),
        ({"drafter": "ngram", "max_draft_tokens": 99}, "max_draft_tokens: Input should be less than or equal to 16"),
    ],
)
def test_bad_speculation_is_refused_with_the_fix(speculation: dict[str, Any], message: str) -> None:
    found = problems(pools(both={"worker": {"engine": {"speculation": speculation}}}))
    assert len(found) == 1 and message in found[0]


def test_each_rank_of_a_tensor_parallel_worker_counts() -> None:
    (spec,) = parse_config(
        pools(both={"num_cpus": 2, "num_gpus": 1, "worker": {"tensor_parallel": 4}}), {}, source="test"
    ).worker_specs()
    assert (spec.num_cpus, spec.num_gpus) == (8, 4)


def test_a_rank_with_half_a_gpu_is_refused() -> None:
    (problem,) = problems(pools(both={"num_gpus": 0.5, "worker": {"tensor_parallel": 2}}))
    assert problem.endswith("a rank of a tensor_parallel worker takes one GPU; set it to 1")


def test_ranks_of_pools_may_differ_by_a_whole_factor() -> None:
    parse_config(
        pools(prefill={"worker": {"tensor_parallel": 4}}, decode={"worker": {"tensor_parallel": 2}}), {}, source="test"
    )
    (problem,) = problems(pools(prefill={"worker": {"tensor_parallel": 2}}, decode={"worker": {"tensor_parallel": 3}}))
    assert problem.startswith("pools: one worker.tensor_parallel must divide the other")
    assert problem.endswith("it is {'prefill': 2, 'decode': 3}")


def test_block_sizes_of_pools_may_differ_by_a_whole_factor() -> None:
    parse_config(pools(prefill={}, decode={"worker": {"engine": {"block_size": 32}}}), {}, source="test")
    (problem,) = problems(pools(prefill={}, decode={"worker": {"engine": {"block_size": 24}}}))
    assert problem.endswith("it is {'prefill': 16, 'decode': 24}")


def test_pools_inherit_the_workers_settings_and_override_single_keys() -> None:
    tree = {
        "worker": WORKER | {"engine": {"num_blocks": 9, "max_num_seqs": 4}},
        "pools": {"prefill": None, "decode": {"worker": {"engine": {"num_blocks": 7}}}},
    }
    engines = {spec.role: spec.config.engine for spec in parse_config(tree, {}, source="test").worker_specs()}
    assert [(engine.num_blocks, engine.max_num_seqs) for engine in engines.values()] == [(9, 4), (7, 4)]


def test_workers_are_named_by_role_and_number() -> None:
    config = parse_config(pools(prefill={}, decode={"replicas": 2}), {}, source="test")
    assert [spec.worker_id for spec in config.worker_specs()] == ["prefill-0", "decode-0", "decode-1"]


def test_workers_of_a_local_cluster_are_not_reachable_from_outside() -> None:
    local = parse_config(MINIMAL, {}, source="test")
    joined = parse_config(MINIMAL | {"ray": {"address": "auto"}}, {}, source="test")
    assert (local.worker_specs()[0].host, joined.worker_specs()[0].host) == ("127.0.0.1", None)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("worker: {model: m, served_name: m}\npools: {both: {replicas: 1}}\nrouter: {port: 1, host: h}\n")
    config = load_config(path, {"BATON__ROUTER__PORT": "8001", "BATON__POOLS__BOTH__REPLICAS": "3", "HOME": "/"})
    assert (config.router.port, config.router.host, len(config.worker_specs())) == (8001, "h", 3)


def test_a_wrong_override_is_reported_with_its_variable() -> None:
    with pytest.raises(ConfigError, match="BATON__ROUTER__PROT") as raised:
        parse_config(MINIMAL, {"BATON__ROUTER__PROT": "1"}, source="c.yaml")
    assert raised.value.problems == ("router.prot: unknown key; did you mean 'port'?",)


@pytest.mark.parametrize(
    ("text", "problem"), [("- a\n", "must be a mapping"), ("a: [", "is not YAML"), (None, "cannot be read")]
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_config(path, {})


def test_each_gateway_has_a_port_of_its_own() -> None:
    """Entry S13: or whoever scrapes one address gets now this one's counters, now that one's."""
    config = parse_config(pools(both={}) | {"gateways": 4, "router": {"port": 8000}}, {}, source="test")
    assert [config.gateway_router(index).port for index in range(4)] == [8000, 8001, 8002, 8003]
    assert parse_config(pools(both={}), {}, source="test").gateway_router(3).port == 0


def test_a_pool_may_be_empty_but_not_all_that_decode() -> None:
    with pytest.raises(ConfigError, match="nobody decodes"):
        parse_config(pools(prefill={}, decode={"replicas": 0}), {}, source="test")
    assert len(parse_config(pools(both={}, prefill={"replicas": 0}), {}, source="test").worker_specs()) == 1
