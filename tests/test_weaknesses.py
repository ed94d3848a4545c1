"""What the look for known weaknesses makes of what pip-audit says. The texts are its own, of real
calls; the one with a weakness is written after its form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "weaknesses.py"
SKIPPED = {
    "name": "attrs",
    "skip_reason": "Dependency not found on PyPI and could not be audited: attrs (26.1.0)",
}
OURS = {
    "name": "nestling",
    "skip_reason": "Dependency not found on PyPI and could not be audited: nestling (0.1.0)",
}
GOOD = {"name": "rich", "version": "15.0.0", "vulns": []}
BAD = {
    "name": "flask",
    "version": "0.5",
    "vulns": [
        {"id": "PYSEC-2019-179", "fix_versions": ["1.0"], "aliases": [], "description": "x"},
        {"id": "PYSEC-2018-66", "fix_versions": [], "aliases": [], "description": "y"},
    ],
}
DEAD = (
    "requests.exceptions.ProxyError: HTTPSConnectionPool(host='pypi.org', port=443): Max retries "
    "exceeded with url: /pypi/arrow/1.4.0/json (Caused by ProxyError('Unable to connect to proxy'))"
)
SILENT = (
    "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed\n"
    "ERROR:pip_audit._cli:Tip: your network may be blocking this service. "
    "Try another service with `-s SERVICE`"
)
USAGE = "pip-audit: error: argument -f/--format: expected one argument"


def table(*rows: dict[str, Any]) -> str:
    return json.dumps({"dependencies": rows, "fixes": []})


@pytest.mark.parametrize(
    ("text", "error", "code", "wanted", "words"),
    [
        (table(GOOD, OURS), "No known vulnerabilities found", 0, 0, "no known weakness in 1 pack"),
        (table(GOOD, OURS), "", 0, 0, "not in the register: nestling"),
        (table(GOOD, BAD), "Found 2 known", 1, 1, "flask 0.5: PYSEC-2019-179, mended in 1.0"),
        (table(BAD, SKIPPED), "Found 2 known", 1, 1, "PYSEC-2018-66, mended in no version yet"),
        # of nothing it says the same as of packages without a weakness
        (table(SKIPPED, OURS), "No known vulnerabilities found", 0, 0, "cannot be reached"),
        ("", DEAD, 1, 0, "cannot be reached"),
        ("", SILENT, 1, 0, "cannot be reached"),
        ("", USAGE, 2, 1, "pip-audit failed: pip-audit: error"),
        ("", "", 139, 1, "pip-audit failed: exit code 139"),
    ],
)
def test_what_is_made_of_an_answer(
    text: str, error: str, code: int, wanted: int, words: str, tmp_path: Path
) -> None:
    """By the script as `make sbom` calls it, with a program in the place of pip-audit."""
    program = tmp_path / "pip-audit"
    said = f"sys.stdout.write({text!r}); sys.stderr.write({error!r}); sys.exit({code})"
    program.write_text(f"#!{sys.executable}\nimport sys\n{said}\n")
    program.chmod(0o755)
    made = subprocess.run(
        [sys.executable, str(SCRIPT), str(program), "folder"], capture_output=True, text=True
    )
    assert made.returncode == wanted and words in made.stdout and not made.stderr
