from pathlib import Path

import pytest

from tunewright.loadtest.machine import CpuTimes, cpu_times, stolen


def test_what_the_hypervisor_took_is_a_share_of_all_cpu_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 10 0 5 35 7 0\ncpu0 1 2 3\n")
    before = cpu_times(stat)
    assert before == CpuTimes(stolen=35, total=1000)  # guest time is part of user time
    assert stolen(before, CpuTimes(stolen=55, total=1200)) == pytest.approx(0.1)
    assert stolen(before, before) is None
    assert stolen(None, before) is None


@pytest.mark.parametrize("text", ["", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "cpu a b c d e f g h"])
def test_a_kernel_that_does_not_tell_is_no_fault(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    assert cpu_times(stat) is None
    stat.write_text(text)
    assert cpu_times(stat) is None
