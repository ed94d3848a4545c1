"""Fuzzing for as long as one likes: the formats and the seeds of `tests/fuzz`, further on.

    python benchmarks/fuzz.py --messages 1000000 --files 100000

Every format of a kind gets an equal share; the reports of a run folder, each of which writes a
page, a tenth of it. The same seed always makes the same input; a run takes those of every format
from --first on. One that was stopped after its line 7/20 is gone on with by --skip 7. Exit code 1
where anything was found.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz import formats
from tests.fuzz.trying import Tally, tally

SLICES = 20  # of the whole; a line of progress each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="inputs that travel")
    parser.add_argument("--files", type=int, default=100_000, help="inputs from a disk")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--skip", type=int, default=0, help="slices that are done already")
    told = parser.parse_args()
    warnings.simplefilter("ignore")  # numpy's, about numbers that are nonsense
    groups = [
        (formats.messages(), told.messages),
        (formats.files(), told.files),
        (formats.reports(), told.files // 10),
    ]
    shares = {
        name: (format, count // len(group))
        for group, count in groups
        for name, format in group.items()
    }
    total = {name: Tally() for name in shares}
    start = time.monotonic()
    for number in range(told.skip, SLICES):
        for name, (format, count) in shares.items():
            first, last = (told.first + count * k // SLICES for k in (number, number + 1))
            total[name].add(tally(name, format, range(first, last)))
        done = sum(t.read + t.refused + len(t.faults) for t in total.values())
        faults = sum(len(t.faults) for t in total.values())
        seconds = time.monotonic() - start
        print(f"{number + 1}/{SLICES}: {done} inputs, {faults} faults, {seconds:.0f} s", flush=True)
    for name, found in total.items():
        last = told.first + shares[name][1]
        print(f"{name}: seeds {told.first}..{last}, {found.read} read, {found.refused} refused")
        for seed, what in found.faults:
            print(f"    seed {seed}: {what}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
