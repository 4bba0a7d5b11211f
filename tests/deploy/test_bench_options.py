"""What the measuring commands share: what is asked wrongly costs no measurement, and is told by its name."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer.main
from typer.testing import CliRunner

from deploy.bench.cli import app as bench
from deploy.bench.report import write_result
from deploy.client import ClientError
from deploy.commands import app
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest, UserError

NAMES = sorted(typer.main.get_group(bench).commands)
TINY = str(Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny")
OF_TINY = ("--model", TINY, "--load-format", "dummy")


def numbers_of(command: Any) -> list[tuple[str, type]]:
    """Names of the options that hold a number, and which kind."""
    found = []
    for name, hint in get_type_hints(command).items():
        kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        found += [(name, kind) for kind in kinds if kind in (int, float)]
    return found


NUMBERS = [
    (one.name or one.callback.__name__.replace("_", "-"), name, kind)
    for one in bench.registered_commands
    if one.callback is not None
    for name, kind in numbers_of(one.callback)
]


def refusal(*arguments: str) -> str:
    """What a command of ``shoal`` says in a line; fails if it ends otherwise."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, UserError | ClientError), (result.output, result.exception)
    return str(result.exception)


@pytest.mark.parametrize("command", [["simulate"], *(["bench", name] for name in NAMES)])
def test_a_result_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").write_text("")

    for path, says in (
        (tmp_path, "--json .* cannot be written: Is a directory"),
        (tmp_path / "file" / "a" / "b", "--json .* cannot be written: Not a directory"),
        (tmp_path / "none" / "result.json", "--json .* cannot be written: No such file or directory"),
    ):
        result = CliRunner().invoke(app, [*command, "--json", str(path)])
        assert isinstance(result.exception, InvalidRequest), result.output
        with pytest.raises(InvalidRequest, match=says):
            raise result.exception
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_result_is_written_to_a_file_and_to_a_device(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", {"bench": "b"})
    write_result(Path("/dev/null"), {"bench": "b"})

    assert (tmp_path / "result.json").read_text() == '{\n  "bench": "b"\n}\n'
    with pytest.raises(InvalidRequest, match="--json /dev/full cannot be written: No space left"):
        write_result(Path("/dev/full"), {"bench": "b"})


@pytest.mark.parametrize(("command", "name", "kind"), NUMBERS)
def test_every_number_has_bounds_that_are_looked_at_first(command: str, name: str, kind: type) -> None:
    parser = typer.main.get_group(bench).commands[command]
    option = next(param for param in parser.params if param.name == name)

    for value in ("-1", *(("nan", "inf") if kind is float else ())):
        with pytest.raises((typer.BadParameter, InvalidRequest)) as refused:
            parser.make_context(command, [option.opts[0], value])
        assert getattr(refused.value, "param", None) in (option, name), refused.value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--input-len", "32", "--output-len", "8", "--spread", "10"), "--spread is 10, .* --output-len 8"),
        (("--input-len", "10", "--spread", "20"), "--spread is 20, .* less than --input-len 10"),
        (
            ("--input-len", "10", "--shared-len", "20"),
            "--shared-len is 20, the shortest prompt has 10 tokens",
        ),
        (("--shared-len", "9", "--input-len", "9", "--spread", "1"), "--shared-len is 9, .* has 8 tokens"),
        (("--input-len", "4000"), "--input-len 4000 and --output-len 128: .* 4128 tokens, tiny allows 4096"),
        (("--max-model-len", "16", "--input-len", "16"), "144 tokens, --max-model-len allows 16 at most"),
        (("--max-model-len", "9999"), "--max-model-len is 9999, tiny takes at most 4096"),
        (("--swap-space", "1"), "--swap-space 1.0 has no effect without --kv-pressure"),
        (("--copy-gib-per-s", "2"), "--copy-gib-per-s 2.0 has no effect without --kv-pressure"),
        (("--kv-pressure", "2", "--swap-space", "0"), "--swap-space is 0, it must be a number above 0"),
        (("--kv-pressure", "2", "--shared-len", "0"), "--shared-len 0 has no effect with --kv-pressure"),
        (("--kv-pressure", "2", "--spread", "4"), "--spread 4 has no effect with --kv-pressure"),
        (("--kv-pressure", "2", "--repeats", "3"), "--repeats 3 has no effect with --kv-pressure"),
        (("--kv-pressure", "2", "--temperature", "1"), "--temperature 1.0 has no effect with --kv-pressure"),
        (("--kv-pressure", "1"), "--kv-pressure is 1, it must be a number above 1"),
        (
            ("--kv-pressure", "2", "--input-len", "9", "--output-len", "8"),
            "come to 17 tokens, .* outgrow a block of 16: give 18 or more",
        ),
        (("--kv-pressure", "2", "--num-prompts", "8,1"), "1 prompts, 1 at once .* give 2 or more"),
        (("--kv-pressure", "2", "--max-num-seqs", "1"), "8 prompts, 1 at once .* give 2 or more"),
    ],
)
def test_flags_of_throughput_that_contradict_each_other_are_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("deploy.offline.llm.start_executor", lambda *_: pytest.fail("a rank was started"))

    assert re.search(says, refusal("throughput", *OF_TINY, *given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("latency", *OF_TINY, "--input-len", "16,4090"), "--input-len 16,4090 .* 4155 tokens"),
        (("scale-step", "--low", "5", "--high", "2"), "--high is 2, it must be above --low 5"),
        (("scale-step", "--low", "2", "--high", "2"), "--high is 2, it must be above --low 2"),
        (
            ("chaos", "--model", TINY, "--output-len", "4096"),
            "--output-len 4096: .* tiny allows 4096 at most",
        ),
        (
            ("perplexity", "--text", __file__, "--model", TINY, "--piece-len", "4096"),
            "--piece-len 4096: .* tiny allows 4096 at most",
        ),
        (("memory", *OF_TINY, "--swap-space", "0"), "--swap-space is 0, it must be a number above 0"),
        (("memory", *OF_TINY, "--prompt-len", "16"), "--prompt-len is 16, .* give 17 or more"),
        (("memory", *OF_TINY, "--prompt-len", "4096"), "--prompt-len 4096: .* tiny allows 4096 at most"),
        (("http", "--url", "https://h/v1"), "--url is https://h/v1, this load speaks plain http:// only"),
        (("http", "--model", "m", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1/v1 does not answer"),
    ],
)
def test_what_the_others_cannot_measure_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("deploy.offline.llm.start_executor", lambda *_: pytest.fail("a rank was started"))

    assert re.search(says, refusal(*given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("chaos", "--model", "/nope"), "/nope"),
        (
            ("chaos", "--model", TINY, "--output-len", "9000"),
            "--output-len 9000: .* tiny allows 4096 at most",
        ),
        (
            ("chaos", "--streams", "999999"),
            "--streams is 999999, one address has ports for 28000 .*: lower it",
        ),
        (("soak", "--model", "/nope"), "/nope"),
        (("soak", "--replicas", "99999"), "--replicas is 99999: .* 1024"),
        (
            ("soak", "--output-len", "99999999"),
            "--output-len 99999999: requests of 100000063 tokens, SmolLM2",
        ),
        (("soak", "--input-len", "9999"), "--input-len 9999 and --output-len 50: .* at most"),
        (("soak", "--streams", "99999"), "--streams is 99999, "),
        (
            ("soak", "--kv-blocks", "7"),
            "--kv-blocks is 7, a request of 114 tokens .* needs 8: give as many or",
        ),
        (("http", "--streams", "1,99999"), "--streams is 99999, "),
        (("scale-step", "--max-replicas", "99999"), "--max-replicas is 99999: .* 1024"),
        (
            ("latency", *OF_TINY, "--batch-sizes", "1,300"),
            "--batch-sizes has 300, .* --max-num-seqs 256 .*lower",
        ),
        (
            ("latency", *OF_TINY, "--batch-sizes", "9" * 5000),
            "--batch-sizes is .* whole numbers from 1 to 1000000",
        ),
        (("latency", *OF_TINY, "--max-num-seqs", "9999"), "--max-num-seqs is 9999: .* 4096"),
        (("throughput", *OF_TINY, "--num-prompts", "9999999"), "--num-prompts is '9999999': .* to 1000000"),
        (("structured", *OF_TINY, "--num-prompts", "9999"), "--num-prompts is 9999: .* 4096"),
        (("structured", *OF_TINY, "--output-len", "5000"), "--output-len 5000 .* tiny allows 4096"),
        (("perplexity", "--text", __file__, "--model", "/nope"), "/nope"),
        (("perplexity", "--text", __file__, "--against", TINY, "--model", "/nope"), "/nope"),
        (
            ("perplexity", "--text", __file__, "--model", TINY, "--piece-len", "5000"),
            "--piece-len 5000: .* 4096",
        ),
    ],
)
def test_a_load_that_cannot_be_is_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, demo_model: ModelFiles, given: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("deploy.offline.llm.start_executor", lambda *_: pytest.fail("a rank was started"))
    monkeypatch.setattr("deploy.child_process.subprocess", types.SimpleNamespace())

    assert re.search(says, refusal(*given))


