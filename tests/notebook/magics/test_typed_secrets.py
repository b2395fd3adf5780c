"""A secret typed into a cell is refused, and not repeated."""

from __future__ import annotations

import pytest

from gpupool.core.errors import OptionsError
from gpupool.notebook.magics.typed_secrets import refuse_typed_value
from tests.support.raising import raises

TYPED = "hf_typed81q7wLm0"


@pytest.mark.parametrize(
    "line",
    [
        f"HF_TOKEN={TYPED}",
        f"AWS_* HF_TOKEN='{TYPED} and more'",
        f'"HF_TOKEN={TYPED}',
        f"-n 2 --env HF_TOKEN={TYPED}",
    ],
)
def test_a_typed_value_is_refused(line: str) -> None:
    with raises(OptionsError, "HF_TOKEN") as caught:
        refuse_typed_value(line)
    assert TYPED not in str(caught.value)


def test_options_with_values_are_no_typed_secrets() -> None:
    refuse_typed_value("--backend=wrong --timeout=30")
