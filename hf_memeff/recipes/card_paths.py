"""Places on this machine, recognised in what is about to be published."""

from __future__ import annotations

import os
import re

_WHOLE = re.compile(r"/(?![/\s]).*|~[\w.-]*[/\\].*|[A-Za-z]:[\\/].*|\\\\\w.*|file:.*|\.{1,2}[\\/].*|.*[\\/]\.\.[\\/].*")
"""POSIX, home, Windows drive, network share, file URL, relative by dots, climbing out."""

_WITHIN = re.compile(
    r"""(?<![\w/\\.:<|~)\]}-])                   # not a later part of a URL, a word or a tag
    (?: /(?:[\w.+@-]+/)+[\w.+@-]*                # /one/two
      | ~[\w.-]*/[\w.+@/-]+                      # ~/one or ~user/one
      | [A-Za-z]:[\\/]+[\w.+@-]+[\\/][^\s"'`]*   # C:\one\two or C:/one/two
      | file:/[^\s"'`]*                          # file:///one
    )""",
    re.VERBOSE,
)
"""Two parts are asked for, so that neither "and / or" nor a chat template's "[/INST]" is a path."""


def is_local_path(value: str) -> bool:
    """Whether the value of a config's field names a place on this machine.

    A value without a mark of a path, such as "outputs/model", does if there is such a file or folder here.

    Args:
        value: the whole value; one of several lines, such as a chat template, is searched by `local_paths`.
    """
    if "\n" in value:
        return bool(local_paths(value))
    return _WHOLE.fullmatch(value) is not None or (("/" in value or "\\" in value) and os.path.exists(value))


def local_paths(text: str) -> list[str]:
    """Absolute paths, paths from a home folder and file URLs in running text, in order; web addresses are none."""
    return [match.group() for match in _WITHIN.finditer(text)]
