"""URLs with a slash too few, and protocols that are one letter from another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import gpupool
from gpupool import OptionsError
from gpupool.core.urls import PROTOCOLS, refuse_typo
from tests.support.raising import raises


def test_all_protocols_of_fsspec_are_known() -> None:
    assert set(fsspec.available_protocols()) <= PROTOCOLS


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x?"),
        ("s3:bucket/x", "s3://bucket/x?"),
        ("gs:/bucket", "gs://bucket?"),
        ("https:/host/x", "https://host/x?"),
        ("s4://bucket/x", "s3://bucket/x?"),
        ("S3://bucket/x", "s3://bucket/x?"),
        ("htp://host/x", "http://host/x?"),
        ("s3:/me:secret@bucket/x", "s3://***@bucket/x?"),
    ],
)
def test_a_typing_error_is_answered_with_what_was_meant(url: str, meant: str) -> None:
    makers: tuple[Callable[[str], Any], ...] = (
        gpupool.ImageDatastore,
        gpupool.TarDatastore,
        refuse_typo,
    )
    for make in makers:
        with raises(OptionsError, "form", shown=meant) as caught:
            make(url)
        assert "secret" not in str(caught.value)
    with raises(OptionsError, "form", "checkpoint", shown=("checkpoint: ", meant)):
        gpupool.TrainingOptions(checkpoint=url)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://bucket/x", "/a/s3:/x", "./s3:/x", "s3/x", "runs", "a:b", "C:/runs", "file:///x"),
        *("zip::s3://bucket/x.zip", "memory://x", "simplecache::s4://x", "nothing-like-it://x"),
    ],
)
def test_what_may_be_meant_is_left_alone(url: str) -> None:
    refuse_typo(url)


def test_a_protocol_that_a_package_has_registered_is_one() -> None:
    fsspec.register_implementation("s5", MemoryFileSystem)
    try:
        refuse_typo("s5://bucket")
    finally:
        del sys.modules["fsspec.registry"]._registry["s5"]
