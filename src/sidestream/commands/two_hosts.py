"""Runs a command on two emulated hosts with a slow wire between them. Needs root.

A check of link=throttled.

    python scripts/two_hosts.py --gbps 2 -- python scripts/measure_overlap.py overlap=shortcut
    python scripts/two_hosts.py --gbps 1 -- python train.py trainer.max_steps=20

Makes two network namespaces joined by a veth pair whose both ends are limited by `tc tbf`, runs
one rank in each under torchrun, on a core of its own, and takes everything away again, also after
an error or Ctrl-C. The limit is on all traffic between the two, gradients too, and adds no
latency: tbf cannot, and netem is not asked for. gloo at times sends the two directions of an
exchange one after another; it then takes twice as long as on the link of link=throttled.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from sidestream.commands import shared

ADDRESSES = ("10.213.77.1", "10.213.77.2")  # seen inside the namespaces only
PORT = 29511
DEVICE = "wire"
# Of TCP in the namespaces: go on at full speed after a pause, and do not probe for the rate.
TUNING = {"tcp_slow_start_after_idle": ("0",), "tcp_congestion_control": ("cubic", "reno")}
EMULATED = "SIDESTREAM_EMULATED"  # read by measure/overlap_run.py
SECONDS_OF_BURST = 250e-6
SECONDS_TO_STOP = 30.0
SECONDS_AFTER_FAILURE = 5.0
POLL_SECONDS = 0.1


class Refused(Exception):
    """This machine cannot do it; the message is for the user."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = shared.parser(__doc__, whole=True, allow_abbrev=False)
    parser.add_argument(
        "--gbps",
        type=shared.number(1e-6, 1e6, float),
        default=1.0,
        help="rate of the wire, each way (default 1)",
    )
    parser.add_argument(
        "--latency-us",
        type=shared.number(1, 1e8, float),
        default=1e6,
        help="tbf's `latency`: how long a packet may wait for its turn before it is dropped; no delay of the wire "
        "(default 1000000: none is dropped)",
    )
    parser.add_argument(
        "--port", type=shared.number(1, 65535), default=PORT, help=f"where the ranks meet (default {PORT})"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- python <script> <arguments>")
    options = parser.parse_args(argv)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no command; put it behind --, such as -- python train.py")
    return options


def torchrun_arguments(command: list[str]) -> list[str]:
    """What torchrun is given to run `command`: the script, or `-m module`, and its arguments.

    Raises:
        Refused: It is no Python program.
    """
    program, *rest = command
    if Path(program).name.startswith("python") and rest:
        return rest
    if program.endswith(".py"):
        return command
    raise Refused(f"command {program}: expected python <script> <arguments>; torchrun is started for it")


def check_machine() -> None:
    """Refuse where namespaces cannot be made.

    Raises:
        Refused: Naming what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise Refused("network namespaces exist on Linux only")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Refused(f"{program} is not installed; it is part of iproute2")
    if os.geteuid() != 0:
        raise Refused("making network namespaces needs root; run it with sudo, or use link=throttled")


def system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def tune(namespace: str) -> None:
    """Set what `TUNING` names, the first value that this kernel has; without it transfers are only less even."""
    for key, values in TUNING.items():
        for value in values:
            write = f"echo {value} > /proc/sys/net/ipv4/{key}"
            if not subprocess.run(
                ["ip", "netns", "exec", namespace, "sh", "-c", write], capture_output=True
            ).returncode:
                break


@contextlib.contextmanager
def hosts(*, gbps: float, latency_us: float) -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a wire between them; they are gone afterwards."""
    names = (f"sidestream-{os.getpid()}-0", f"sidestream-{os.getpid()}-1")
    # What may pass at once after a pause makes short transfers faster than the rate, so as little as the timer allows.
    burst = max(16 * 1024, round(gbps * 1e9 / 8 * SECONDS_OF_BURST))
    try:
        for name in names:
            system("ip", "netns", "add", name)
            tune(name)
        # Made inside: neither end ever appears among this machine's devices.
        ends = [("name", DEVICE, "netns", name) for name in names]
        system("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, ADDRESSES):
            system("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
            for device in ("lo", DEVICE):
                system("ip", "-n", name, "link", "set", device, "up")
            limit = (
                "rate",
                f"{round(gbps * 1e6)}kbit",
                "burst",
                str(burst),
                "latency",
                f"{latency_us:.0f}us",
            )
            system("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:  # the wire goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(number: int, namespace: str, arguments: list[str], *, gbps: float, port: int) -> subprocess.Popen:
    """Start torchrun with one rank on one host, on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[number % len(cores)]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        f"--node-rank={number}",
        "--nproc-per-node=1",
        f"--master-addr={ADDRESSES[0]}",
        f"--master-port={port}",
    ]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": DEVICE,
        "NCCL_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        EMULATED: f"two network namespaces of one machine, tc tbf {gbps:g} Gbit/s between them",
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *torchrun, *arguments],
        env=environment,
        start_new_session=True,  # so that all it started can be ended together
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


class Asked:
    """While entered, SIGINT and SIGTERM are noted, not obeyed."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> "Asked":
        noted = (signal.SIGINT, signal.SIGTERM)
        self._before = {
            n: signal.signal(n, lambda number, frame: self.received.append(number)) for n in noted
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def watch(processes: list[subprocess.Popen], asked: Asked) -> int:
    """Wait for both; pass a request to stop on once, then end what is left after a while. Returns the exit code."""
    deadline, told = float("inf"), False
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FAILURE)
        if asked.received and not told:
            told, deadline = True, min(deadline, time.monotonic() + SECONDS_TO_STOP)
            for process in processes:
                send(process, signal.SIGTERM)
        if time.monotonic() > deadline or len(asked.received) > 1:
            break
        time.sleep(POLL_SECONDS)
    if asked.received:
        return 128 + asked.received[0]
    return next((abs(code) for process in processes if (code := process.poll())), 0)


def send(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    try:
        command = torchrun_arguments(options.command)
        check_machine()
        with Asked() as asked, hosts(gbps=options.gbps, latency_us=options.latency_us) as names:
            processes: list[subprocess.Popen] = []
            try:
                for number, name in enumerate(names):
                    processes.append(start(number, name, command, gbps=options.gbps, port=options.port))
                return watch(processes, asked)
            finally:
                for process in processes:
                    send(process, signal.SIGKILL)
                    process.wait()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run() -> NoReturn:
    shared.run(main)
