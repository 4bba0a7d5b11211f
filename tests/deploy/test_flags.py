"""Flags, configuration file and variables say the same things under the same names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import cli, commands
from deploy.config_file import read_config
from deploy.engine_command import INSTEAD
from deploy.flags import GROUPS
from deploy.offline.llm import LLM
from deploy.offline.llm_settings import LLMSettings
from deploy.settings import ServeSettings, make_settings
from workers.engine.errors import InvalidRequest

VLLM_FLAGS = (
    *("--host", "--port", "--api-key", "--served-model-name", "--tensor-parallel-size", "--max-model-len"),
    *("--gpu-memory-utilization", "--dtype", "--max-num-seqs", "--max-num-batched-tokens", "--block-size"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill", "--seed"),
    *("--tokenizer", "--revision", "--load-format", "--download-dir", "--max-logprobs", "--ssl-keyfile"),
    *("--ssl-certfile", "--num-scheduler-steps", "--enforce-eager", "--kv-cache-dtype", "--quantization"),
    *(
        "--swap-space",
        "--chat-template",
        "--tool-call-parser",
        "--reasoning-parser",
        "--enable-auto-tool-choice",
    ),
    *("--replicas", "--trust-remote-code"),
)


def shown_help() -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(commands.app, ["serve", "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def test_help_shows_vllms_flags_whole_and_in_groups_in_80_columns() -> None:
    text = shown_help()

    assert [flag for flag in VLLM_FLAGS if not re.search(rf"^  .*{flag}\b", text, re.MULTILINE)] == []
    assert [group for group in GROUPS if f"\n{group}:\n" not in text] == []
    assert "--reasoning-parser deepseek_r1|qwen3|think" in text
    assert "--scripted" not in text


def test_every_group_names_settings_and_every_setting_has_its_help() -> None:
    named = [name for names in GROUPS.values() for name in names]

    assert len(named) == len(set(named))
    assert set(named) <= set(ServeSettings.model_fields)
    assert [name for name, field in ServeSettings.model_fields.items() if not field.description] == []


def test_an_llm_takes_all_settings_of_model_engine_and_memory() -> None:
    of_serving_alone = {"served_model_name"}
    of_other_groups = {"tensor_parallel_size", "device", "cpu_threads", "chat_template"}
    wanted = {name for group in ("Model", "Engine", "Memory") for name in GROUPS[group]}

    assert set(LLMSettings.__annotations__) == wanted - of_serving_alone | of_other_groups
    with pytest.raises(TypeError, match="unexpected keyword argument 'port'"):
        LLM(port=8000)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match=r"--max-step-growth is -1"):
        LLM(max_step_growth=-1)


def test_an_unknown_flag_is_told_the_nearest() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(commands.app, ["serve", "--max-num-sqs", "4"])

    assert result.exit_code == 2
    assert "--max-num-seqs" in result.output


@pytest.mark.parametrize("flag", INSTEAD)
def test_a_flag_that_only_vllm_has_is_told_with_what_does_the_same(flag: str) -> None:
    for command in (["serve", "some/model"], ["run-batch", "-i", "a", "-o", "b"]):
        for given in ([flag, "2"], [f"{flag}=2"]):
            result = CliRunner(env={"COLUMNS": "300"}).invoke(commands.app, [*command, *given])

            assert result.exit_code == 2
            assert f"No such option: {flag}; {INSTEAD[flag]}" in result.output


def test_what_is_told_instead_of_vllms_flags_is_there() -> None:
    own = {f"--{name.replace('_', '-')}" for name in ServeSettings.model_fields}
    told = {flag for text in INSTEAD.values() for flag in re.findall(r"--[a-z-]+", text)}

    assert told <= own
    assert own.isdisjoint(INSTEAD)


def given_to_settings(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, command: str = "serve"
) -> ServeSettings:
    """What a command line comes to, stopped before anything starts."""
    found: list[ServeSettings] = []

    class Stopped(Exception):
        pass

    def stop(settings: ServeSettings) -> None:
        found.append(settings)
        raise Stopped

    monkeypatch.setattr("deploy.local_cluster.start_local_cluster", stop)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["shoal", command, *arguments])
    with pytest.raises(Stopped):
        cli.main()
    return found[0]


def test_a_command_line_becomes_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = given_to_settings(
        monkeypatch, "some/model", "--max_model_len", "300", "-tp", "2", "--no-enable-prefix-caching",
        "--served-model-name", "a", "--served-model-name=b", "--api-key", "k1,k2",
    )  # fmt: skip

    assert (settings.model, settings.max_model_len, settings.tensor_parallel_size) == ("some/model", 300, 2)
    assert settings.enable_prefix_caching is False
    assert settings.served_names("x") == ("a", "b")
    assert settings.replicas == 2
    assert settings.api_key == ("k1", "k2")


@pytest.mark.parametrize("name", ["served_model_name", "api_key", "allowed_origins"])
def test_words_mean_the_same_by_flag_by_variable_and_in_a_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flag, path = "--" + name.replace("_", "-"), tmp_path / "shoal.yaml"
    path.write_text(f"{name}: 'a, b'")

    by_flag = given_to_settings(monkeypatch, flag, "a, b")
    by_flags = given_to_settings(monkeypatch, flag, "a", flag, "b")
    by_file = given_to_settings(monkeypatch, "--config", str(path))
    monkeypatch.setenv(f"SHOAL_{name.upper()}", "a, b")
    by_variable = given_to_settings(monkeypatch)

    for settings in (by_flag, by_flags, by_file, by_variable):
        assert getattr(settings, name) == ("a", "b")
    assert "several between commas, or given several times" in " ".join(shown_help().split())
    monkeypatch.setattr(sys, "argv", ["shoal", "serve", flag, "k,k"])
    with pytest.raises(SystemExit):
        cli.main()


def test_flags_go_before_the_file_and_the_file_before_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text("model: from/file\nmax-model-len: 100\nport: 9001\nserved_model_name: [x, y]\n")
    monkeypatch.setenv("SHOAL_PORT", "9002")
    monkeypatch.setenv("SHOAL_REPLICAS", "3")
    monkeypatch.setenv("SHOAL_API_KEY", "sk-one,sk-two")

    settings = given_to_settings(monkeypatch, "--config", str(path), "--max-model-len", "200")

    assert (settings.model, settings.max_model_len, settings.port) == ("from/file", 200, 9001)
    assert (settings.replicas, settings.served_model_name) == (3, ("x", "y"))
    assert settings.api_key == ("sk-one", "sk-two")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modl-len: 3", "did you mean max-model-len?"),
        ("- a\n- b", "no mapping"),
        ("a: [", r"no YAML \(line"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(text)

    with pytest.raises(InvalidRequest, match=says):
        read_config(path)


def test_what_has_no_effect_is_noted() -> None:
    assert make_settings().notes == []
    (note,) = make_settings(num_scheduler_steps="8").notes
    assert "--num-scheduler-steps has no effect" in note
    assert make_settings(scale_to_zero_delay_s=9, min_replicas=0, max_replicas=4).notes == []
    (note,) = make_settings(scale_to_zero_delay_s=9, max_replicas=4).notes
    assert "--scale-to-zero-delay-s has no effect: --min-replicas 1" in note
