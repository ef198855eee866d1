from __future__ import annotations

import pytest
from fake_workers import FakeWorker
from pydantic import ValidationError

from baton.router.config import RouterConfig, SloConfig
from baton.router.errors import InvalidRequest
from baton.router.slo import SloClasses, SloTargets
from baton.router.tokenizer import Tokenizer
from tests.router.rig import served, until

CONFIG = SloConfig.model_validate({
    "classes": {"default": {}, "chat": {"ttft_ms": 500, "itl_ms": 50}, "batch": {"ttft_ms": 60_000}},
    "keys": {"nightly": "batch"},
})  # fmt: skip


def test_a_header_goes_before_the_keys_class_and_that_before_the_default() -> None:
    slo = SloClasses(CONFIG)
    assert slo.choose({}) == SloTargets("default", None, None)
    assert slo.choose({}, "nightly") == SloTargets("batch", 60.0, None)
    assert slo.choose({"x-baton-slo": "chat"}, "nightly") == SloTargets("chat", 0.5, 0.05)


def test_a_request_may_bring_targets_of_its_own() -> None:
    slo = SloClasses(CONFIG)
    assert slo.choose({"x-baton-slo": "chat", "x-baton-itl-ms": "20"}) == SloTargets("custom", 0.5, 0.02)
    assert slo.choose({"x-baton-ttft-ms": "100"}) == SloTargets("custom", 0.1, None)


@pytest.mark.parametrize("headers", [
    {"x-baton-slo": "none"}, {"x-baton-ttft-ms": "soon"}, {"x-baton-ttft-ms": "0"}, {"x-baton-itl-ms": "inf"},
])  # fmt: skip
def test_bad_headers_are_named(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(headers))):
        SloClasses(CONFIG).choose(headers)


def test_a_class_that_does_not_exist_is_refused_in_the_config() -> None:
    with pytest.raises(ValidationError, match="'fast', which is no class"):
        SloConfig.model_validate({"keys": {"me": "fast"}})
    with pytest.raises(ValidationError, match="rename it"):
        SloConfig.model_validate({"classes": {"default": {}, "custom": {}}})


def test_the_verdict_names_the_target_that_was_missed() -> None:
    targets = SloTargets("chat", 0.5, 0.05)
    assert [targets.verdict(0.4, 0.04), targets.verdict(0.6, 0.06), targets.verdict(0.4, 0.06)] == [
        "met",
        "ttft",
        "itl",
    ]
    assert targets.verdict(0.4, None) == "met"  # one token has no time between
    assert SloTargets().verdict(1e9, 1e9) == "met"


async def test_goodput_is_counted_by_class(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    async with served(tokenizer, worker, config=RouterConfig(slo=CONFIG)) as api:
        await api.http.post("/v1/completions", json={"model": "smollm2", "prompt": "hi", "max_tokens": 5, "n": 2})
        chat = {"x-baton-slo": "chat"}
        worker.step_s = 0.06
        body = {"model": "smollm2", "prompt": "hi", "max_tokens": 5}
        assert (await api.http.post("/v1/completions", json=body, headers=chat)).status_code == 200
        worker.error = "broken"
        assert (await api.http.post("/v1/completions", json=body, headers=chat)).status_code == 500
        assert (await api.http.post("/v1/completions", json=body, headers={"x-baton-slo": "?"})).status_code == 400
        metrics = (await api.http.get("/metrics")).text
        for line in (
            'slo_sequences_total{outcome="met",slo="default"} 2.0',
            'goodput_tokens_total{slo="default"} 10.0',
            'slo_sequences_total{outcome="itl",slo="chat"} 1.0',
            'slo_sequences_total{outcome="failed",slo="chat"} 1.0',
            'key_sequences_total{key="none",outcome="met"} 2.0',
            'key_tokens_total{key="none",kind="prompt"}',
            'key_tokens_total{key="none",kind="output"} 15.0',
        ):
            assert line in metrics
        assert 'goodput_tokens_total{slo="chat"}' not in metrics
        await until(api.is_idle)
