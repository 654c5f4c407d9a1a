"""A star of network namespaces on one machine, with a rate limit on every cable, separately in each direction.

    python benchmarks/network/shaped.py 2 1gbit -- ping -c 3 10.77.0.2

brings up two nodes, runs a command on the first, and takes the network down. It needs root, and iproute2.
"""

import argparse
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

__all__ = [
    "NetworkError",
    "address",
    "become",
    "connect",
    "ended_by_signals",
    "enter",
    "limit",
    "shaped_network",
    "transmitted",
]

ENTER = Path(__file__).parent / "enter.sh"
VARIABLE = "QCOMP_NETWORK"
"""The environment variable in which ranks find the name of their network."""
PREFIX = "qcompnet"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(?:\d+|switch)")
TOOLS = ("ip", "tc", "nsenter", "unshare")

_NETWORK_SPACE, _NAME_SPACE = 0x40000000, 0x04000000
"""Linux: CLONE_NEWNET and CLONE_NEWUTS."""

BUFFER = "4mb"
"""The queue limit of a switch."""


class NetworkError(Exception):
    """The shaped network cannot be made here."""


@contextmanager
def shaped_network(nodes: int, rate: str | None) -> Iterator[str]:
    """Bring a network up, yield its name, and take it down whatever happens.

    Node i has the address 10.77.0.<i + 1> on an interface ``eth0``. Networks never touch: no node has a route to
    anywhere else, the switch has its own namespace, and names contain the process id. Remains of processes that ended
    without cleaning up are removed first.

    Parameters
    ----------
    nodes : int
    rate : str or None
        The rate of each cable in each direction in the notation of ``tc``, such as ``"1gbit"``; None for no limit.

    Raises
    ------
    NetworkError
        Without root, without iproute2, or if the kernel refuses.
    """
    require_rights()
    name = f"{PREFIX}-{os.getpid()}"
    with ended_by_signals():
        try:
            for namespace in leftovers(_namespaces()):
                _remove(namespace)
            _bring_up(name, nodes)
            limit(name, nodes, rate)
            yield name
        finally:
            with _undisturbed():
                for namespace in _namespaces():
                    if namespace.startswith(f"{name}-"):
                        _remove(namespace)


def require_rights() -> None:
    """Raise a `NetworkError` that says what is missing here."""
    if os.geteuid() != 0:
        raise NetworkError("the shaped network needs root, to make network namespaces: run it with sudo")
    for tool in TOOLS:
        if shutil.which(tool) is None:
            package = "iproute2" if tool in ("ip", "tc") else "util-linux"
            raise NetworkError(f"the shaped network needs {tool}, of the package {package}")


def leftovers(namespaces: Sequence[str]) -> list[str]:
    """Return the namespaces of networks whose processes have ended."""
    found = [(namespace, _NAME.fullmatch(namespace)) for namespace in namespaces]
    return [namespace for namespace, match in found if match and not _is_alive(int(match[1]))]


def address(node: int) -> str:
    """Return the address of a node."""
    return f"10.77.0.{node + 1}"


def enter(node: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one on a node; it needs the network's name in `VARIABLE`."""
    return [str(ENTER), address(node), shlex.join(command)]


def become(name: str, node: int) -> None:
    """Move this process to a node of a running network, whose address becomes its host name.

    Threads that run already stay where they are.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}-{node}") as namespace:
        for done in (libc.setns(namespace.fileno(), _NETWORK_SPACE), libc.unshare(_NAME_SPACE)):
            if done:
                raise NetworkError(
                    f"this process cannot enter node {node}: {os.strerror(ctypes.get_errno())}"
                )
    socket.sethostname(address(node))


def connect(name: str, node: int, *, up: bool) -> None:
    """Plug the cable of a node of a running network in or out, without notice to other nodes."""
    _do("ip", "-n", f"{name}-switch", "link", "set", f"port{node}", "up" if up else "down")


def limit(name: str, nodes: int, rate: str | None) -> None:
    """Limit every cable of a running network to another rate; nodes may call this too."""
    for node in range(nodes):
        for namespace, device in ((f"{name}-{node}", "eth0"), (f"{name}-switch", f"port{node}")):
            inside = ["nsenter", f"--net=/run/netns/{namespace}", "tc", "qdisc"]
            subprocess.run([*inside, "del", "dev", device, "root"], capture_output=True, check=False)
            if rate is not None:
                bucket = ["tbf", "rate", rate, "burst", burst(rate), "limit", BUFFER]
                _do(*inside, "add", "dev", device, "root", *bucket)


def burst(rate: str) -> str:
    """Return the size of the token bucket: the bytes that may be sent at once after a pause.

    It is large enough for the kernel's segments and for late timers. It is small on slow links, where a large burst
    would save short messages some milliseconds.

    Examples
    --------
    >>> burst("10mbit"), burst("100mbit"), burst("1gbit")
    ('16kb', '72kb', '256kb')
    """
    if rate == "10mbit":
        return "16kb"
    return "256kb" if rate.endswith("gbit") else "72kb"


def transmitted(interface: str, text: str | None = None) -> int:
    """Return the bytes that an interface of this node has sent, from the text of /proc/net/dev."""
    for line in (Path("/proc/net/dev").read_text() if text is None else text).splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8])
    raise ValueError(f"interface is {interface!r}; expected one of this node")


def _bring_up(name: str, nodes: int) -> None:
    switch = f"{name}-switch"
    _do("ip", "netns", "add", switch)
    _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", switch, "link", "set", "bridge", "up")
    for node in range(nodes):
        own, port, at = f"{name}-{node}", f"port{node}", address(node)
        _do("ip", "netns", "add", own)
        _do("ip", "-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _do("ip", "-n", own, "address", "add", f"{at}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _do("ip", "-n", own, "link", "set", device, "up")
        # TCP CUBIC, as on most clusters. A namespace cannot set the default, but a route can.
        route = ["10.77.0.0/24", "dev", "eth0", "src", at, "congctl", "cubic"]
        _do("ip", "-n", own, "route", "replace", *route)
        # While other methods take their turns, a connection is idle for longer than in a run of one method. TCP would
        # forget the rate of the link after 200 ms.
        setting = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
        _do("nsenter", f"--net=/run/netns/{own}", "sh", "-c", f"echo 0 > {setting}")


def _remove(namespace: str) -> None:
    """End the processes in a namespace, and delete it."""
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for process in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise NetworkError(f"the shaped network cannot be made here: {shlex.join(command)}: {why[-1]}")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an exception does."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back signals, so that a second Ctrl-C does not interrupt the cleanup that the first one started."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    former = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def main() -> int:
    """Run a command on the first node of a network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nodes", type=int)
    parser.add_argument("rate", help="such as 1gbit, or none")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    try:
        with shaped_network(options.nodes, None if options.rate == "none" else options.rate) as name:
            command = enter(0, options.command)
            return subprocess.run(command, env=os.environ | {VARIABLE: name}, check=False).returncode
    except NetworkError as error:
        print(f"shaped.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
