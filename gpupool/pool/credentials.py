"""The notebook's own AWS credentials as environment variables. Runs on the client."""

from __future__ import annotations

import os
from typing import Any

from gpupool.core.errors import CredentialsError

AWS_NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CREDENTIAL_EXPIRATION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
_HOW_TO = (
    "Log in (`aws sso login`), name a profile (AWS_PROFILE), or set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY."
)


def aws_variables() -> dict[str, str]:
    """What botocore's credential chain finds here: environment, profile, SSO, role or process.

    Returns:
        AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for short-lived credentials AWS_SESSION_TOKEN
        and AWS_CREDENTIAL_EXPIRATION too (ISO 8601); the region and endpoint where they are set.

    Raises:
        CredentialsError: there are none, or they cannot be had.
    """
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    session = Session()
    try:
        credentials = session.get_credentials()
        frozen = credentials.get_frozen_credentials() if credentials else None
        region = session.get_config_variable("region")
        config = session.get_scoped_config()
    except BotoCoreError as error:  # a profile that is not there, an SSO login that ran out
        raise CredentialsError(f"AWS credentials: {error}. {_HOW_TO}") from None
    if frozen is None:
        raise CredentialsError(f"AWS credentials: none were found. {_HOW_TO}")
    found = {
        "AWS_ACCESS_KEY_ID": frozen.access_key,
        "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
        "AWS_SESSION_TOKEN": frozen.token,
        "AWS_CREDENTIAL_EXPIRATION": _expiry(credentials),
        "AWS_DEFAULT_REGION": region,
        "AWS_ENDPOINT_URL": os.environ.get("AWS_ENDPOINT_URL") or config.get("endpoint_url"),
    }
    return {name: str(value) for name, value in found.items() if value}


def _expiry(credentials: Any) -> str | None:
    """When refreshable credentials run out; botocore keeps it under a private name only."""
    expiry = getattr(credentials, "_expiry_time", None)
    return expiry.isoformat() if expiry is not None else None
