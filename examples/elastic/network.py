"""A host for each node of a cluster: network namespaces on a bridge, whose links can be cut. Needs root.

The bridge lies in a namespace too, with the rendezvous store, so nothing of this machine's own network is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess

SUBNET = "10.213.77"


class Loopback:
    """One host for all nodes: there is no link to cut."""

    store_address = "127.0.0.1"

    def command(self, node: int | None) -> list[str]:
        return []

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def environment(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


class Namespaces(Loopback):
    """``size`` hosts and a switch, on which the store runs. Names hold this process's id, so that runs do not meet."""

    store_address = f"{SUBNET}.254"

    def __init__(self, size: int, *, retries: int | None = None) -> None:
        """``retries``: how often a host's kernel sends again what nobody acknowledges (net.ipv4.tcp_retries2)."""
        self._made: list[str] = []
        self._switch = self._add("switch")
        try:
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "address", "add", f"{self.store_address}/24", "dev", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for node in range(size):
                host = self._add(f"host{node}")
                ip("-n", self._switch, "link", "add", f"port{node}", "type", "veth", "peer", "eth0", "netns", host)
                ip("-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
                ip("-n", host, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
                ip("-n", host, "link", "set", "eth0", "up")
                if retries is not None:
                    ip("netns", "exec", host, "sh", "-c", f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2")
        except BaseException:
            self.close()
            raise

    def command(self, node: int | None) -> list[str]:
        """What runs a command on a host; None is the switch."""
        return ["ip", "netns", "exec", self._switch if node is None else self._made[1 + node]]

    def address(self, node: int) -> str:
        return f"{SUBNET}.{1 + node}"

    def environment(self) -> dict[str, str]:
        """gloo would take the address of the machine's name, which no other host reaches."""
        return {"GLOO_SOCKET_IFNAME": "eth0"}

    def cut(self, node: int) -> None:
        """Take a host's link down, as when a cable is pulled: no connection is closed."""
        ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        """Put it up again."""
        ip("-n", self._switch, "link", "set", f"port{node}", "up")

    def close(self) -> None:
        """Remove all of it; links go with their namespaces."""
        while self._made:
            ip("netns", "delete", self._made.pop())

    def _add(self, name: str) -> str:
        name = f"elastic{os.getpid()}{name}"
        ip("netns", "add", name)
        self._made.append(name)
        ip("-n", name, "link", "set", "lo", "up")
        return name


def ip(*words: str) -> None:
    """Run ip(8). Raises RuntimeError with its output when it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def why_not() -> str | None:
    """Why this machine cannot make network namespaces; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    try:
        Namespaces(1).close()
    except RuntimeError as error:
        return str(error)
    return None
