"""Flags that are wrong are refused by name, with the value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from deploy.serve_command import _read_settings, serve
from deploy.settings import Quantizations, ServeSettings, make_settings
from workers.checkpoint.quantization import FORMATS, ONLINE
from workers.engine.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", 70000, r"--port is 70000: .*65535"),
        ("replicas", 0, r"--replicas is 0: .*1"),
        ("block_size", 17, r"--block-size is 17: .*16, 32 or 64"),
        ("dtype", "int3", r"--dtype is 'int3'.*'float32'"),
        ("policy", "luck", r"--policy is 'luck'"),
        ("gpu_memory_utilization", 1.5, r"--gpu-memory-utilization is 1.5"),
        ("kv_cache_gib", float("inf"), r"--kv-cache-gib is inf: .*finite"),
        ("host", "", r"--host is ''"),
        ("trust_remote_code", True, r"--trust-remote-code is True: .*no code of a checkpoint"),
        ("quantization", "foo", r"--quantization is 'foo': .*'awq', 'gptq'"),
        ("model", " ", r"--model is ' ': nothing is no value"),
        ("tokenizer", "", r"--tokenizer is '': nothing is no value"),
        ("api_key", "", r"--api-key is '': nothing is no value"),
        (
            "api_key",
            "sesame\nopen",
            r"^--api-key: a key holds blanks, (?!.*sesame).*which no header can carry$",
        ),
        ("api_key", "sésame", r"^--api-key: a key holds blanks, (?!.*sésame)"),
        ("seed", 2**70, r"--seed is 1180591620717411303424: .*18446744073709551615"),
        ("kv_cache_dtype", "fp4", r"--kv-cache-dtype is 'fp4': .*'fp8'"),
        ("swap_space", "1e300", r"--swap-space is 1e300: .* 1073741824 GiB$"),
        ("copy_gib_per_s", 1e-300, r"--copy-gib-per-s is 1e-300: .* 0.0001 GiB/s$"),
        (
            "num_gpu_blocks_override",
            10**30,
            r"--num-gpu-blocks-override is 1000000000000000000000000000000: ",
        ),
        ("max_body_bytes", 1 << 40, r"--max-body-bytes is 1099511627776: .* 1073741824 bytes$"),
        ("rank_timeout_s", 604801, r"--rank-timeout-s is 604801: .* 604800 seconds, a week$"),
        ("dtype", "x" * 5000, r"--dtype is 'x{79}\.\.\. \(5002 characters\): "),
    ],
)
def test_a_bad_flag_is_named_with_its_value_and_limit(name: str, value: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        make_settings(**{name: value})

    assert caught.value.param == name


def test_a_value_is_told_as_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text("port: 70000\nmax-replicas: 1\n")
    monkeypatch.setenv("SHOAL_REPLICAS", "4")

    for given, says in (
        ({}, f"{path}, port is 70000: "),
        ({"port": "70001"}, "--port is 70001: "),
        (
            {"port": "8000"},
            f"SHOAL_REPLICAS 4 is not between --min-replicas 1 and {path}, max_replicas 1: ",
        ),
    ):
        with pytest.raises(InvalidRequest, match="^" + re.escape(says)):
            _read_settings({"config": path, **given})
    monkeypatch.setenv("shoal_replicas", "0")
    monkeypatch.delenv("SHOAL_REPLICAS")
    with pytest.raises(InvalidRequest, match=r"^SHOAL_REPLICAS is 0: ") as refused:
        make_settings()
    assert refused.value.param == "replicas"


def test_what_does_not_fit_the_model_is_told_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(settings: ServeSettings) -> None:
        raise InvalidRequest(
            f"--swap-space {settings.swap_space:g} is more than --dtype allows: lower it", "swap_space"
        )

    monkeypatch.setattr("deploy.local_cluster.start_local_cluster", start)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    (tmp_path / "shoal.yaml").write_text("swap-space: 2000")
    for given, says in (
        ({"swap_space": "1000"}, "--swap-space 1000 is more than --dtype"),
        ({"config": tmp_path / "shoal.yaml"}, f"{tmp_path}/shoal.yaml, swap_space 2000 is more than --dtype"),
        ({}, "SHOAL_SWAP_SPACE 3000 is more than --dtype"),
    ):
        monkeypatch.setenv("SHOAL_SWAP_SPACE", "3000")
        with pytest.raises(InvalidRequest, match="^" + re.escape(says)) as refused:
            serve(dict(given))
        assert refused.value.param == "swap_space"


def test_what_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PORT", "9123")

    assert make_settings(port=None).port == 9123
    assert make_settings(port=9124).port == 9124


def test_the_ways_to_quantize_are_those_that_weights_can_be_read_in() -> None:
    assert set(get_args(Quantizations)) == {*FORMATS, *ONLINE}


def test_every_socket_stays_on_loopback_unless_told_otherwise() -> None:
    assert make_settings().host == "127.0.0.1"


def test_ranks_share_the_cores_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    settings = make_settings(replicas=2, tensor_parallel_size=2)

    assert settings.replica_config("path", "name").num_threads == 2


def test_the_first_number_of_replicas_lies_between_least_and_most() -> None:
    with pytest.raises(
        InvalidRequest, match="--replicas 3 is not between --min-replicas 1 and --max-replicas 1"
    ) as refused:
        make_settings(replicas=3, max_replicas=1)
    assert refused.value.param == "replicas"
    with pytest.raises(InvalidRequest, match=r"--replicas 2, the default, is not between .* give --replicas"):
        make_settings(max_replicas=1)

    bounds = make_settings(replicas=2, min_replicas=0, max_replicas=5).scale_bounds

    assert bounds is not None
    assert (bounds.min_replicas, bounds.initial_replicas, bounds.max_replicas) == (0, 2, 5)
    with pytest.raises(InvalidRequest, match="--min-replicas 0 needs --max-replicas"):
        make_settings(min_replicas=0)


@pytest.mark.parametrize("name", ["otlp_endpoint", "hub_endpoint"])
def test_spans_and_the_hub_are_reached_by_a_url(name: str) -> None:
    flag = "--" + name.replace("_", "-")

    assert getattr(make_settings(**{name: "http://there:4318"}), name) == "http://there:4318"
    for value in ("there:4318", "nope", "ftp://there", "http://", "http://there:99999", "http://[::1"):
        with pytest.raises(
            InvalidRequest, match=rf"^{flag} is '{re.escape(value)}': [^']*http://"
        ) as refused:
            make_settings(**{name: value})
        assert refused.value.param == name


@pytest.mark.parametrize("name", ["served_model_name", "api_key", "allowed_origins"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([""], "it is empty"),
        (["one", " "], "number 2 of 2 is empty"),
        ("one,,two", "number 2 of 3 is empty"),
        (["one", "two", "one"], "number 3 of 3 is the same as number 1"),
        ("one, one", "number 2 of 2 is the same as number 1"),
    ],
)
def test_words_that_are_empty_or_twice_there_are_refused_and_not_shown(
    name: str, value: object, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^--{name.replace('_', '-')}: {says}") as refused:
        make_settings(**{name: value})

    assert refused.value.param == name
    assert "two" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["target_ttft_s", "target_tpot_s", "downscale_delay_s", "scale_to_zero_delay_s"]
)
def test_what_concerns_scaling_alone_needs_a_number_of_replicas_that_scales(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = f"--{name.replace('_', '-')} 5 needs --max-replicas"

    with pytest.raises(InvalidRequest, match=says):
        make_settings(**{name: 5})
    assert getattr(make_settings(**{name: 5}, max_replicas=3), name) == 5
    monkeypatch.setenv(f"SHOAL_{name.upper()}", "5")
    with pytest.raises(InvalidRequest, match=f"SHOAL_{name.upper()} 5 needs --max-replicas"):
        make_settings()


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    "name", [name for name, field in ServeSettings.model_fields.items() if field.annotation is not bool]
)
def test_a_truth_value_is_no_number_and_no_word(name: str, value: bool) -> None:
    with pytest.raises(InvalidRequest, match=f"--{name.replace('_', '-')} is {value}") as refused:
        make_settings(**{name: value})

    assert refused.value.param == name


def test_swapping_needs_room_beside_cached_prefixes() -> None:
    with pytest.raises(InvalidRequest, match=r"--kv-host-fraction 1 .* --preemption-mode swap") as refused:
        make_settings(preemption_mode="swap", kv_host_fraction=1)
    assert refused.value.param == "kv_host_fraction"

    assert make_settings(preemption_mode="swap", kv_host_fraction=0.99).kv_host_fraction == 0.99
    assert make_settings(preemption_mode="auto", kv_host_fraction=1).kv_host_fraction == 1


def test_a_rate_of_copies_reaches_replicas_on_a_cpu() -> None:
    config = make_settings(copy_gib_per_s=2, device="cpu").replica_config("path", "name")

    assert config.copy_bytes_per_s == 2 << 30


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_an_address_in_others_variables_is_checked_as_its_flag_is(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "http://127.0.0.1:9", "https://hub.test/mirror"):
        monkeypatch.setenv(variable, value)
        assert make_settings()

    monkeypatch.setenv(variable, "nope")
    with pytest.raises(
        InvalidRequest, match=f"^{variable} is 'nope': .*give http:// or https://.*or unset it"
    ):
        make_settings()
