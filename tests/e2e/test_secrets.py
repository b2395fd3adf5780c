"""One session of a user with secrets, and a look into every place where one could have stayed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipyparallel
import psutil

from tests.notebook.kernel import Cell, Kernel
from tests.servers.issuer import Issuer
from tests.support.processes import files_in, until

CANARY = "c4n4ry"  # a part of each secret: not even a piece of one may be seen

SETUP = """
import json, os, pathlib, torch, gpupool
for name, value in json.loads(pathlib.Path(os.environ["SECRETS_FILE"]).read_text()).items():
    os.environ[name] = value
%load_ext gpupool
%gpupool start -n 2 --cpu
"""

SHOW = """
%%spmd -o shown
import base64, json, os, subprocess, sys, logging, urllib.parse
names = ["HF_TOKEN", "HTTPS_PROXY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
print(dict(os.environ))
print(json.dumps({name: os.environ[name] for name in names}), file=sys.stderr)
print(urllib.parse.urlencode({name: os.environ[name] for name in names}))
for name in names:
    print(os.environ[name][:9], end="", flush=True)
    print(os.environ[name][9:])
subprocess.run(["env"])
!env
os.write(1, os.environ["HF_TOKEN"].encode()); os.write(2, os.environ["HF_TOKEN"].encode())
logging.warning("logging in with %s", os.environ["HF_TOKEN"])
from IPython.display import HTML, display
display(HTML("<b>" + os.environ["HF_TOKEN"] + "</b>"), {"key": os.environ["AWS_SECRET_ACCESS_KEY"]})
os.environ["HF_TOKEN"]
"""

FAIL = """
%%spmd
import os
token = os.environ["HF_TOKEN"]
raise ValueError(f"{token} {os.environ['AWS_SESSION_TOKEN']!r} {os.environ['HTTPS_PROXY']}")
"""

TRAIN = """
def loss(outputs, targets):
    import os, time
    print("training with", os.environ["HF_TOKEN"], os.environ["AWS_SECRET_ACCESS_KEY"])
    time.sleep(0.05)
    return torch.nn.functional.cross_entropy(outputs, targets)

def failing_loss(outputs, targets):
    import os
    raise ValueError(os.environ["AWS_SECRET_ACCESS_KEY"])

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
options = gpupool.TrainingOptions(epochs=4, batch_size=8)
run = gpupool.train(torch.nn.Linear(4, 2), data, loss, options, wait=False)
run.result()
run.text(0), run.text(1), run.history
"""


def family(pid: int) -> Iterator[tuple[str, bytes]]:
    """Each process of ours below one: its arguments, and its first environment; none of what a cell
    starts (`!env`), which is to have the environment of its rank."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            # first, as what a cell starts has the name of its rank until it has an environment
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            # without the interpreter: the environment may lie in a folder of this name
            line = " ".join(process.cmdline()).replace(sys.executable, "python")
            if "gpupool" in line or "ipyparallel" in line:
                yield line, environ


def lines_with_canary(folder: Path) -> list[str]:
    """The name of each file below the folder that holds a piece of a secret, and the line."""
    lines = [(path.name, line) for path, held in files_in(folder) for line in held.splitlines()]
    return [f"{name}: {line[:300]!r}" for name, line in lines if CANARY.encode() in line]


def ask_the_hub(tmp: Path) -> str:
    """What another client of the same user learns: the records of all calls, and the queues."""
    (file,) = tmp.rglob("ipcontroller-client.json")
    client: Any = ipyparallel.Client(str(file), timeout=60)
    try:
        answers = [client.queue_status(verbose=True)]
        for ask in (client.hub_history, lambda: client.db_query({})):
            try:
                answers.append(ask())
            except Exception as error:  # there is no database to ask
                answers.append(error)
        return repr(answers)
    finally:
        client.close(linger=0)


def test_no_secret_stays_anywhere(tmp_path: Path) -> None:
    tmp, own = tmp_path / "tmp", tmp_path / "issuer"
    tmp.mkdir()
    own.mkdir()
    issuer = Issuer(own, lifetime_s=3, canary=CANARY)
    secrets = {
        **issuer.env,
        "HF_TOKEN": f"hf_{CANARY}/q+1&\"'x",
        "HTTPS_PROXY": f"http://ada:{CANARY}%21pass@proxy.invalid:3128",
        "IPP_CONNECTION_INFO": json.dumps({"key": CANARY}),
    }
    secrets_file = own / "secrets.json"
    secrets_file.write_text(json.dumps(secrets))
    cells: list[Cell] = []
    seen: list[tuple[str, bytes]] = []
    with Kernel(TMPDIR=str(tmp), SECRETS_FILE=str(secrets_file)) as kernel:
        ipython = Path(kernel.folder)
        pid = kernel.manager.provisioner.pid  # type: ignore[union-attr]

        def run(code: str) -> Cell:
            cell = kernel.run(code, timeout_s=120)
            cells.append(cell)
            seen.extend(family(pid))
            return cell

        assert run(SETUP).errors == []
        assert run("%gpupool env HF_TOKEN --aws").errors == []
        shown = run(SHOW.lstrip())
        assert shown.errors == []
        assert shown.text.count("[hidden]") > 20
        assert "ValueError: [hidden] '[hidden]' http://ada:[hidden]@" in run(FAIL).error_text
        trained = run(TRAIN)
        assert trained.errors == []
        assert "training with [hidden] [hidden]" in trained.text
        assert run("gpupool.train(torch.nn.Linear(4, 2), data, failing_loss, options)").errors
        run("%gpupool\n%gpupool env\nprint(*map(gpupool.current_pool().log, (0, 1)))")
        run("shown, [shown.text(rank) + shown.value_text(rank) for rank in (0, 1)], In, _ih, _i")
        until(lambda: issuer.num_issued > 3, 30, "that the keys were renewed")
        in_use = lines_with_canary(tmp)
        hub = ask_the_hub(tmp)
        assert len([*family(pid)]) >= 4, "starter, controller and engines are seen"
        assert run("%gpupool stop").errors == []
        kernel.run("get_ipython().history_manager.writeout_cache()")
        assert lines_with_canary(ipython) == []
    assert not [line for line, environ in seen if CANARY.encode() in line.encode() + environ]
    assert in_use == lines_with_canary(tmp) == []
    assert CANARY not in hub
    for cell in cells:
        assert CANARY not in json.dumps(cell.outputs)
