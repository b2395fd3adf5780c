"""What encrypted sockets and proved connections cost, beside the same calls without them.

    git worktree add ../before 24aa93e
    python benchmarks/encryption.py --before ../before [--rounds 5] [--reps 100]

The checkout `--before` is of a time when the pool's sockets were signed only, and connections of
gloo were taken as they came. Each round starts a pool of 2 CPU ranks of either, in a new process
with a warm agent; the order changes from round to round. Wall times are medians over all calls, of
starts over the rounds. "Group again" is the process group formed anew over the same ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODES = {
    "trivial cell": "None",
    "reply of 0.9 MB": "b'x' * 900_000",
    "1 MB printed": "print('x' * 1_000_000)",
    "sub-group of 2 ranks": "dist.destroy_process_group(dist.new_group([0, 1]))",
}
MEASURE = """
import json, sys, time
import gpupool
from gpupool.pool.processes import agent
codes, reps, times = json.loads(sys.argv[1]), int(sys.argv[2]), {}

def timed(call):
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)

if __name__ == "__main__":
    gpupool.start(n=2, device="cpu").stop()  # the agent and its fork server are warm now
    times["start"] = [timed(lambda: gpupool.start(n=2, device="cpu"))]
    pool = gpupool.current_pool()
    for name, code in codes.items():
        for _ in range(5):
            pool.run(code)
        times[name] = [timed(lambda: pool.run(code)) for _ in range(reps)]
    times["group again"] = [timed(pool.reform_group) for _ in range(reps)]
    pool.stop()
    print(json.dumps(times))
"""


def measure(checkout: Path, reps: int) -> dict[str, list[float]]:
    """Name -> milliseconds of each call, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(CODES), str(reps)],
        env={**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=100)
    options = parser.parse_args()
    ways = {"before": options.before, "now": ROOT}
    times: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ways}
    for number in range(options.rounds):
        for way in sorted(ways, reverse=bool(number % 2)):
            for name, found in measure(ways[way], options.reps).items():
                times[way][name] += found
    print("| | before, ms | now, ms | difference, ms | ratio |\n|---|---|---|---|---|")
    for name in times["now"]:
        old, new = (statistics.median(times[way][name]) for way in ("before", "now"))
        print(f"| {name} | {old:.2f} | {new:.2f} | {new - old:+.2f} | {new / old:.2f} |")


if __name__ == "__main__":
    main()
