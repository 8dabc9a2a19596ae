"""Two hosts on this machine: network namespaces joined by a pair of virtual devices.

Each has its own network, name, shared memory and semaphores; processes and files are common.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.jobs import environment

_ENTER = """#!/bin/bash
# enter [-x] HOST WORDS: runs a command on a host, as ssh would; mpirun starts its daemons so.
while [[ $1 == -* ]]; do shift; done
host=$1; shift
case $host in {names}) ;; *) echo "no host $host" >&2; exit 255 ;; esac
exec ip netns exec "$host" unshare --uts --mount --ipc bash -c '
  hostname "$1"; shift
  mount --bind {hosts} /etc/hosts
  mount -t tmpfs tmpfs /dev/shm
  cd {folder}; eval "$*"' enter "$host" "$@"
"""


@dataclass(frozen=True)
class Hosts:
    """The hosts.

    Args:
        names: Their names, which resolve on both.
        enter: The program that runs a command on one.
        folder: Where commands are run.
        nowhere: An address that nobody has.
    """

    names: tuple[str, str]
    enter: Path
    folder: Path
    nowhere: str

    def start(self, host: int, command: list[str], **more: str) -> subprocess.Popen[str]:
        """Starts a command on a host."""
        launchers = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")
        environ = dict.fromkeys(launchers, str(self.enter)) | {"OMP_NUM_THREADS": "1"} | more
        # Open MPI puts all ranks on the first host where it may put more on it than it has cores.
        environ["PRTE_MCA_rmaps_default_mapping_policy"] = "ppr:2:node"
        return subprocess.Popen(
            [str(self.enter), self.names[host], shlex.join(command)],
            env=environment(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """A context in which there are two hosts; skips the test where they cannot be made.

    Args:
        folder: Where commands are run.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        pytest.skip(f"no {missing[0]} to make network namespaces with")
    mark = uuid.uuid4().hex[:6]
    names = f"dc{mark}a", f"dc{mark}b"
    addresses = "10.231.7.1", "10.231.7.2"
    lines = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
    table, enter = folder / "hosts", folder / "enter"
    table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    enter.write_text(_ENTER.format(names="|".join(names), hosts=table, folder=folder))
    enter.chmod(0o755)
    made = []
    try:
        for name in names:
            add = ["ip", "netns", "add", name]
            done = subprocess.run(add, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            made.append(name)
        first, second = names
        pair = f"ip link add e{first} netns {first} type veth peer name e{second} netns {second}"
        subprocess.run(pair.split(), check=True)
        for name, address in zip(names, addresses, strict=True):
            for line in (
                f"addr add {address}/24 dev e{name}",
                "link set lo up",
                f"link set e{name} up",
            ):
                subprocess.run(["ip", "-n", name, *line.split()], check=True)
        yield Hosts(names, enter, folder, "10.231.7.9")
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)
