"""URIs, their secrets, and a path in a store that answers as a local one."""

import os
from pathlib import Path

import pytest

from hotbed.errors import ConfigError, RemoteError
from hotbed.files import RemotePath, hide, is_remote, path_of, shown_path
from hotbed.files.path import matches
from hotbed.files.uri import Uri, clean_uri, options_of, read_uri


class TestUri:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("s3://bucket/a/b.tsv", Uri("s3", "bucket", "a/b.tsv")),
            ("s3a://bucket/a//b/", Uri("s3", "bucket", "a/b")),
            ("s3:/bucket/a", Uri("s3", "bucket", "a")),  # what pathlib leaves of s3://
            ("gs://bucket", Uri("gs", "bucket", "")),
            (
                "abfs://container@account.dfs.core.windows.net/a",
                Uri("abfs", "container@account.dfs.core.windows.net", "a"),
            ),
            ("hdfs://name:8020/a/b", Uri("hdfs", "name:8020", "a/b")),
            ("hdfs:///a/b", Uri("hdfs", "default", "a/b")),
            ("s3://b/part-?.parquet", Uri("s3", "b", "part-?.parquet")),
        ],
    )
    def test_read(self, text, expected):
        assert read_uri(text) == expected

    @pytest.mark.parametrize(
        "text", ["a/b", "/a/b", "criteo-like:1000", "file:///a/b", "C:/data", "x:y", "train=a.csv"]
    )
    def test_local(self, text):
        assert read_uri(text) is None
        assert not is_remote(text)

    def test_file_uris_are_local(self):
        assert path_of("file:///a/b%20c") == Path("/a/b c")
        assert type(path_of("a/b")) is type(Path("a/b"))
        with pytest.raises(ConfigError, match="host 'other'"):
            path_of("file://other/a")

    def test_a_bucket_is_needed(self):
        with pytest.raises(ConfigError, match="names no bucket"):
            path_of("s3://")

    def test_secrets_stay_in_the_process(self):
        text = "s3://AKIAEXAMPLE:p%2Fass-word-1@vault/a?region=eu-west-1&session=tok-tok-tok"
        path = path_of(text)
        assert str(path) == shown_path(text) == clean_uri(text) == "s3://vault/a"
        found = options_of(path.uri)
        assert (found["user"], found["password"], found["region"]) == ("AKIAEXAMPLE", "p/ass-word-1", "eu-west-1")
        said = hide(f"no answer to {text}; AKIAEXAMPLE p/ass-word-1 tok-tok-tok in eu-west-1")
        assert not any(secret in said for secret in ("AKIAEXAMPLE", "ass-word-1", "tok-tok-tok"))
        assert "eu-west-1" in said

    def test_secrets_of_the_environment_are_hidden(self, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcd/efgh")
        assert hide("signed with abcd/efgh") == "signed with ***"
        assert hide("http://user:word@host/x") == "http://user:***@host/x"


def test_patterns():
    assert matches("day=1/a.parquet", "day=*/*.parquet")
    assert not matches("day=1/b/a.parquet", "day=*/*.parquet")
    assert matches("x/y/z.csv", "**/z.csv")
    assert matches("z.csv", "**/z.csv")
    assert not matches("z.csv2", "*.csv")


def test_it_is_a_path():
    path = path_of("s3://bucket/a/b.tar.gz")
    assert isinstance(path, RemotePath)
    assert (path.name, path.suffixes, str(path.parent), str(path / "c")) == (
        "b.tar.gz",
        [".tar", ".gz"],
        "s3://bucket/a",
        "s3://bucket/a/b.tar.gz/c",
    )
    assert path_of(Path("s3://bucket/a/b.tar.gz")) == path
    assert path.resolve() == path.absolute() == path
    assert path.with_name("c").relative_to(path.parent) == path_of("s3://bucket/c").relative_to(path_of("s3://bucket"))


def test_the_kernel_is_not_asked():
    with pytest.raises(RemoteError, match="s3://bucket/a is in an object store"):
        os.stat(path_of("s3://bucket/a"))


def test_unknown_schemes():
    with pytest.raises(ConfigError, match="xyz:// is unknown"):
        path_of("xyz://bucket/a").exists()


def test_fsspec_reads_other_schemes():
    path = path_of("memory://shelf/a/b.txt")
    path.write_text("hello")
    assert path.read_text() == "hello"
    assert [str(one) for one in path.parent.iterdir()] == ["memory://shelf/a/b.txt"]
    path.unlink()
    assert not path.exists()
