"""What the bench scripts that measure in the guest share: its rails, and perftest on them."""

import os
import re
import subprocess
import sys
import time

from benchlib import ENV, ROOT, die, run

KIB = 1024
HEADER_BYTES = 256
NEAR, FAR = "rxe0", "rxe0p"
ADDRESS = {NEAR: "10.1.0.1", FAR: "10.1.0.2"}
# What leaves it is what the peer sends, on either rail.
FAR_NETDEV, FAR_NETDEV2 = "v0p", "v1p"
SHAPED_GB_PER_S = 50e6 / 8 / 1e9


def run_in_guest(script, metrale, stores):
    """Runs `script` again, in the guest that scripts/soft-roce boots; gives its status."""
    load = " ".join(open("/proc/loadavg").read().split()[:3])
    print(f"the host's load is {load}", flush=True)
    guest = [os.path.join(ROOT, "scripts", "soft-roce"), sys.executable, os.path.abspath(script),
             *sys.argv[1:], "--metrale", metrale, "--stores", stores]
    env = {"LIMIT_S": "3000", **os.environ}
    return subprocess.run(guest, env=env, stdin=subprocess.DEVNULL).returncode


class Shaped:
    """What leaves a netdev goes no faster than so many Mbit/s."""

    def __init__(self, netdev, mbit):
        self.netdev, self.mbit = netdev, mbit

    def __enter__(self):
        run("tc", "qdisc", "add", "dev", self.netdev, "root", "tbf", "rate", f"{self.mbit}mbit",
            "burst", "64kb", "latency", "400ms")

    def __exit__(self, *_):
        run("tc", "qdisc", "del", "dev", self.netdev, "root")


def persistent(measure):
    """`measure`, which returns a text where a program gave no figure; three attempts."""
    def again():
        for _ in range(3):
            figure = measure()
            if not isinstance(figure, str):
                return figure
        die(f"no figure in three attempts:\n{figure[-2000:]}")
    return again


def perftest(program, size, iterations, *flags, server=FAR, client=NEAR):
    """One run of a perftest pair on the first rail; the output of the client, which asks."""
    # An ack timeout of 1 s: with perftest's own of 67 ms, reads that wait for others are repeated.
    common = ["-x", "1", "-F", "-u", "18", "-s", size, "-n", iterations, *flags]
    common = [str(flag) for flag in common]
    listening = subprocess.Popen([program, "-d", server, *common], env=ENV,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        wait_for_port(18515, listening)
        # What fails gives no figure, and is tried again.
        return run(program, "-d", client, *common, ADDRESS[server], check=False)
    finally:
        listening.kill()
        listening.wait()


def wait_for_port(port, server):
    """Until somebody listens on `port`; the programs themselves do not say when they do."""
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        for path in ("/proc/net/tcp", "/proc/net/tcp6"):
            rows = [line.split() for line in open(path)][1:]
            if any(row[3] == "0A" and int(row[1].split(":")[1], 16) == port for row in rows):
                return
        time.sleep(0.02)
    die(f"nobody listens on port {port}")


def row(out, size, columns):
    """The figures of perftest's line for `size`, or None where it printed none."""
    rows = [line.split() for line in out.splitlines() if re.match(rf"\s*{size}\s", line)]
    return [float(rows[0][column]) for column in columns] if rows else None


def bandwidth(program, size, pairs, gb, **ends):
    """ib_read_bw or ib_write_bw, moving `gb` with `pairs` queue pairs."""
    iterations = max(20, round(gb * 1e9 / size / pairs))

    def measure():
        out = perftest(program, size, iterations, "-q", pairs, **ends)
        # Columns: bytes, iterations, peak, average, message rate. Its MB are MiB.
        found = row(out, size, [3])
        # Now and then it measures nothing and says 0.00.
        return {"gb_per_s": found[0] * KIB * KIB / 1e9} if found and found[0] else out
    return persistent(measure)


def latency(program, size, iterations, **ends):
    """ib_read_lat, ib_write_lat or ib_send_lat; the latter two give half of a round trip."""
    def measure():
        out = perftest(program, size, iterations, **ends)
        # Columns: bytes, iterations, min, max, typical, average, deviation, 99 %, 99.9 %.
        found = row(out, size, [4, 5])
        return {"p50_us": found[0], "average_us": found[1]} if found else out
    return persistent(measure)
