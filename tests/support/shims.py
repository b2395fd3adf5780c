"""Commands of schedulers that stand on PATH in tests: `python shims.py NAME WORDS...` is one.

Slurm's behave as those of 22.05 were seen to, for one job, 4711, on two nodes; kubectl and sky as
their manuals say. Other words than they know end them. $SHIMS is their folder: `job` has the job's
state as squeue prints it, and what is pending begins when `allowed` is there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("salloc", "srun", "scontrol", "squeue", "scancel", "kubectl", "sky", "ssh")
GONE = ("CANCELLED", "TIMEOUT", "COMPLETING", "COMPLETED")
FOLDER = Path(os.environ.get("SHIMS", "."))
ALLOWED = FOLDER / "allowed"


def put(state: str, folder: Path = FOLDER) -> None:
    """Set the job's state."""
    (folder / "new").write_text(state)
    (folder / "new").rename(folder / "job")


def state(folder: Path = FOLDER) -> str:
    """The job's state: "" before there is one."""
    return (folder / "job").read_text() if (folder / "job").exists() else ""


def say(text: str) -> None:
    """A line of salloc."""
    print(f"salloc: {text}", file=sys.stderr, flush=True)


def revoke(*_: object) -> None:
    """The job is no more, whoever has ended it."""
    if not state().startswith(GONE):
        put("CANCELLED|None|N/A|N/A")
    say("Job allocation 4711 has been revoked.")
    sys.exit(1)


def salloc(command: list[str]) -> None:
    """Wait for the job, and hold it while the command runs, which -K ends with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, revoke)
    if not ALLOWED.exists():
        say("Pending job allocation 4711")
        put("PENDING|Resources|2031-11-26T14:05:00|N/A")
    while not ALLOWED.exists():
        time.sleep(0.02)
        if state().startswith(GONE):
            revoke()
    say("Granted job allocation 4711")
    put(f"RUNNING|None|2026-11-26T12:00:00|{os.environ.get('SHIM_END', 'N/A')}")
    job = {"SLURM_JOB_ID": "4711", "SLURM_TASKS_PER_NODE": "2(x2)"}
    child = subprocess.Popen(command, env={**os.environ, **job}, process_group=0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: child.terminate())
    while child.poll() is None:
        time.sleep(0.02)
        if state().startswith(GONE):
            child.terminate()
            child.wait()
            revoke()
    put("COMPLETED|None|N/A|N/A")


def main() -> None:
    """Be what the first word says."""
    match sys.argv[1:]:
        case ["salloc", "-K", "-n", "4", "--gpus-per-task=1", "-p", "gpu", "-t", "9", *command]:
            salloc(command)
        case ["salloc", *_]:
            sys.exit("salloc: error: Job submit/allocate failed: Invalid partition name specified")
        case ["srun", "--jobid=4711", "--overlap", "-N1", "-n1", "-w", node, "--gpus=2", *words]:
            known = ["--cpu-bind=none", "--mpi=none", "--export=ALL", "-u", "--quiet"]
            assert words[:5] == known
            os.execvpe(words[5], words[5:], {**os.environ, "HOST": node})
        case ["scontrol", "show", "hostnames"]:
            print("node01\nnode02")
        case ["squeue", "-h", "-t", "all", "-j", "4711", "-o", "%T|%r|%S|%e"]:
            print(state())
        case ["scancel", "4711"]:
            put("CANCELLED|None|N/A|N/A")
        case ["kubectl", "--context", "lab", "apply", "-f", "-"]:
            (FOLDER / "manifest").write_text(sys.stdin.read())
            put("Pending|0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
        case [
            "kubectl",
            "--context",
            "lab",
            "get",
            "pods",
            "-l",
            label,
            "--field-selector=status.phase=Pending",
            *_,
        ]:
            print(state())
        case ["kubectl", "--context", "lab", "get", "pods", "-l", label, *_]:  # that run
            print(*(f"{label.removeprefix('job-name=')}-{i}" for i in range(2 * ALLOWED.exists())))
        case ["kubectl", "--context", "lab", "get", "job", _, "-o", "jsonpath={.status.failed}"]:
            print(os.environ.get("SHIM_FAILED", ""))
        case ["kubectl", "--context", "lab", "logs", *_]:
            print("python3: not found")
        case ["kubectl", "--context", "lab", "delete", "job", *_]:
            put("")
        case ["kubectl", "--context", "lab", "exec", "-i", pod, "--", *command]:
            os.execvpe(command[0], command, {**os.environ, "HOST": pod})
        case ["sky", "launch", "-y", "-c", _, "--num-nodes", "2", "-i", "30", "--down", *_]:
            print("launched")
            put("UP")
        case ["sky", "down", "-y", "gpupool-sky"]:
            put("")
        case ["ssh", "-x", "-a", "-T", "-o", _, "-o", _, "-o", _, host, *command]:
            os.execvpe("sh", ["sh", "-c", " ".join(command)], {**os.environ, "HOST": host})
        case words:
            sys.exit(f"unknown: {words}")


if __name__ == "__main__":
    main()
