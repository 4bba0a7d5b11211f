"""One rule says what a model may be called, wherever the name comes from, and each such name can be deployed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from cluster.config import application_name
from deploy.cluster_spec import read_cluster_spec
from deploy.serve_command import _print_ready
from deploy.setting_values import MOST_NAME_CHARS
from deploy.settings import make_settings
from workers.engine.errors import InvalidRequest

GOOD = ("tiny", "Qwen/Qwen2.5-0.5B:latest", "modèle", "模型", "a b", "x?y#z%2F", "..x", "é" * MOST_NAME_CHARS)
BAD = {
    "a\nb": "cannot be shown",
    "a\x1b[31mb": "cannot be shown",
    "a\u2028b": "cannot be shown",
    "a\udce8b": "cannot be shown",
    "/a": "part of an address",
    "a/": "part of an address",
    "a//b": "part of an address",
    "../x": "part of an address",
    "a/./b": "part of an address",
    "x" * (MOST_NAME_CHARS + 1): "has 257 characters: give 256 at most",
    "x" * 5000: "has 5,000 characters: give 256 at most",
}


def by_flag(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return make_settings(served_model_name=[name]).served_names("own")[0]


def by_variable(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOAL_SERVED_MODEL_NAME", name)
    return make_settings().served_names("own")[0]


def by_deploy_file(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = folder / "cluster.yaml"
    path.write_bytes(yaml.safe_dump({"models": [{"name": name}]}).encode())
    (model,) = read_cluster_spec(path).models
    assert model.settings.served_names("own") == (name,)
    return model.name


def by_the_models_own(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return make_settings().replica_config("path", name).served_name


WAYS = {
    by_flag: "--served-model-name",
    by_variable: "SHOAL_SERVED_MODEL_NAME",
    by_deploy_file: "name",
    by_the_models_own: "--served-model-name",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GOOD, ids=lambda name: name[:20])
def test_a_name_that_can_be_told_is_taken(way, name: str, tmp_path: Path, monkeypatch) -> None:
    assert way(name, tmp_path, monkeypatch) == name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BAD, ids=lambda name: ascii(name)[:20])
def test_a_name_that_cannot_be_told_is_refused_at_once(way, name: str, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(InvalidRequest, match=BAD[name]) as refused:
        way(name, tmp_path, monkeypatch)

    assert WAYS[way] in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_comma_in_a_deployed_name_makes_no_two_of_it(tmp_path: Path, monkeypatch) -> None:
    assert by_deploy_file("a,b", tmp_path, monkeypatch) == "a,b"


def test_names_of_applications_are_what_serve_and_a_file_system_take() -> None:
    names = [application_name(name) for name in (*GOOD, "modêle", "x" * 200, "x" * 201)]

    assert names[:2] == ["model-tiny", "model-Qwen--Qwen2.5-0.5B:latest"]
    assert len(set(names)) == len(names)
    assert all(
        name.isascii() and name.isprintable() and "/" not in name and len(name) < 150 for name in names
    )


@pytest.mark.parametrize("name", ["tiny", 'it\'s "mod" [b]é[/b] $HOME'])
def test_the_request_that_is_shown_to_be_tried_names_the_model(name: str, capsys) -> None:
    _print_ready("http://there", name, make_settings())

    shown = capsys.readouterr().err.split("Try it:\n")[1].split("\n  ")
    words = shlex.split(shown[0].removesuffix("\\") + shown[1])
    assert json.loads(words[words.index("-d") + 1])["model"] == name
