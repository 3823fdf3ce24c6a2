"""Regular expressions from other people's files, matched in a process with limits.

A pattern of a few characters can backtrack for years, and Python's `re` cannot be interrupted. So
compiling and matching run in a child process with limits on CPU time and memory. It takes 20 ms.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence

from jetrl.errors import UserError
from jetrl.files import printable, shown_value

LIMIT_S = 2  # CPU seconds for all patterns of a call
_MOST_BYTES = 2**29
_MOST_CHARACTERS = 10_000

_PROGRAM = """\
import json, re, resource, sys
seconds, size = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_AS, (size, size))
how, patterns, names = json.load(sys.stdin)
found = set()
for pattern in patterns:
    try:
        match = getattr(re.compile(pattern), how)
        found.update(name for name in names if match(name))
    except Exception as error:
        sys.exit(print(json.dumps([pattern, str(error) or type(error).__name__])))
print(json.dumps([None, list(found)]))
"""


def matching(
    patterns: Sequence[str], names: Sequence[str], key: str, whole: bool = True
) -> set[str]:
    """Return the names that one of some regular expressions matches.

    Args:
        whole: Match a name from its first to its last character, not only its beginning.

    Raises:
        UserError: A pattern does not compile, or takes too much time or memory.
    """
    if not patterns:
        return set()
    wrong, found = _found(tuple(patterns), tuple(names), "fullmatch" if whole else "match")
    if wrong is not None:
        raise UserError(f"{key}: {shown_value(wrong)} is not a usable regular expression: {found}")
    return set(found)


@functools.lru_cache(maxsize=256)
def _found(
    patterns: tuple[str, ...], names: tuple[str, ...], how: str
) -> tuple[str | None, tuple[str, ...] | str]:
    """Return the wrong pattern, or None, and the matching names, or what is wrong."""
    if sum(map(len, patterns)) > _MOST_CHARACTERS:
        return patterns[0], f"with others it has more than {_MOST_CHARACTERS} characters"
    child = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(LIMIT_S), str(_MOST_BYTES)],
        input=json.dumps([how, patterns, names]).encode(),
        capture_output=True,
        check=False,
    )
    if child.returncode:
        return patterns[0], f"it takes more than {LIMIT_S} s of CPU time, or too much memory"
    wrong, found = json.loads(child.stdout)
    return wrong, tuple(found) if wrong is None else printable(found)
