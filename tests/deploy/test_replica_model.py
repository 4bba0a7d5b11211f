"""Files that describe a simulated replica."""

from __future__ import annotations

import pytest

from deploy.simulate.replica_model import BUILT_IN, read_replica_model
from workers.engine.errors import InvalidRequest


def test_a_replica_model_keeps_defaults_for_what_its_file_leaves_out(tmp_path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"prompt_tokens_per_s": 40000, "num_kv_tokens": 4096}')

    model = read_replica_model(str(path))

    assert model.cost(16).per_token_s == 1 / 40_000
    assert model.num_blocks(16) == 256
    assert model.base_s == BUILT_IN["engine"].base_s


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"kind": "magic"}', "kind"),
        ('{"speed": 3}', "speed"),
        ('{"base_s": 0}', "base_s is 0: .* greater than 0"),
        ('{"max_num_seqs": true}', "max_num_seqs is True: true and false are no value of it"),
        ('{"kind": "fifo", "num_host_kv_tokens": 512}', "need kind engine"),
        ("{", "the file"),
    ],
)
def test_a_bad_replica_model_is_refused_with_its_field(tmp_path, content: str, said: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)

    with pytest.raises(InvalidRequest, match=said):
        read_replica_model(str(path))


def test_an_unknown_replica_model_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="engine, fifo, h200"):
        read_replica_model("none.json")
