"""Ranks that are spawned: a program that is not made for it is told how, and Ctrl-C is its own alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploy.offline.spawning import interrupts_kept_from_children

ROOT = Path(__file__).parents[2]
LLM = (
    f"LLM({str(ROOT / 'deploy/bench/shapes/tiny')!r}, load_format='dummy', dtype='float32', cpu_threads=1, "
    "skip_tokenizer_init=True, max_model_len=128, tensor_parallel_size=2)"
)


def start(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    """Run a program in a session of its own, as in a terminal of its own."""
    program = tmp_path / "program.py"
    program.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def test_a_program_that_makes_its_llm_while_it_is_imported_is_told_so_once(tmp_path: Path) -> None:
    program = start(tmp_path, f"from shoal import LLM\nllm = {LLM}\n")

    _, told = program.communicate(timeout=120)

    assert program.returncode == 1
    assert told.count("Traceback") == 1
    assert told.splitlines()[-1].endswith('put what the program does under `if __name__ == "__main__":`')


def test_a_process_of_the_programs_own_is_told_the_same(tmp_path: Path) -> None:
    program = start(
        tmp_path,
        "import multiprocessing\nfrom shoal import LLM\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    process.start()\n    process.join()\n    raise SystemExit(process.exitcode)\n"
        f"{LLM}\n",
    )

    _, told = program.communicate(timeout=120)

    assert program.returncode == 1
    assert 'under `if __name__ == "__main__":`' in told.splitlines()[-1]


def test_an_interrupt_while_ranks_are_imported_is_told_by_their_parent_alone(tmp_path: Path) -> None:
    program = start(
        tmp_path,
        "import os, time\nfrom pathlib import Path\nfrom shoal import LLM\n"
        f"if __name__ == '__main__':\n    {LLM}\n"
        "else:\n    Path(f'rank-{os.getpid()}').touch()\n    time.sleep(100)\n",
    )
    deadline_s = time.monotonic() + 60
    while len(list(tmp_path.glob("rank-*"))) < 2:
        assert program.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)

    os.killpg(program.pid, signal.SIGINT)

    _, told = program.communicate(timeout=60)
    assert told.count("Traceback") == 1
    assert told.splitlines()[-1] == "KeyboardInterrupt"


def test_an_interrupt_while_a_rank_is_started_is_not_lost() -> None:
    reached = []

    def start_one() -> None:
        with interrupts_kept_from_children():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            reached.append("its start")

    with pytest.raises(KeyboardInterrupt):
        start_one()

    assert reached == ["its start"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
