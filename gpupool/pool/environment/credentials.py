"""The notebook's own AWS credentials as environment variables. Runs on the client."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpupool.core.botocore_logs import quiet_botocore
from gpupool.core.wire.environ import AWS_KEY_NAMES

AWS_NAMES = (*AWS_KEY_NAMES, "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


class ChainError(Exception):
    """Why there are no credentials, as a part of a sentence."""


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    """What the chain gave: variables for the ranks; until when in seconds since 1970, if known.

    The variables are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for short-lived credentials
    AWS_SESSION_TOKEN and AWS_CREDENTIAL_EXPIRATION too (ISO 8601); region and endpoint where set.
    """

    variables: dict[str, str]
    expires_at: float | None

    @property
    def keys(self) -> dict[str, str]:
        """The variables that are new with every renewal."""
        return {name: self.variables[name] for name in AWS_KEY_NAMES if name in self.variables}

    def __repr__(self) -> str:  # a dataclass's own would show the keys in a traceback
        return f"AwsCredentials({', '.join(self.variables)})"


class AwsChain:
    """botocore's chain (environment, profile, SSO, role, process), resolved as often as needed.

    The botocore session is kept, and with it the profile: another AWS_PROFILE that the notebook
    sets later is for a new chain.
    """

    def __init__(self) -> None:
        from botocore.session import Session

        self._session = Session()

    def resolve(self) -> AwsCredentials:
        """The credentials of this moment. May ask AWS or run a program, and take seconds.

        Raises:
            ChainError: there are none, or they cannot be had.
        """
        with quiet_botocore():
            try:
                found = self._resolve()
            except Exception as error:  # profile missing, login ran out, program or network fails
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ChainError(reason[:300].rstrip(".")) from None
        if found is None:
            raise ChainError("none were found")
        return found

    def _resolve(self) -> AwsCredentials | None:
        from botocore.credentials import create_credential_resolver

        session = self._session
        # A new resolver has an empty cache: it gives new credentials though the last ones are
        # still good, and sees a login or a file that another program has renewed.
        credentials = create_credential_resolver(session).load_credentials()
        if credentials is None:
            return None
        frozen = credentials.get_frozen_credentials()
        if session.profile is not None and credentials.method != "env":
            session.set_config_variable("profile", session.profile)
        expires = getattr(credentials, "_expiry_time", None)  # botocore has no public name for it
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        found = {
            "AWS_ACCESS_KEY_ID": frozen.access_key,
            "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
            "AWS_SESSION_TOKEN": frozen.token,
            "AWS_CREDENTIAL_EXPIRATION": expires and expires.isoformat(),
            "AWS_DEFAULT_REGION": session.get_config_variable("region"),
            "AWS_ENDPOINT_URL": endpoint or session.get_scoped_config().get("endpoint_url"),
        }
        variables = {name: str(value) for name, value in found.items() if value}
        return AwsCredentials(variables, expires and expires.timestamp())
