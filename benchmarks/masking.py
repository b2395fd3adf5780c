"""What masking costs: 7 MB of output with 1, 5 and 20 known secrets, here and in another tree.

    python benchmarks/masking.py [--other FOLDER] [--rounds 5]

"Here" is the tree this file lies in; FOLDER holds another one, say a worktree of an earlier commit
(left out, only "here" is measured). Each round is two new processes in turn; CPU time, medians.
Small prints are 100,000 pieces of about 70 characters, one print is the same text in one piece.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

NUM_SECRETS = (1, 5, 20)
NUM_LINES = 100_000
TEXTS = ("nothing secret", "some secrets", "progress bars", "colours")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def secrets(number: int) -> list[str]:
    """As users have them: AWS's keys, tokens, passwords; each fifth a session token."""
    draw = random.Random(1)
    kinds: list[Callable[[], str]] = [
        lambda: "".join(draw.choices(LETTERS + "/+", k=40)),
        lambda: "hf_" + "".join(draw.choices(LETTERS, k=34)),
        lambda: "".join(draw.choices(LETTERS + "!&%$", k=14)),
        lambda: "".join(draw.choices("0123456789abcdef", k=40)),
        lambda: "".join(draw.choices(LETTERS + "/+", k=700)) + "==",
    ]
    return [kinds[n % len(kinds)]() for n in range(number)]


def lines(kind: str, known: list[str]) -> list[str]:
    """What a training may print, of this kind."""
    draw = random.Random(2)
    made = []
    for n in range(NUM_LINES):
        loss = f"{draw.random():.6f}"
        line = f"epoch {n // 1000} step {n} loss {loss} accuracy {draw.random():.4f} on {n % 8}"
        line = f"{line} | {draw.choice(('Adam', 'a NICE batch', 'A-B', 'cuda:0'))} | ok"
        if kind == "some secrets" and n % 100 == 0:
            line += known[n // 100 % len(known)]
        if kind == "colours":
            line = f"\x1b[32m{line}\x1b[0m \x1b[1mdone\x1b[0m"
        made.append(f"\r{line} 50%|###  |" if kind == "progress bars" else f"{line}\n")
    return made


def measure() -> dict[str, float]:
    """Seconds of CPU by case, with the gpupool that is first on the path."""
    from gpupool.core.wire.masking import Redactor, Secrets

    found = {}
    for number, kind in product(NUM_SECRETS, TEXTS):
        known = secrets(number)
        small = lines(kind, known)
        for shape, pieces in (("small prints", small), ("one print", ["".join(small)])):
            redactor = Redactor(Secrets(known))
            began = time.process_time()
            for piece in pieces:
                redactor.feed(piece)
            redactor.flush()
            found[f"{number} | {kind} | {shape}"] = time.process_time() - began
    return found


def measured_in(tree: Path) -> dict[str, float]:
    """The same in a new process that has the package of this tree."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, __file__, "--one"], env=env, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure in rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="this process only, as JSON")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure()))
        return
    here = Path(__file__).resolve().parents[1]
    trees = {"here": here, **({"other": chosen.other.resolve()} if chosen.other else {})}
    rounds = [
        {name: measured_in(tree) for name, tree in trees.items()} for _ in range(chosen.rounds)
    ]
    print("| secrets | text | pieces | other, ms | here, ms | ratio |\n|---|---|---|---|---|---|")
    for case in rounds[0]["here"]:
        ms = {name: 1000 * statistics.median(one[name][case] for one in rounds) for name in trees}
        other, ours = ms.get("other", float("nan")), ms["here"]
        print(f"| {case} | {other:.0f} | {ours:.0f} | {ours / other:.2f} |")


if __name__ == "__main__":
    main()
