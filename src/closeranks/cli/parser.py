"""argparse for the verbs: the same, but a wrong command line is a UsageError with a suggestion."""

from __future__ import annotations

import argparse
from typing import NoReturn

from closeranks.errors import UsageError

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose ``error`` raises UsageError instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches

        hint = f"see {self.prog} --help"
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            word = message.removeprefix(prefix).split()[0].partition("=")[0][:80]
            known = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(word, known, n=1)
            message = f"there is no argument {word}"
            hint = f"did you mean {near[0]}?" if near else hint
        raise UsageError(f"{message[:400]}; {hint}")
