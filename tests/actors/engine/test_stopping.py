from __future__ import annotations

import pytest

from baton.actors.engine.stopping import StopRules
from tests.actors.engine.rig import EOS, make_request


def rules(prompt: int = 10, num_output: int = 0, capacity: int = 1000, **options: object) -> StopRules:
    return StopRules.of(make_request("r", prompt + num_output, num_output=num_output, **options), EOS, capacity)


@pytest.mark.parametrize("eos", sorted(EOS))
def test_every_eos_id_stops_unless_it_is_ignored(eos: int) -> None:
    assert rules().reason(eos, 11) == "stop"
    assert rules(ignore_eos=True).reason(eos, 11) is None
    assert rules(ignore_eos=True, stop_token_ids=(eos,)).reason(eos, 11) == "stop"


def test_a_requests_own_stop_ids_stop_it() -> None:
    assert rules(stop_token_ids=(7,)).reason(7, 11) == "stop"
    assert rules(stop_token_ids=(7,)).reason(8, 11) is None


def test_no_stop_id_counts_before_min_tokens_others_stand() -> None:
    stops = rules(min_tokens=3, max_tokens=20, stop_token_ids=(7,))
    assert [stops.reason(7, 10 + count) for count in (1, 2, 3, 4)] == [None, None, None, "stop"]


def test_lengths_count_from_the_original_prompt() -> None:
    stops = rules(num_output=5, max_tokens=8, min_tokens=6)
    assert stops.reason(9, 17) is None
    assert stops.reason(9, 18) == "length"
    assert stops.reason(0, 16) is None
    assert stops.reason(0, 17) == "stop"


def test_the_context_ends_a_request_before_its_max_tokens() -> None:
    assert rules(capacity=12).reason(9, 12) == "length"


def test_a_stop_id_at_the_length_limit_is_a_stop() -> None:
    assert rules(max_tokens=1).reason(0, 11) == "stop"
