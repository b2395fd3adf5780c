"""What goes wrong between an S3 server and us, by its real cause: tried again, counted, told."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpupool.core.errors import CredentialsError, DataError
from gpupool.data.stores.faults import without_secrets
from gpupool.data.stores.folder import FileRef, Folder
from gpupool.data.stores.retry import counts
from gpupool.data.stores.writable import Target
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import Fault, SlowS3
from tests.support.raising import raises

CONTENT = {f"{number}.bin": bytes([number]) * 50_000 for number in range(40)}


@pytest.fixture(scope="module")
def slow(s3: SeaweedServer) -> Iterator[SlowS3]:
    s3.make_bucket("faults")
    s3.put_objects("faults", {f"in/{name}": data for name, data in CONTENT.items()})
    with SlowS3(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def folder(s3: SeaweedServer, slow: SlowS3) -> Iterator[Folder]:
    os.environ.update(s3.env, AWS_ENDPOINT_URL=slow.endpoint)
    yield Folder("s3://faults/in")
    slow.inject()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("503", share=0.3), "503 SlowDown"),
        (Fault("reset", share=0.3), "connection"),
        (Fault("cut", share=0.3), ("cut short", "connection broken")),
        (Fault("stall", times=2), "no answer"),
        (Fault("silence", times=2), "no answer"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_passing_fault_is_tried_again_and_counted(
    folder: Folder, slow: SlowS3, fault: Fault, reason: str
) -> None:
    never_ends = fault.kind in ("stall", "silence")
    if never_ends:  # not a byte for a second is too long
        folder = Folder(folder.url, {"config_kwargs": {"read_timeout": 1}})
    slow.inject(fault)
    slow.stats()
    before = counts.snapshot()
    with ThreadPoolExecutor(64) as pool:
        contents = list(pool.map(lambda path: folder.read(FileRef(path)), CONTENT))
    slow.inject()
    seen, found = counts.snapshot() - before, slow.stats()
    assert contents == list(CONTENT.values())
    assert found[fault.kind] > 0
    assert seen.reads == 40
    assert seen.last_reason.startswith(reason)
    # nobody else tries again behind our back; but aiohttp asks once more where a connection had
    # served before, and a busy machine may take a second for an answer, too
    low = found[fault.kind] / 2 if fault.kind == "reset" else found[fault.kind]
    assert low <= seen.retries
    assert never_ends or seen.retries <= found[fault.kind]


def test_a_fault_that_stays_is_one_sentence(folder: Folder, slow: SlowS3) -> None:
    os.environ["AWS_MAX_ATTEMPTS"] = "3"
    slow.inject(Fault("503"))
    name = "s3://faults/in/7.bin"
    with raises(DataError, " 3 times ", " 503 SlowDown", kind="busy", url=name):
        folder.read(FileRef("7.bin", 50_000))
    with raises(DataError, "s3://faults/in", "3 times", kind="busy"):
        folder.list_files()
    slow.inject(Fault("500", method="PUT"))
    with raises(DataError, "faults/out/a", "3 times", "500 InternalE", kind="busy"):
        Target("s3://faults/out").put("a", b"1")


def test_a_listing_survives_too(folder: Folder, slow: SlowS3) -> None:
    slow.inject(Fault("503", match="list-type", times=1), Fault("cut", match="list-type", times=1))
    before = counts.snapshot()
    assert len(folder.list_files()) == 40
    assert (counts.snapshot() - before).retries == 2


LIST = """
import sys
from gpupool.data.stores.folder import Folder
folder = Folder("s3://faults/in", {"config_kwargs": {"read_timeout": 60}})
try:
    folder.list_files()
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


def test_an_interrupted_listing_does_not_keep_the_process(folder: Folder, slow: SlowS3) -> None:
    slow.inject(Fault("silence"))
    slow.stats()
    process = subprocess.Popen([sys.executable, "-c", LIST], stderr=subprocess.PIPE, text=True)
    while not slow.stats().get("silence"):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)  # half of what the store is waited for
    assert (said, process.returncode) == ("interrupted\n", 1)


def test_a_refused_key_is_renewed_once_and_then_told(folder: Folder, slow: SlowS3) -> None:
    slow.inject(Fault("expired", times=1))
    slow.stats()
    assert folder.read(FileRef("3.bin", 0)) == CONTENT["3.bin"]
    assert slow.stats()["requests"] == 2
    os.environ["AWS_MAX_ATTEMPTS"] = "1"
    slow.inject(Fault("expired"))
    with raises(CredentialsError, "faults/in", "ExpiredToken", kind="expired"):
        folder.read(FileRef("3.bin", 0))
    assert slow.stats()["requests"] == 3  # by obstore, by s3fs, with the new keys
    slow.inject(Fault("denied", match="/3.bin"))
    with raises(CredentialsError, "/3.bin", "AccessDenied", kind="denied"):
        folder.read(FileRef("3.bin", 0))


@pytest.mark.long
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_an_address_that_never_answered_is_told_soon(folder: Folder, url: str) -> None:
    os.environ["AWS_ENDPOINT_URL"] = url
    began = time.monotonic()
    with raises(DataError, url, kind="unreachable", url="s3://elsewhere/in"):
        Folder("s3://elsewhere/in").list_files()
    assert time.monotonic() - began < 30  # a quarter of what one that had answered is waited for


def test_a_key_of_bytes_is_hidden_as_it_is_shown() -> None:
    key = b"\xff\x00canary-16" * 4
    options = {"s3_additional_kwargs": {"SSECustomerKey": key, "SSECustomerAlgorithm": "AES256"}}
    in_base64 = base64.b64encode(key).decode()
    for shown in (repr(key), in_base64, str(options)):
        text = without_secrets(f"refused: {shown}", options)
        assert "[hidden]" in text
        assert "canary" not in text
        assert in_base64[2:-4] not in text
    assert "AES256" in without_secrets(str(options), options)
