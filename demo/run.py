"""`make demo` and `make lab`: the notebooks against an S3 server of their own.

python -m demo.run                      execute the quick start headless; results go to build/
python -m demo.run 02 05                these instead
python -m demo.run --all --keep         all, and keep their outputs in notebooks/
python -m demo.run --lab                open them in JupyterLab
python -m demo.run --with COMMAND ...   run a command with the server and its keys at hand
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from demo import photos
from demo.notebooks import ALL, FOLDER, NOTEBOOK, ROOT, execute, keep
from tests.servers.s3 import SeaweedServer

BUILD = ROOT / "build"


def main() -> None:
    """Start the server, fill a bucket, run what is asked for."""
    chosen = _parser().parse_args()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]  # the user's own, which the notebooks would name
    print("Starting an S3 server ...", flush=True)
    with SeaweedServer() as server, tempfile.TemporaryDirectory() as cache:
        os.environ.update(server.env, XDG_CACHE_HOME=cache)
        os.environ["GPUPOOL_DEMO_URL"] = server.make_bucket("photos")
        fill(os.environ["GPUPOOL_DEMO_URL"], chosen.num_train, chosen.num_test)
        if chosen.lab:
            sys.exit(stay_with(_lab()))
        if chosen.command:
            sys.exit(stay_with(chosen.command))
        for notebook in ALL if chosen.all else named(chosen.notebooks):
            executed = execute(notebook, BUILD)
            print(f"Notebook: {executed}\nPage:     {executed.with_suffix('.html')}", flush=True)
            if chosen.keep:
                keep(executed, [server.access_key, server.env["AWS_SECRET_ACCESS_KEY"]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The notebooks on an S3 server here.")
    parser.add_argument("notebooks", nargs="*", help="such as 02; without any: the quick start")
    parser.add_argument("--all", action="store_true", help="all notebooks")
    parser.add_argument("--keep", action="store_true", help="keep the outputs in notebooks/")
    parser.add_argument("--lab", action="store_true", help="open JupyterLab instead of executing")
    parser.add_argument(
        "--with", dest="command", nargs=argparse.REMAINDER, help="run this command instead"
    )
    parser.add_argument("--num-train", type=int, default=6000, help="training images in the bucket")
    parser.add_argument("--num-test", type=int, default=1000, help="test images in the bucket")
    return parser


def named(names: list[str]) -> list[Path]:
    """The notebooks whose file names begin so: ["02"]; the quick start of []."""
    chosen = [path for path in ALL if path.name.startswith(tuple(names))]
    if names and not chosen:
        sys.exit(f"No notebook begins with {names[0]}; there are {', '.join(p.stem for p in ALL)}.")
    return chosen or [NOTEBOOK]


def fill(url: str, num_train: int, num_test: int) -> None:
    """Put real labelled photographs into the bucket, in class folders; says which."""
    print("Putting photographs into its bucket ...", flush=True)
    images = photos.source()
    counts = photos.upload(url, images, num_train=num_train, num_test=num_test)
    print(f"{counts['train']} to train on and {counts['test']} to test with: {images.name}.")


def stay_with(command: list[str]) -> int:
    """Run a command until it ends (JupyterLab: Ctrl-C twice); its exit status."""
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it got it too; JupyterLab asks whether it is meant
            continue


def _lab() -> list[str]:
    command = [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.root_dir={FOLDER}",
        f"--LabApp.default_url=/lab/tree/{NOTEBOOK.name}",  # the printed address opens it too
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # Jupyter refuses root otherwise; containers run as root
    return command


if __name__ == "__main__":
    main()
