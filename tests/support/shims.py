"""Commands of schedulers that stand on PATH in tests: `python shims.py NAME WORDS...` is one.

Slurm's behave as those of 22.05 were seen to (one job, 4711, on two nodes), kubectl and sky as
their manuals say. What they are called with is parsed, so that a word they do not know ends them.
$SHIMS is their folder: `job` has the job's state, `allowed` lets what is pending begin.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("salloc", "srun", "scontrol", "squeue", "scancel", "kubectl", "sky", "ssh")
GONE = ("CANCELLED", "TIMEOUT", "COMPLETING", "COMPLETED", "DELETED")
FOLDER = Path(os.environ.get("SHIMS", "."))


def put(state: str, folder: Path = FOLDER) -> None:
    """Set the job's state, as squeue prints it, at once."""
    (folder / "new").write_text(state)
    (folder / "new").rename(folder / "job")


def state(folder: Path = FOLDER) -> str:
    """The job's state: "" before there is one."""
    return (folder / "job").read_text() if (folder / "job").exists() else ""


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def parsed(*options: str) -> argparse.Namespace:
    """The words, of which these options are known; a "!" behind one means that it has no value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        action = "store_true" if option.endswith("!") else "store"
        parser.add_argument(option.rstrip("!"), action=action)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser.parse_args(sys.argv[2:])


def salloc() -> None:
    """Hold the job while what it runs does, as of -K."""
    words = parsed("-K!", "-n", "-N", "-p", "-t", "--gpus-per-task", "--gres")
    if words.p == "nope":
        say("salloc: error: Job submit/allocate failed: Invalid partition name specified")
        sys.exit(1)

    def revoke(*_: object) -> None:
        if not state().startswith(GONE):
            put("CANCELLED|None|N/A|N/A")
        say("salloc: Job allocation 4711 has been revoked.")
        sys.exit(1)

    signal.signal(signal.SIGTERM, revoke)
    if not (FOLDER / "allowed").exists():
        say("salloc: Pending job allocation 4711")
        say("salloc: job 4711 queued and waiting for resources")
        put("PENDING|Resources|2031-11-26T14:05:00|N/A")
    while not (FOLDER / "allowed").exists():
        time.sleep(0.02)
        if state().startswith(GONE):
            revoke()
    say("salloc: Granted job allocation 4711")
    put(f"RUNNING|None|2026-11-26T12:00:00|{os.environ.get('SHIM_END', 'N/A')}")
    job = {"SLURM_JOB_ID": "4711", "SLURM_TASKS_PER_NODE": "2(x2)"}
    child = subprocess.Popen(words.rest, env={**os.environ, **job}, process_group=0)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        time.sleep(0.02)
        if state().startswith(GONE):
            child.terminate()
            child.wait()
            revoke()
    say("salloc: Relinquishing job allocation 4711")
    put("COMPLETED|None|N/A|N/A")


def srun() -> None:
    """Run a command on a node of the job."""
    flags = (
        "--jobid",
        "--overlap!",
        "-N",
        "-n",
        "-w",
        "--cpu-bind",
        "--mpi",
        "--export",
        "--gpus",
    )
    words = parsed(*flags, "-u!", "--quiet!")
    assert (words.jobid, words.N, words.n, words.gpus) == ("4711", "1", "1", "2")
    os.execvpe(words.rest[0], words.rest, {**os.environ, "SLURMD_NODENAME": words.w})


def scontrol() -> None:
    """List the nodes of the job."""
    assert sys.argv[2:] == ["show", "hostnames"]
    print("node01\nnode02")


def squeue() -> None:
    """Print the state of the job."""
    words = parsed("-h!", "-t", "-j", "-o")
    assert (words.t, words.j, words.o) == ("all", "4711", "%T|%r|%S|%e")
    print(state())


def scancel() -> None:
    """End the job."""
    assert sys.argv[2:] == ["4711"]
    put("CANCELLED|None|N/A|N/A")


def kubectl() -> None:
    """A cluster with one job, the pods of which run as soon as that is allowed."""
    words = parsed("--context")
    assert words.context == "lab"
    match words.rest:
        case ["apply", "-f", "-"]:
            (FOLDER / "manifest").write_text(sys.stdin.read())
            put("Pending|0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
        case ["get", "pods", "-l", label, *_, "--field-selector=status.phase=Running", "-o", _]:
            name = label.removeprefix("job-name=")
            print(*(f"{name}-{i}-x" for i in range(2 * (FOLDER / "allowed").exists())))
        case ["get", "pods", *_]:
            print(state())
        case ["get", "job", _, "-o", _]:
            print(os.environ.get("SHIM_FAILED", ""))
        case ["logs", *_]:
            print("python3: not found")
        case ["delete", "job", _, "--ignore-not-found", "--wait=false"]:
            put("DELETED")
        case ["exec", "-i", pod, "--", *command]:
            os.execvpe(command[0], command, {**os.environ, "POD": pod})
        case other:
            sys.exit(f"kubectl: {other}")


def sky() -> None:
    """Launch a cluster, which stays."""
    if sys.argv[2] == "down":
        assert sys.argv[3] == "-y"
        put("DELETED")
        return
    assert sys.argv[2] == "launch"
    del sys.argv[2]
    parsed("-y!", "-c", "--num-nodes", "-i", "--down!", "--gpus")
    print("Cluster launched.")
    put("UP")


def ssh() -> None:
    """Give the last word to a shell, as ssh does with all of them."""
    words = parsed("-x!", "-a!", "-T!", *("-o",))
    os.execvpe("sh", ["sh", "-c", " ".join(words.rest[1:])], {**os.environ, "HOST": words.rest[0]})


if __name__ == "__main__":
    with (FOLDER / "called").open("a") as called:
        called.write(json.dumps(sys.argv[1:]) + "\n")
    globals()[sys.argv[1]]()
