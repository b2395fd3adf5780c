"""URLs with a slash too few, and passwords that would become the name of a local folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gpupool
from gpupool import OptionsError
from gpupool.core.urls import refuse_typo
from tests.support.raising import raises


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3:/bucket/x", "s3:/bucket/x"),
        ("s3:bucket/x", "s3:bucket/x"),
        ("https:/host/x", "https:/host/x"),
        ("s3:/me:secret@bucket/x", "***@bucket/x"),
        ("file://host/x", "file://host/x"),
        ("local://x", "local://x"),
        ("file://me:secret@/x/b", "***@/x/b"),
        ("me:secret@/x/b", "***@/x/b"),
        ("me:sec/secret@/x/b", "***@/x/b"),
    ],
)
def test_what_would_become_an_odd_local_folder_is_refused(url: str, shown: str) -> None:
    makers: tuple[Callable[[str], Any], ...] = (
        gpupool.ImageDatastore,
        gpupool.TarDatastore,
        refuse_typo,
    )
    for make in makers:
        with raises(OptionsError, shown) as caught:
            make(url)
        assert "secret" not in str(caught.value)
    with raises(OptionsError, "checkpoint", "checkpoint: ", shown) as caught:
        gpupool.TrainingOptions(checkpoint=url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://bucket/x", "/a/s3:/x", "./s3:/x", "s3/x", "runs", "a:b", "C:/runs", "file:///x"),
        *("zip::s3://bucket/x.zip", "memory://x", "./me:word@/x", "a@b/c", "a:/b@c"),
    ],
)
def test_what_may_be_meant_is_left_alone(url: str) -> None:
    refuse_typo(url)
