"""PEFT's tests from its source distribution, and the copy of them that runs for a method."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
from pathlib import Path

REPLACED = "LoraConfig"

_INI = """\
[pytest]
markers =
    single_gpu_tests
    multi_gpu_tests
    regression
    bitsandbytes
timeout = 300
"""
"""PEFT's own settings want pytest-cov and turn warnings of transformers into errors, which stop stock LoRA as well."""


def find_sdist(version: str, cache: Path) -> Path:
    """PEFT's source distribution, downloaded with pip unless it is in the cache.

    Args:
        version: of PEFT, which is to be the installed one.
        cache: folder for downloads.

    Raises:
        FileNotFoundError: pip could not get it.
    """
    path = cache / f"peft-{version}.tar.gz"
    if path.is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "peft"]
    done = subprocess.run([*pip, "--dest", str(cache), f"peft=={version}"], capture_output=True, text=True)
    if not path.is_file():
        raise FileNotFoundError(
            f"got no {path.name} from pip ({done.stderr.strip()[-300:]}), expected PEFT's source distribution. "
            "Fix: get it elsewhere and pass --sdist."
        )
    return path


def copy_tests(sdist: Path, folder: Path, replacement: str | None) -> Path:
    """Write PEFT's tests into a package `tests` of their own, with LoraConfig replaced.

    Args:
        sdist: PEFT's source distribution.
        folder: where `tests` goes; files of an earlier copy are replaced.
        replacement: name of the class of hf_memeff that the tests take for LoraConfig; None leaves the tests as they
            are.

    Returns:
        The folder `tests`.

    Raises:
        ValueError: the file holds no tests.
    """
    tests = folder / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    count = 0
    with tarfile.open(sdist) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if len(parts) != 3 or parts[1] != "tests" or not member.isfile() or not member.name.endswith(".py"):
                continue
            text = archive.extractfile(member).read().decode("utf-8")
            (tests / parts[2]).write_text(substitute(text, replacement), encoding="utf-8")
            count += 1
    if not count:
        raise ValueError(f"got {sdist} without tests, expected PEFT's source distribution. Fix: pass another --sdist.")
    (tests / "__init__.py").touch()  # the source distribution leaves it out, and the tests import each other
    (folder / "pytest.ini").write_text(_INI, encoding="utf-8")
    return tests


def files_about_lora(tests: Path) -> list[str]:
    """Names of the test files that use LoraConfig themselves or through PEFT's common tests."""
    return [
        path.name
        for path in sorted(tests.glob("test_*.py"))
        if re.search(rf"\b{REPLACED}\b|testing_common", path.read_text(encoding="utf-8"))
    ]


def substitute(text: str, replacement: str | None) -> str:
    """Have a test file take another class for LoraConfig.

    Behind every import of the name LoraConfig, on its last line, comes an import of the replacement under that name.
    All that the file does with the name follows, comparisons of classes included. Strings that are the name of LoRA's
    type or model, which PEFT's status reports, become those of the replacement's. Line numbers stay.

    Args:
        text: Python source.
        replacement: name of the class of hf_memeff; None changes nothing.

    Raises:
        ValueError: LoraConfig is imported under another name.
    """
    if replacement is None:
        return text
    method = replacement.removesuffix("Config")
    names = {"LORA": method.upper(), "LoraModel": f"{method}Model"}
    lines = text.encode().split(b"\n")  # ast counts columns in bytes
    edits: list[tuple[int, int, int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == REPLACED for alias in node.names):
            if any(alias.name == REPLACED and alias.asname for alias in node.names):
                raise ValueError(
                    f"line {node.lineno} imports {REPLACED} under another name, expected its own. "
                    "Fix: have substitute follow that name."
                )
            end = node.end_col_offset
            edits.append((node.end_lineno, end, end, f"; from hf_memeff import {replacement} as {REPLACED}"))
        elif isinstance(node, ast.Constant) and node.value in names and node.lineno == node.end_lineno:
            edits.append((node.lineno, node.col_offset, node.end_col_offset, repr(names[node.value])))
    for line, start, end, new in sorted(edits, reverse=True):
        before = lines[line - 1]
        lines[line - 1] = before[:start] + new.encode() + before[end:]
    return b"\n".join(lines).decode()
