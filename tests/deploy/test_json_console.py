"""With ``--log-format json`` a console is one JSON object a line, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.json_console import LogFile, as_object

WRITES = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from deploy.console import console, print_error
from deploy.json_console import JsonConsole
JsonConsole().follow(Path(sys.argv[1]))
console.print("a line that is " + "long " * 60)
warnings.warn("from a library")
os.write(2, b"from C\\n")
subprocess.run(["sh", "-c", "echo from a child >&2"])
print_error("it failed")
raise RuntimeError("nobody caught it")
"""


def test_whatever_is_written_is_an_object_a_line(tmp_path: Path) -> None:
    (tmp_path / "replica_a.log").write_text('{"message": "from a log", "level": "INFO"}\nno object\n')

    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )

    lines = [json.loads(line) for line in done.stderr.splitlines()]
    found = {line["message"]: line["level"] for line in lines}
    assert done.returncode == 1
    assert ("a line that is " + "long " * 60).strip() in found
    assert found["it failed"] == "ERROR"
    assert {"from C", "from a child", "from a log", "no object", "RuntimeError: nobody caught it"} <= set(
        found
    )


@pytest.mark.parametrize("line", ["12", '"word"', "[1]", "null", "{broken", "text"])
def test_what_is_json_but_no_object_is_wrapped(line: str) -> None:
    assert json.loads(as_object(line))["message"] == line


def test_what_serve_writes_in_its_own_keys_gets_ours() -> None:
    """As Ray 2.60 does before a constructor of ours has run."""
    theirs = {
        "asctime": "2026-11-30 10:00:00,123", "levelname": "WARNING", "message": "it is late", "filename": "replica.py",
        "lineno": 1, "process": 77, "deployment": "model-a_replica", "timestamp_ns": 1_796_000_000_500_000_000,
    }  # fmt: skip

    assert json.loads(as_object(json.dumps(theirs))) == {
        "time": "2026-11-30T00:53:20.500+00:00",
        "level": "WARNING",
        "process": "model-a_replica-77",
        "logger": "ray.serve",
        "message": "it is late",
    }


def test_an_object_stays_as_it_is_and_nothing_stays_nothing() -> None:
    assert as_object('{"a":1}') == '{"a":1}'
    assert as_object("  ") == ""


def test_a_log_is_read_line_by_line_also_after_it_was_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(path)
    assert file.new_lines() == []
    path.write_text("one\ntw")
    assert file.new_lines() == ["one"]
    with path.open("a") as more:
        more.write("o\n")
    assert file.new_lines() == ["two"]
    path.write_text("3\n")
    assert file.new_lines() == ["3"]


UNHEARD = """
import sys
from deploy.console import console
from deploy.json_console import JsonConsole
if sys.argv[1] == "json":
    JsonConsole()
print("begun", flush=True)
sys.stdin.readline()
for _ in range(2000):
    console.print("a line that nobody reads: " + "word " * 10)
print("done", flush=True)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_who_writes_goes_on_when_the_reader_has_gone(form: str) -> None:
    """As behind ``| tee``, which Ctrl-C ends first."""
    process = subprocess.Popen(
        [sys.executable, "-c", UNHEARD, form],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "begun\n"
    process.stderr.close()

    process.stdin.write("\n")
    process.stdin.flush()

    assert process.stdout.readline() == "done\n"
    assert process.wait(20) == 0
