"""The repository as a whole: its layout does no harm to others, and its own measuring is right."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import size_report

ROOT = Path(__file__).parent.parent
FOLDERS = ("actors", "cluster", "deploy", "kernels", "router", "transfer")


def run_from_root(code: str, *, after_root: Path | None = None) -> str:
    """Run `code` in a process that has the repository's root first on sys.path."""
    places = [str(ROOT), *([str(after_root)] if after_root else [])]
    script = f"import sys; sys.path[:0] = {places!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_a_namespace_package(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_transformers_does_not_take_our_kernels_for_the_hugging_face_package() -> None:
    """transformers asks find_spec("kernels"), and imports names from what has a version or a file."""
    output = run_from_root(
        "import importlib.util\n"
        "import transformers.integrations.hub_kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(is_kernels_available(), importlib.util.find_spec('kernels').origin)"
    )
    assert output == "False None"


def test_an_installed_kernels_package_wins_over_our_folder(tmp_path: Path) -> None:
    """A package found anywhere on sys.path beats a namespace folder found before it."""
    installed = tmp_path / "kernels"
    installed.mkdir()
    (installed / "__init__.py").write_text("WHOSE = 'hugging face'\n")
    assert run_from_root("import kernels; print(kernels.WHOSE)", after_root=tmp_path) == "hugging face"


def test_the_router_starts_without_torch() -> None:
    assert run_from_root("import baton.router.gateway; print('torch' in sys.modules)") == "False"


def test_the_command_line_starts_without_ray_or_torch() -> None:
    assert run_from_root("import baton.cluster.cli; print({'ray', 'torch'} & set(sys.modules))") == "set()"


def test_every_folder_of_python_is_packaged() -> None:
    packaged = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    assert {f"baton.{'.'.join(folder.parts)}" for folder in folders} <= packaged


def test_a_function_over_the_limit_is_reported() -> None:
    source = "def long():\n" + "    pass\n" * size_report.MAX_FUNCTION_LINES
    functions = size_report.function_sizes("x.py", source)
    assert size_report.too_long(functions, []) == [size_report.Size("x.py:1 long", 61)]


def test_a_triton_kernel_may_be_long() -> None:
    source = "@triton.jit\ndef kernel():\n" + "    pass\n" * 99
    assert size_report.function_sizes("x.py", source) == []


def test_a_file_over_the_limit_is_reported_outside_tests() -> None:
    source = "pass\n" * (size_report.MAX_FILE_LINES + 1)
    files = [size_report.file_size(name, source) for name in ("cluster/x.py", "tests/x.py")]
    assert size_report.too_long([], files) == files[:1]
