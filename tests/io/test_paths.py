"""What a user gives as a path: local paths, URLs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from stores import counted

from zeroelastic.errors import UnreadableError, UsageError
from zeroelastic.io.paths import absolute, as_path
from zeroelastic.io.remote import RemotePath
from zeroelastic.io.storage import file_sizes

pytestmark = pytest.mark.usefixtures("counted")
__all__ = ["counted"]


@pytest.mark.parametrize("text", ["a/b", "/a/b", "s3:/a", "~nobody-here/x", "a b://c", "1://x", Path("s3://a")])
def test_what_is_no_url_is_a_local_path(text):
    assert as_path(text) == Path(text)


@pytest.mark.parametrize("text", ["file:///a/b", "FILE:///a/b", "local:///a/b", "file://localhost/a/b"])
def test_a_url_of_a_local_file_is_a_local_path(text):
    assert as_path(text) == Path("/a/b") == Path(absolute(text))


def test_a_quoted_tilde_is_the_home_directory(tmp_path, monkeypatch):
    """Unless there is a directory of that name, which DeepSpeed alone makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for given in ("~/run", Path("~/run")):
        assert as_path(given) == Path("/home/me/run") == Path(absolute(given))
    (tmp_path / "~").mkdir()
    assert as_path("~/run") == Path("~/run") and absolute("~/run") == f"{tmp_path}/~/run"


@pytest.mark.parametrize("text", ["memory://a/b", "memory:///a/b/", "MEMORY://a/b", "memory://a/b//"])
def test_a_url_is_a_remote_path_with_its_parts(text):
    path = as_path(text)
    assert isinstance(path, RemotePath) and as_path(path) is path
    assert (str(path), path.name, str(path.parent), str(path / "c")) == (
        "memory://a/b",
        "b",
        "memory://a",
        "memory://a/b/c",
    )
    assert path == as_path("memory://a/b") and hash(path) == hash(as_path("memory://a/b"))
    assert path.parent / "b" == path


def test_a_url_keeps_its_host_and_shows_no_password():
    path = as_path("ftp://me:secret@host:21/run/global_step3")
    assert str(path / "latest") == "ftp://host/run/global_step3/latest"
    assert dict(path.parent.options)["host"] == "host" and dict(path.options)["password"] == "secret"
    assert "secret" not in repr(path) + str(path)


def test_a_url_that_is_its_own_name_stays_as_it_is():
    assert str(as_path("https://host/a") / "b") == "https://host/a/b"


def test_an_unknown_protocol_is_refused_by_name():
    with pytest.raises(UsageError, match="nosuch://: no file system of this name is known"):
        as_path("nosuch://bucket/run")
    with pytest.raises(UsageError, match="URLs chained with :: are not read"):
        as_path("simplecache::s3://bucket/run")


@pytest.mark.parametrize(("url", "extra"), [("s3://b/k", "s3"), ("gs://b/k", "gcs")])
def test_a_file_system_that_is_not_installed_says_what_to_install(url, extra, monkeypatch):
    def missing(protocol):
        raise ImportError("Please install it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(UnreadableError, match=rf"pip install 'zeroelastic\[{extra}\]'"):
        as_path(url)


def test_a_file_system_that_cannot_be_set_up_is_refused_with_the_reason(monkeypatch):
    def broken(protocol, **options):
        raise RuntimeError("no project\nis set.")

    monkeypatch.setattr(fsspec, "filesystem", broken)
    with pytest.raises(UnreadableError, match=r"memory://: its file system cannot be set up: no project is set\.$"):
        file_sizes(as_path("memory://a"))
