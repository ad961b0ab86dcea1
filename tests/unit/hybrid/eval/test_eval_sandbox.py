"""Code of a model runs in a process that is ended, whatever it does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hybrid.eval.sandbox import Limits, run_tests

posix = pytest.mark.skipif(os.name != "posix", reason="limits and groups of POSIX")


def test_passes_only_if_the_tests_ran_to_their_end() -> None:
    assert run_tests("x = 1", "assert x == 1") is None
    assert run_tests("x = 1", "assert x == 2") == "tests: AssertionError: assert x == 2"
    assert run_tests("x = 1", "assert x == 2, 'two'") == "tests: AssertionError: two"
    assert run_tests("x = 1 +", "") == "answer: SyntaxError: invalid syntax (<answer>, line 1)"
    assert run_tests("", "y") == "tests: NameError: name 'y' is not defined"
    # An answer that ends the process has passed nothing.
    assert run_tests("import sys; sys.exit()", "assert False").startswith("answer: SystemExit")
    assert "before its tests did" in run_tests("import os; os._exit(0)", "assert False")
    assert run_tests("if __name__ == '__main__': raise SystemExit", "") is None


def test_has_no_environment_no_input_and_a_folder_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("HYBRID_SECRET", "1")
    tests = f"""
import os, sys
assert set(os.environ) <= {{"PATH", "SYSTEMROOT", "LC_CTYPE"}}, os.environ  # Python sets the last
assert os.listdir() == []
assert os.getcwd() != {str(Path.cwd())!r}
assert sys.stdin.read() == ""
assert "torch" not in sys.modules
open("file", "w").write("x")
"""
    assert run_tests("", tests) is None
    assert run_tests("", tests) is None  # what a run writes is gone


def test_output_is_thrown_away() -> None:
    flood = "import os\nfor _ in range(300): print('x' * 10**6); os.write(1, b'y' * 10**6)"
    assert run_tests(flood, "") is None
    assert len(run_tests("raise ValueError('é' * 10**6)", "")) < 400


def test_a_loop_without_end_is_ended() -> None:
    started = time.perf_counter()
    assert run_tests("while True: pass", "", Limits(timeout_s=0.5)) == "took more than 0.5 s"
    assert run_tests("try:\n  while True: pass\nexcept: pass\nwhile True: pass", "", Limits(0.5))
    assert time.perf_counter() - started < 10


@posix
def test_processes_that_are_left_behind_are_ended(tmp_path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    code = f"import subprocess\nsubprocess.Popen([{sys.executable!r}, '-c', {child!r}])"
    assert run_tests(code, "") is None
    assert run_tests(code + "\nwhile True: pass", "", Limits(timeout_s=0.5)) is not None
    time.sleep(2.5)
    assert not mark.exists()


@posix
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no limit of the address space")
def test_memory_and_files_are_bounded() -> None:
    hog = "x = bytearray(600 * 2**20)"
    assert run_tests(hog, "").startswith("answer: MemoryError")
    assert run_tests(hog, "", Limits(memory_mib=2000)) is None
    big = "open('big', 'wb').write(bytes(2 * 2**20))"
    assert run_tests(big, "").startswith("answer: OSError")
    assert run_tests(big, "", Limits(file_mib=4)) is None