def test_more_streams_than_this_process_may_have_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))

    assert refusal("soak", "--streams", "1000").startswith(
        "--streams is 1000, this process may open 1024 files"
    )


def test_a_rate_of_copies_is_refused_where_copies_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    says = refusal("throughput", *OF_TINY, "--kv-pressure", "2", "--copy-gib-per-s", "3")

    assert says.startswith("--copy-gib-per-s is 3, it is for a CPU")


def test_a_load_under_which_nothing_gave_way_is_an_error_and_keeps_its_result(tmp_path: Path) -> None:
    result = tmp_path / "result.json"

    says = refusal(
        *("throughput", *OF_TINY, "--kv-pressure", "1.1", "--num-prompts", "2", "--input-len", "10"),
        *("--output-len", "8", "--json", str(result)),
    )

    assert re.match("no request gave way: 2 at once of 18 tokens at --kv-pressure 1.1, .* raise it", says)
    assert {run["num_preemptions"] for run in json.loads(result.read_text())["runs"][0]["runs"]} == {0}


@pytest.mark.parametrize("command", ["kernels", "tensor-parallel"])
def test_commands_that_measure_gpus_say_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert "this machine shows no CUDA device" in refusal(command, "--model", TINY)


def test_groups_of_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    says = refusal("tensor-parallel", "--model", TINY, "--sizes", "1,4")

    assert says.startswith("--sizes 1,4 needs 4 GPUs, this machine shows 2")
