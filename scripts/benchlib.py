"""What the bench scripts share: running, interleaving, medians, and tables.

A figure from a shared machine means nothing by itself, so every script runs its subjects in turn,
round after round, in an order that rotates, and reports ratios within a round. One subject is run
twice in each round: the spread of its ratio to itself is what noise alone does, and a ratio inside
that spread proves nothing.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# As cargo has it, which is started in ROOT.
TARGET = os.path.join(ROOT, os.environ.get("CARGO_TARGET_DIR") or "target")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("METRALE_")}
ENV["METRALE_LOG"] = "warn"
LIMIT_S = 600


def die(text):
    sys.exit(f"{os.path.basename(sys.argv[0])}: {text}")


def need(program, package):
    if shutil.which(program) is None:
        die(f"{program} is missing: apt-get install {package}")


def run(*command, env=ENV, check=True):
    """Runs a command within LIMIT_S and returns its stdout."""
    done = subprocess.run(
        [str(c) for c in command], env=env, text=True, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    if check and done.returncode != 0:
        die(f"{' '.join(str(c) for c in command)} failed:\n{done.stderr}{done.stdout}")
    return done.stdout


def build(*features):
    """Builds metrale for measuring and returns its path; features get a folder of their own."""
    command = ["cargo", "build", "--locked", "--release", "--package", "metrale"]
    target = TARGET
    if features:
        target = os.path.join(TARGET, "bench-" + "-".join(features))
        command += ["--features", ",".join(features), "--target-dir", target]
    print("building", *features, file=sys.stderr)
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode != 0:
        die("the build failed")
    return os.path.join(target, "release", "metrale")


class Workdir:
    """A directory on the disk under test: BENCH_DIR, or bench in the target directory."""

    def __enter__(self):
        base = os.environ.get("BENCH_DIR", os.path.join(TARGET, "bench"))
        os.makedirs(base, exist_ok=True)
        self.path = tempfile.mkdtemp(dir=base)
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)


class Peer:
    """An expert peer on loopback."""

    def __init__(self, metrale, store, *flags):
        self.process = subprocess.Popen(
            [metrale, "peer", "run", "--listen", "127.0.0.1:0", "--store", store, *flags],
            env=ENV, text=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        line = self.process.stdout.readline()
        found = re.match(r"listening on (\S+)", line)
        if found is None:
            die(f"the peer did not start: {line!r}")
        self.address = found[1]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def bench_fetch(metrale, *flags, seconds):
    """One measurement by `metrale bench fetch`, as a dict."""
    out = run(metrale, "bench", "fetch", "--json", "--seconds", seconds, *flags)
    report = json.loads(out)
    if report["errors"]:
        die(f"{report['errors']} fetches failed")
    return report


def interleave(rounds, subjects):
    """Runs every subject once a round, starting with another one each time."""
    names = list(subjects)
    results = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names):] + names[:i % len(names)]:
            results[name].append(subjects[name]())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def median(values):
    return statistics.median(values)


def ratios(above, below):
    return [a / b for a, b in zip(above, below)]


def table(title, unit, results):
    """Prints every round of every subject and its median."""
    print(f"\n{title} ({unit})")
    width = max(map(len, results))
    for name, values in results.items():
        cells = " ".join(f"{v:9.3f}" for v in values)
        print(f"  {name:{width}} {cells}   median {median(values):9.3f}")


def verdict(name, values, bar, control, at_most=False):
    """Prints a ratio beside its bar, every pair, and the spread of the A/A control."""
    middle = median(values)
    met = middle <= bar if at_most else middle >= bar
    pairs = " ".join(f"{v:.3f}" for v in values)
    sign = "<=" if at_most else ">="
    print(f"  {name}: median {middle:.3f}, bar {sign} {bar}: {'met' if met else 'MISSED'}"
          f"   pairs {pairs}   A/A {min(control):.3f}-{max(control):.3f}")
    return met


def machine():
    """One line that says where this was measured."""
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo")
                  if line.startswith("model name")), "?")
    load = " ".join(open("/proc/loadavg").read().split()[:3])
    print(f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, load {load}")
