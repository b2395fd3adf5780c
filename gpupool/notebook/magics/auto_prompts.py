"""IPython's prompts on a terminal while `%gpupool auto` is on. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.terminal.prompts import Prompts, Token  # type: ignore[attr-defined]


class AutoPrompts(Prompts):
    """The user's prompts with the number of ranks in front."""

    def __init__(self, shell: Any, users: Prompts, label: Callable[[], str]) -> None:
        super().__init__(shell)
        self.users = users
        self._label = label

    def in_prompt_tokens(self) -> Any:
        return [(Token.Prompt, f"[{self._label()}] "), *self.users.in_prompt_tokens()]

    def continuation_prompt_tokens(self, *args: Any, **options: Any) -> Any:
        space = " " * len(f"[{self._label()}] ")
        users = self.users.continuation_prompt_tokens(*args, **options)
        return [(Token.Prompt, space), *users]

    def out_prompt_tokens(self) -> Any:
        return self.users.out_prompt_tokens()
