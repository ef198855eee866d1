from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cluster.cli import app

runner = CliRunner()


@pytest.mark.parametrize("command", ["demo", "serve", "chat", "doctor", "version"])
def test_every_command_explains_itself(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_wrong_configuration_ends_with_1_and_the_keys_name_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("worker: {model: m, served_name: m}\npools: {both: {replica: 2}}\n")
    result = runner.invoke(app, ["serve", str(path)])
    assert result.exit_code == 1
    assert "pools.both.replica: unknown key; did you mean 'replicas'?" in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_model_is_said_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("worker: {model: /nowhere/m.gguf, served_name: m}\npools: {both: {}}\n")
    result = runner.invoke(app, ["serve", str(path)])
    assert result.exit_code == 1
    assert "'/nowhere/m.gguf': no such file" in result.stderr


def test_a_server_that_is_not_there_ends_the_chat_with_1() -> None:
    result = runner.invoke(app, ["chat", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no server answers" in result.stderr


def test_the_doctor_finds_this_machine_fit_for_the_demo() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "SmolLM2" in result.output


def test_the_version_is_one_line() -> None:
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0
    assert len(result.output.split()) == 1
