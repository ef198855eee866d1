from __future__ import annotations

import io
import resource

from rich.console import Console

from baton.cluster.doctor import Finding, as_table, check_nixl, check_package, open_files, shared_memory


def test_little_shared_memory_is_slow_and_the_fix_is_named() -> None:
    finding = shared_memory(64 * 2**20)
    assert (finding.verdict, finding.detail) == ("slow", "0.1 GiB free in /dev/shm")
    assert "--shm-size" in finding.fix
    assert shared_memory(8 * 2**30).verdict == "ok"


def test_few_open_files_are_slow() -> None:
    assert open_files((1024, 1_048_576)).verdict == "slow"
    assert open_files((65_536, 65_536)).verdict == "ok"
    assert open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).verdict == "ok"


def test_a_package_that_is_not_installed_is_reported_with_its_fix() -> None:
    assert check_package("no-such-package", verdict="missing", fix="install it") == Finding(
        "no-such-package", "missing", "not installed", "install it"
    )


def test_an_agent_of_nixl_really_starts_here() -> None:
    assert [finding.verdict for finding in check_nixl()] == ["ok", "ok"]


def test_the_table_shows_brackets_as_they_are() -> None:
    console = Console(width=120, file=io.StringIO())
    console.print(as_table([Finding("flashinfer", "slow", "not installed", "pip install 'baton[gpu]'")]))
    assert "pip install 'baton[gpu]'" in console.file.getvalue()  # type: ignore[attr-defined]
