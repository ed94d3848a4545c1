"""Known weaknesses of the packages in a folder, by pip-audit, and what its answer is worth.

    python .ci/weaknesses.py PIP_AUDIT FOLDER

pip-audit says "No known vulnerabilities found", exit code 0, also where a network answers "not
found" to every question, and fails alike for a weakness and a line that is dead. So its table is
read. Exit code 1: a weakness is known, or pip-audit itself failed. 0: none is known in what was
looked up, or the register cannot be reached from here, which is said.
"""

from __future__ import annotations

import json
import subprocess
import sys

UNREACHED = (
    "ConnectionError",
    "ProxyError",
    "SSLError",
    "Timeout",
    "Could not connect",
    "Tip: your",
)
"""Words of pip-audit, and of what it asks with, where there is no way to the register."""
NOT_REACHED = "the register of known weaknesses cannot be reached from here: nothing was looked up"


def judged(text: str, error: str, code: int) -> tuple[int, str]:
    """The exit code and the words for what pip-audit wrote and returned."""
    try:
        rows = json.loads(text)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (error.strip().splitlines() or [f"exit code {code}"])[-1]
        if any(word in error for word in UNREACHED):
            return 0, f"{NOT_REACHED} ({last[:200]})"
        return 1, f"pip-audit failed: {last[:200]}"
    looked_up = [row for row in rows if "vulns" in row]
    found = [(row, weakness) for row in looked_up for weakness in row["vulns"]]
    if found:
        lines = [
            f"{row['name']} {row['version']}: {one['id']}, "
            f"mended in {', '.join(one['fix_versions']) or 'no version yet'}"
            for row, one in found
        ]
        return 1, "\n".join(["known weaknesses:", *lines])
    if not looked_up:
        return 0, f"{NOT_REACHED} ({len(rows)} packages)"
    missing = [row["name"] for row in rows if "vulns" not in row]
    rest = f"; not in the register: {', '.join(missing)}" if missing else ""
    return 0, f"no known weakness in {len(looked_up)} packages{rest}"


def main(words: list[str]) -> int:
    """Asks, and says what came of it."""
    program, folder = words
    asked = [program, "--progress-spinner", "off", "--format", "json", "--path", folder]
    made = subprocess.run(asked, capture_output=True, text=True)
    code, said = judged(made.stdout, made.stderr, made.returncode)
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
