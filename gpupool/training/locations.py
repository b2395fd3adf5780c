"""Folders in options mean what they mean in the notebook: ranks have another working directory.

Pure but for that directory; runs on the client.
"""

from __future__ import annotations

import os
from dataclasses import replace

from gpupool.core.training_options import TrainingOptions


def with_absolute_paths(options: TrainingOptions) -> TrainingOptions:
    """The options with relative paths made absolute; URLs stay."""
    resume, profile = options.resume, options.profile
    names_one = isinstance(resume, str) and resume != "auto"
    return replace(
        options,
        checkpoint=options.checkpoint and _absolute(options.checkpoint),
        tensorboard=options.tensorboard and _absolute(options.tensorboard),
        resume=_absolute(str(resume)) if names_one else resume,
        profile=profile and replace(profile, url=_absolute(profile.url)),
    )


def _absolute(url: str) -> str:
    if "://" in url or "::" in url:
        return url
    return os.path.abspath(os.path.expanduser(url))
