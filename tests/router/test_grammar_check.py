"""Grammars are compiled at the door, whatever they take; which have compiled is remembered for some of them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.text import grammar_check, grammar_process
from router.text.grammar_check import GrammarCheck
from router.text.grammars import json_schema_grammar
from workers.engine.errors import InvalidRequest

ROOT = Path(__file__).resolve().parents[2]


async def test_ten_times_as_many_grammars_as_are_remembered_leave_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_REMEMBERED", 4)
    bytes_alone = SimpleNamespace(with_special=[bytes([byte]) for byte in range(256)] + [b"<end>"])
    check = GrammarCheck(bytes_alone, frozenset({256}))  # type: ignore[arg-type]

    for number in range(40):
        await check.check(f'start: "{number}"', "guided_grammar")

    assert check.num_remembered == 4
    check.close()


BYTES = SimpleNamespace(with_special=[bytes([byte]) for byte in range(256)] + [b"<end>"])


def ref_chain(length: int) -> str:
    """A schema that is nested as deeply as its references are many."""
    defs: dict[str, object] = {
        f"a{i}": {"type": "object", "properties": {"q": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)
    }
    defs[f"a{length}"] = {"type": "integer"}
    return json_schema_grammar({"$ref": "#/$defs/a0", "$defs": defs}, r"[ \n]?")


def greedy() -> str:
    """A schema of 2.5 kB whose automata take minutes and gigabytes."""
    patterns = [f"(a|b|c){{1,{20 + i}}}x[a-z]*y.{{0,{5 + i}}}" for i in range(40)]
    return json_schema_grammar({"allOf": [{"type": "string", "pattern": one} for one in patterns]}, r"[ \n]?")


@pytest.mark.parametrize(
    ("grammar", "limits", "reason"),
    [
        (greedy(), {"cpu_s": 0.5}, "0.5 s of a core"),
        (greedy(), {"cpu_s": 60.0, "memory_bytes": 64 << 20}, "64 MiB"),
        (ref_chain(3000), {}, "nested too deeply"),
    ],
    ids=["time", "memory", "stack"],
)
async def test_a_grammar_that_would_take_all_there_is_is_refused_alone(
    grammar: str, limits: dict[str, float], reason: str
) -> None:
    check = GrammarCheck(BYTES, frozenset({256}), **limits)  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    results = await asyncio.gather(
        *(check.check(grammar, "guided_json") for _ in range(3)),
        *(check.check(f'start: "{number}"', "guided_grammar") for number in range(3)),
        return_exceptions=True,
    )

    assert all(isinstance(one, InvalidRequest) and reason in one.message for one in results[:3])
    assert results[3:] == [None] * 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    check.close()


_FOLLOWED = """
import select, sys
from router.text.grammar_process import make_compiler
from workers.engine.request import ChoiceParams, EngineRequest
from workers.grammar_thread import GrammarThread

compiler = make_compiler([bytes([byte]) for byte in range(256)] + [b"<end>"], frozenset({256}))
grammars = GrammarThread(lambda: compiler.matcher)
grammars.put(EngineRequest("deep", [1], ChoiceParams(9, grammar=sys.stdin.read())))
select.select([grammars], [], [])
((_, matcher),) = grammars.take()
for byte in b'{"q":' * 20:
    matcher.mask()
    matcher.accept(byte)
"""


async def test_the_deepest_form_that_passes_the_door_has_room_at_a_replica() -> None:
    check = GrammarCheck(BYTES, frozenset({256}))  # type: ignore[arg-type]
    deepest = ""
    for length in range(100, 1000, 100):
        with contextlib.suppress(InvalidRequest):
            await check.check(ref_chain(length), "guided_json")
            deepest = ref_chain(length)
    check.close()
    assert deepest

    command = [sys.executable, "-c", _FOLLOWED]
    done = await asyncio.to_thread(
        subprocess.run, command, input=deepest, text=True, cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr


async def test_a_grammar_that_takes_its_time_holds_up_no_other() -> None:
    check = GrammarCheck(BYTES, frozenset({256}), cpu_s=50.0)  # type: ignore[arg-type]
    slow = [asyncio.create_task(check.check(greedy(), "guided_json")) for _ in range(3)]

    for number in range(5):
        await check.check(f'start: "{number}"', "guided_grammar")

    assert not any(task.done() for task in slow)
    check.close()
    results = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(one, RuntimeError | asyncio.CancelledError) for one in results)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_a_process_that_was_ended_or_stopped_is_replaced(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "_START_S", 1.0)
    check = GrammarCheck(BYTES, frozenset({256}), cpu_s=0.2)  # type: ignore[arg-type]
    await check.check('start: "a"', "guided_grammar")
    process = check._processes[0]._process
    assert process is not None

    process.send_signal(number)
    await check.check('start: "b"', "guided_grammar")

    assert process.returncode is not None
    with pytest.raises(InvalidRequest, match="guided_grammar"):
        await check.check("start: (", "guided_grammar")
    check.close()


async def test_a_folder_of_the_users_own_does_not_take_our_modules_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("router", "workers", "signal"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the user')")
    monkeypatch.chdir(tmp_path)
    check = GrammarCheck(BYTES, frozenset({256}))  # type: ignore[arg-type]

    await check.check('start: "a"', "guided_grammar")

    check.close()
