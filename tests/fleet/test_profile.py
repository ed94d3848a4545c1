"""What a device finds out about itself, on this machine and in made-up file systems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nestling.errors import InputError
from nestling.fleet.node import profile

MEMINFO = (
    "MemTotal:        1000 kB\nMemFree:          100 kB\nMemAvailable:     800 "
    "kB\nHugePages_Total:       0\n"
)
KB = 1024


def machine(root: Path, cgroup: str = "", **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    if cgroup:
        (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    found = profile.measure(seconds=0.05)
    assert 2**24 < found.available <= found.ram < 2**50
    assert found.cores >= 1 and found.macs_per_second > 1e5


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert profile.memory(machine(tmp_path)) == profile.Memory(1000 * KB, 800 * KB)


def test_a_container_of_version_2_counts_less(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/box/inner\n",
        box__inner__memory_DOT_max="max\n",
        box__inner__memory_DOT_current=f"{50 * KB}\n",
        box__memory_DOT_max=f"{500 * KB}\n",
        box__memory_DOT_current=f"{300 * KB}\n",
        box__memory_DOT_stat=f"anon 1\ninactive_file {100 * KB}\n",
    )
    assert profile.memory(root) == profile.Memory(500 * KB, 300 * KB)


def test_a_container_of_version_1_counts_less(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "5:cpu,cpuacct:/\n4:memory:/job\n",
        memory__job__memory_DOT_limit_in_bytes=f"{400 * KB}\n",
        memory__job__memory_DOT_usage_in_bytes=f"{390 * KB}\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
        memory__memory_DOT_usage_in_bytes=f"{900 * KB}\n",
    )
    assert profile.memory(root) == profile.Memory(400 * KB, 10 * KB)


def test_a_group_that_uses_more_than_its_limit_has_nothing_free(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "0::/\n", memory_DOT_max=f"{10 * KB}\n", memory_DOT_current=f"{20 * KB}\n"
    )
    assert profile.memory(root).available == 0


def test_allowances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "memory", lambda: profile.Memory(1000, 800))
    assert profile.Allowance().available() == 800
    assert profile.Allowance.parse(" 25 %").available() == 200
    assert profile.Allowance.parse("300 MB").available() == 300 * 2**20
    assert profile.Allowance.parse("1.5GB").available() == 1536 * 2**20


@pytest.mark.parametrize(
    "text", ["0%", "101%", "x%", "-1 MB", "0 MB", "300", "lots", "", "nan%", "1 TB"]
)
def test_bad_allowances(text: str) -> None:
    with pytest.raises(InputError, match=r"--memory: .*300 MB"):
        profile.Allowance.parse(text)


def test_no_torch_is_needed() -> None:
    light = (
        "nestling.fleet.node.profile, nestling.fleet.server.proxy, nestling.fleet.care.processes"
    )
    code = f"import sys, {light}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
