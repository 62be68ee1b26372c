"""Stores that keep a log of what they are asked and can be made to fail.

An S3 server on the loopback interface (moto's), and a file system in memory behind ``counted://`` URLs.

with serve_s3() as server:
    server.upload(tmp_path / "global_step3", "run/global_step3")
    open_checkpoint(server.url("run/global_step3"))
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from zeroelastic.io.paths import as_path
from zeroelastic.io.remote import RemotePath

BUCKET = "checkpoints"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_MAX_ATTEMPTS": "1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
"""The environment of a client, besides AWS_ENDPOINT_URL. It asks once: what is repeated is repeated by our own code."""


@dataclass(frozen=True)
class Request:
    """What was asked: method, path, the Range header or None, and the query string."""

    method: str
    path: str
    range: str | None
    query: str

    @property
    def nbytes(self) -> int:
        """Length of the range."""
        assert self.range is not None and self.range.startswith("bytes=")
        begin, end = self.range.removeprefix("bytes=").split("-")
        return int(end) - int(begin) + 1


Fault = Callable[[Request], str | None]
"""What goes wrong with a request: "cut" sends half of the answer, "stall" none, "503" an error; "slow" waits."""


@dataclass
class S3Server:
    """The server; ``requests`` is its log, ``fault`` what goes wrong."""

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    fault: Fault | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    http: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def upload(self, directory: Path, key: str) -> str:
        """Put the files of a directory, and of those in it, below a key; returns its URL. Leaves the log empty."""
        client = self.client()
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                name = f"{key}/{path.relative_to(directory)}"
                client.put_object(Bucket=BUCKET, Key=name, Body=path.read_bytes())
        self.requests.clear()
        return self.url(key)

    def reset_access(self, *, allow: bool) -> None:
        """Whether requests of unknown users are answered."""
        self._ask_moto("reset-auth", b"inf" if allow else b"0")

    def forget_objects(self) -> None:
        """Delete every bucket of this process."""
        self._ask_moto("reset")

    def _ask_moto(self, what: str, data: bytes = b"") -> None:
        import requests

        asked = requests.post(f"{self.endpoint}/moto-api/{what}", data=data, timeout=10)
        assert asked.ok
        self.requests.clear()

    @property
    def alive(self) -> bool:
        return self.http is not None

    def stop(self) -> None:
        """Take no more connections, and break those that there are."""
        http, self.http = self.http, None
        if http is not None:
            self.fault = lambda request: "cut"
            self.stalled.set()
            http.shutdown()
            http.server_close()

    def payload_requests(self) -> list[Request]:
        """Requests for the content of objects."""
        return [request for request in self.requests if request.method == "GET" and request.path.count("/") > 1]

    def __call__(self, app: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE"), environ.get("QUERY_STRING", "")
        )
        self.requests.append(request)
        fault = self.fault(request) if self.fault is not None else None
        if fault == "503":
            body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            start_response("503 Slow Down", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
            return [body]
        if fault == "stall":
            self.stalled.wait(60)
        if fault == "slow":
            self.stalled.wait(0.5)
        answer = app(environ, start_response)
        return self._half(answer) if fault == "cut" else answer

    @staticmethod
    def _half(answer: Iterable[bytes]) -> Iterator[bytes]:
        data = b"".join(answer)
        yield data[: len(data) // 2]
        raise ConnectionAbortedError("cut off on purpose")


_running: list[S3Server] = []


@contextlib.contextmanager
def serve_s3() -> Iterator[S3Server]:
    """A server with an empty bucket; the environment points its clients to it.

    moto keeps the objects of all servers of a process in one place, so the first of them empties it.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    app = DomainDispatcherApplication(create_backend_app)
    server = S3Server()
    http = make_server(
        "127.0.0.1", 0, lambda environ, start: server(app, environ, start), threaded=True, request_handler=Quiet
    )
    http.daemon_threads = True
    server.http, server.port = http, http.server_port
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
                patch.delenv(name)
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        forget_clients()
        if not _running:
            server.forget_objects()
        _running.append(server)
        server.client().create_bucket(Bucket=BUCKET)
        server.requests.clear()
        try:
            yield server
        finally:
            _running.remove(server)
        server.stop()
        thread.join(10)
        forget_clients()


def forget_clients() -> None:
    """Let the next look at an s3:// URL connect anew, with the environment as it then is."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


class CountedFileSystem(MemoryFileSystem):
    """fsspec's file system in memory; ``ranges`` are the (path, start, end) that were read, ``calls`` the others."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    ranges: ClassVar[list[tuple[str, int, int]]] = []
    calls: ClassVar[list[tuple[str, str]]] = []
    answer: ClassVar[Callable[[str, int, bytes], bytes] | None] = None
    _log = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        assert start is not None and end is not None, "a whole file was asked for"
        with self._log:
            self.ranges.append((path, start, end))
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return data if type(self).answer is None else type(self).answer(path, start, data)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.calls.append(("ls", path))
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self.calls.append(("info", path))
        return super().info(path, **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        assert mode == "wb", "a file was opened, not read by range"
        return super().open(path, mode=mode, **kwargs)


def put(url: str, data: bytes) -> RemotePath:
    """Make a file; its path."""
    path = as_path(url)
    assert isinstance(path, RemotePath)
    CountedFileSystem().pipe_file(path.path, data)
    forget()
    return path


def upload(directory: Path, url: str) -> str:
    """Copy the files of a directory; returns the URL."""
    for path in directory.iterdir():
        put(f"{url}/{path.name}", path.read_bytes())
    return url


def forget() -> None:
    """Empty the log."""
    CountedFileSystem.ranges.clear()
    CountedFileSystem.calls.clear()


@pytest.fixture
def counted() -> Iterator[type[CountedFileSystem]]:
    """The file system, empty."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    CountedFileSystem.store.clear()
    CountedFileSystem.pseudo_dirs[:] = [""]
    CountedFileSystem.answer = None
    forget()
    yield CountedFileSystem
    CountedFileSystem.answer = None
    CountedFileSystem.store.clear()
