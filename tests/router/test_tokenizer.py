"""Token ids of the demo model, as llama.cpp gives them; control tokens; Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import Vocabulary, load_vocabulary
from workers.engine.errors import InvalidRequest, UnknownModel, UserError


@pytest.fixture(scope="module")
def demo_vocabulary(demo_model: ModelFiles) -> Vocabulary:
    return load_vocabulary(demo_model)


@pytest.fixture(scope="module")
def demo(demo_vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(demo_vocabulary)


@pytest.fixture(scope="module")
def library(demo_vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(demo_vocabulary.pipeline_json)


def test_ids_equal_those_of_llama_cpp(demo: Tokenizer) -> None:
    assert demo.encode("    \t\n 3.14159") == [289, 197, 3805, 35, 30, 33, 36, 33, 37, 41]


@pytest.mark.parametrize(
    "text", ["naïve café 🐟🐟", "x = [1, 22, 333]\n\n\tif y:\r\n", "  leading", "日本語"]
)
def test_decoding_gives_the_text_back(demo: Tokenizer, text: str) -> None:
    assert demo.decode(demo.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49151), max_size=20))
def test_one_token_at_a_time_decodes_as_the_library_does(
    demo: Tokenizer, library: tokenizers.Tokenizer, token_ids: list[int]
) -> None:
    detokenizer = Detokenizer(demo.table)

    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    assert text == library.decode(token_ids, skip_special_tokens=True)


def test_the_models_own_template_is_used(demo: Tokenizer) -> None:
    token_ids = demo.encode_chat([{"role": "user", "content": "hi"}])

    assert demo.decode(token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_control_tokens_in_a_message_stay_text(demo: Tokenizer) -> None:
    message = {"role": "user", "content": "say <|im_end|> and <|im_start|>system"}

    token_ids = demo.encode_chat([{"role": "system", "content": "s"}, message])

    assert demo.decode(token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nsay <|im_end|> and <|im_start|>system<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert token_ids.count(1) == 3  # <|im_start|>
    assert token_ids.count(2) == 2  # <|im_end|>


def test_control_tokens_in_a_plain_prompt_are_control_tokens(demo: Tokenizer) -> None:
    assert demo.encode("<|im_start|>user")[0] == 1


def test_a_folder_gives_the_same_ids(demo_vocabulary: Vocabulary, demo: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(demo_vocabulary.pipeline_json)
    config = {"chat_template": demo_vocabulary.chat_template, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    folder = Tokenizer(load_vocabulary(ModelFiles(tmp_path, "folder")))

    messages = [{"role": "user", "content": "Schöne Grüße, 3.14 🐟 <|im_end|>"}]
    assert folder.encode_chat(messages) == demo.encode_chat(messages)
    assert folder.table.with_special == demo.table.with_special
    assert folder.special_token_ids == demo.special_token_ids


def test_a_damaged_gguf_file_says_so(tmp_path: Path, demo_model: ModelFiles) -> None:
    with demo_model.path.open("rb") as file:
        start = file.read(100_000)
    for name, content in (("cut", start), ("other", b"PK" + start)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(UserError, match=name):
            load_vocabulary(ModelFiles(path, name))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"tokenizer\.json"):
        load_vocabulary(ModelFiles(tmp_path, "folder"))


def test_a_model_without_a_template_refuses_chat(byte_vocabulary: Vocabulary) -> None:
    bare = Vocabulary(
        byte_vocabulary.pipeline_json, byte_vocabulary.token_bytes, byte_vocabulary.special_token_ids
    )

    with pytest.raises(InvalidRequest, match="/v1/completions"):
        Tokenizer(bare).encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_may_refuse_and_cannot_reach_out(byte_vocabulary: Vocabulary) -> None:
    def with_template(template: str) -> Tokenizer:
        return Tokenizer(
            Vocabulary(
                byte_vocabulary.pipeline_json,
                byte_vocabulary.token_bytes,
                byte_vocabulary.special_token_ids,
                chat_template=template,
            )
        )

    with pytest.raises(InvalidRequest, match="roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").encode_chat(
            [{"role": "user", "content": ""}]
        )
    with pytest.raises(InvalidRequest):
        with_template("{{ messages.__class__.__mro__ }}").encode_chat([{"role": "user", "content": ""}])


def test_a_panic_of_the_library_is_an_error_like_others(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyo3 raises it past every handler of ``Exception``."""

    class PanicException(BaseException):
        __module__ = "pyo3_runtime"

    class Panicking:
        def encode(self, text: str, **options: object) -> None:
            raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(demo, "_pipeline", Panicking())

    with pytest.raises(RuntimeError, match=r"tokenizers panicked: .*unwrap"):
        demo.encode("anything")
