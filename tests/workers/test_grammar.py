"""Grammars over the demo model's vocabulary: what they allow, what is refused, and that nothing takes long."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from types import SimpleNamespace

import llguidance
import pytest

from workers import mask_threads
from workers.checkpoint.vocabulary import Vocabulary
from workers.engine.constraint import GrammarFailed
from workers.engine.errors import InvalidRequest
from workers.grammar import SLICES, GrammarCompiler, GrammarMatcher

END, OTHER_END = 2, 0


@pytest.fixture
def vocabulary(demo_vocabulary: Vocabulary) -> Vocabulary:
    return demo_vocabulary


@pytest.fixture(scope="module")
def compiler(demo_vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(demo_vocabulary.token_bytes, demo_vocabulary.special_token_ids, (END, OTHER_END))


def schema(value: object) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(value), defaults={"whitespace_flexible": False}
    )


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = matcher.mask()
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def test_only_what_continues_the_grammar_is_allowed(compiler, vocabulary) -> None:
    matcher = compiler.matcher('start: "yes" | "no"')

    begun = {vocabulary.token_bytes[i] for i in allowed(matcher)}

    assert begun == {b"y", b"ye", b"yes", b"n", b"no"}


def test_any_end_of_sequence_may_come_where_the_grammar_is_satisfied(compiler, vocabulary) -> None:
    matcher = compiler.matcher('start: "a" "b"?')
    assert END not in allowed(matcher)

    matcher.accept(vocabulary.token_bytes.index(b"a"))

    assert {END, OTHER_END} < allowed(matcher)
    assert matcher.is_accepting
    assert not matcher.is_complete


def test_a_grammar_that_nothing_can_follow_is_complete(compiler, vocabulary) -> None:
    matcher = compiler.matcher(schema({"const": 7}))

    matcher.accept(vocabulary.token_bytes.index(b"7"))

    assert matcher.is_complete


def test_special_tokens_are_no_text(compiler, vocabulary) -> None:
    matcher = compiler.matcher("start: /.*/")

    assert allowed(matcher) & vocabulary.special_token_ids == {END, OTHER_END}


class PanicException(BaseException):
    """As pyo3 raises what has gone wrong in Rust; the real one cannot be imported."""

    __module__ = "pyo3_runtime"


def panic(*arguments: object, **named: object) -> None:
    raise PanicException("called `Option::unwrap()` on a `None` value")


def test_a_panic_while_it_is_compiled_refuses_the_grammar_alone(
    compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("workers.grammar.llguidance.LLMatcher", panic)
        with pytest.raises(InvalidRequest, match=r"cannot be compiled \(PanicException\): make it simpler"):
            compiler.matcher('start: "a"')

    assert "Option::unwrap" in caplog.text
    assert allowed(compiler.matcher('start: "a"'))


@pytest.mark.parametrize("method", ["compute_bitmask", "consume_token", "is_stopped", "is_error"])
def test_a_panic_on_the_way_ends_that_grammar_and_no_more(
    compiler, vocabulary, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    real = compiler.matcher('start: "a" "b"')._matcher
    answers = {
        name: getattr(real, name) for name in ("compute_bitmask", "consume_token", "is_stopped", "is_error")
    }
    matcher = GrammarMatcher(SimpleNamespace(**{**answers, method: panic}), compiler._threads)

    def follow() -> None:
        assert not matcher.is_complete
        matcher.mask()
        matcher.accept(vocabulary.token_bytes.index(b"a"))

    with pytest.raises(GrammarFailed, match=r"cannot be followed any further \(PanicException\)"):
        follow()

    assert not matcher.is_complete
    with pytest.raises(GrammarFailed, match="PanicException"):
        matcher.mask()
    assert caplog.text.count("llguidance failed while it followed a grammar") == 1


def test_a_panic_over_one_of_many_masks_leaves_the_others_theirs(
    vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded = GrammarCompiler(vocabulary.token_bytes, vocabulary.special_token_ids, (END,), num_threads=2)
    matchers = [threaded.matcher('start: "a"') for _ in range(mask_threads.MIN_ROWS)]
    broken = SimpleNamespace(compute_bitmask=panic, is_error=lambda: False)
    bad = GrammarMatcher(broken, threaded._threads)  # type: ignore[arg-type]
    executor = SimpleNamespace(unsafe_compute_mask_ptr=panic)
    monkeypatch.setattr("workers.mask_threads.llguidance.LLExecutor", lambda num_threads: executor)

    matchers[0].prepare([*matchers[1:], bad])

    assert {frozenset(allowed(matcher)) for matcher in matchers} == {
        frozenset({vocabulary.token_bytes.index(b"a")})
    }
    with pytest.raises(GrammarFailed, match="PanicException"):
        bad.mask()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "objekt"}), "objekt"),
        (schema({"$ref": "#"}), "nothing can match"),
        ("start: foo", "foo"),
        ("", "Empty"),
    ],
)
def test_what_cannot_be_enforced_is_named(compiler, grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        compiler.matcher(grammar)


def many_words(vocabulary: Vocabulary, num_words: int) -> str:
    """A pattern whose automaton is as wide as the vocabulary."""
    words = [token.decode() for token in vocabulary.token_bytes if token.isalpha() and token.isascii()]
    return "|".join(a + b for a, b in itertools.islice(zip(words, reversed(words), strict=True), num_words))


def test_what_cannot_be_followed_beyond_its_first_token_is_refused_at_once(compiler, vocabulary) -> None:
    grammar = llguidance.LLMatcher.grammar_from_regex(many_words(vocabulary, 10_000))

    with pytest.raises(InvalidRequest, match=r"grows beyond 10,000 states .* make it simpler"):
        compiler.matcher(grammar)


def test_a_grammar_that_outgrows_its_limits_on_the_way_says_so_in_our_words(compiler, vocabulary) -> None:
    pattern = f"0123({many_words(vocabulary, 10_000)})z"
    matcher = compiler.matcher(llguidance.LLMatcher.grammar_from_regex(pattern))

    def follow(text: bytes) -> None:
        for byte in text:
            matcher.mask()
            matcher.accept(vocabulary.token_bytes.index(bytes([byte])))

    with pytest.raises(GrammarFailed, match=r"grows beyond 10,000 states .* make it simpler"):
        follow(b"0123ab")


@pytest.mark.parametrize(
    "grammar",
    [
        llguidance.LLMatcher.grammar_from_regex("(a{1000}){1000}"),
        llguidance.LLMatcher.grammar_from_regex("(.*a){20}b"),
        llguidance.LLMatcher.grammar_from_regex("(x+x+)+y"),
        schema({"enum": [f"value {i}" for i in range(20_000)]}),
        schema({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(14)]}),
        schema({"type": "string", "minLength": 50_000, "maxLength": 100_000}),
    ],
    ids=["repeats", "many states", "nested", "long enum", "product", "long"],
)
def test_a_hostile_grammar_is_refused_or_followed_in_bounded_time(compiler, vocabulary, grammar: str) -> None:
    slowest_s = 0.0
    started_s = time.perf_counter()
    with contextlib.suppress(InvalidRequest, GrammarFailed):
        matcher = compiler.matcher(grammar)
        for _ in range(8):
            begun_s = time.perf_counter()
            matcher.mask()
            slowest_s = max(slowest_s, time.perf_counter() - begun_s)
            matcher.accept(max(allowed(matcher), key=lambda i: len(vocabulary.token_bytes[i])))

    assert slowest_s < 1.0
    assert time.perf_counter() - started_s < 10


def test_masks_made_side_by_side_are_those_made_alone(vocabulary) -> None:
    grammars = [
        schema({"type": "object"}),
        'start: "yes" | "no"',
        "start: /[a-z]{3}/",
        schema({"const": 7}),
    ] * 4

    def matchers(num_threads: int) -> list[GrammarMatcher]:
        compiler = GrammarCompiler(vocabulary.token_bytes, vocabulary.special_token_ids, (END,), num_threads)
        return [compiler.matcher(grammar) for grammar in grammars]

    alone, together = matchers(1), matchers(2)
    for _ in range(4):
        together[0].prepare(together[1:])
        for one, other in zip(alone, together, strict=True):
            mask = one.mask()
            assert other.mask().rstrip(b"\0") == mask.rstrip(b"\0")
            token_id = next(i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1)
            one.accept(token_id)
            other.accept(token_id)


def test_a_mask_made_beforehand_is_forgotten_with_the_next_token(vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary.token_bytes, vocabulary.special_token_ids, (END,), 2)
    first, *others = [compiler.matcher("start: /ab{9}/") for _ in range(mask_threads.MIN_ROWS)]
    first.prepare(others)

    first.accept(vocabulary.token_bytes.index(b"a"))

    assert vocabulary.token_bytes.index(b"a") not in allowed(first)


def test_a_grammar_that_fails_beside_others_fails_alone(vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary.token_bytes, vocabulary.special_token_ids, (END,), 2)
    broken, *others = [compiler.matcher('start: "yes" | "no"') for _ in range(mask_threads.MIN_ROWS)]
    with pytest.raises(GrammarFailed):
        broken.accept(vocabulary.token_bytes.index(b"a"))

    broken.prepare(others)

    with pytest.raises(GrammarFailed):
        broken.mask()
    assert {vocabulary.token_bytes[i] for i in allowed(others[0])} == {b"y", b"ye", b"yes", b"n", b"no"}


@pytest.mark.parametrize(
    "grammar",
    [
        "([a-z]{1,7} ){2,300}",
        "([A-Za-z_][A-Za-z0-9_]{0,5}, ){9,99}",
        "[a-z]{3}|[a-z]{5,9}x",
        "(.{1,9}\\n){2,90}",
        "[^aeiou]{1,20}[0-9]+",
    ],
)
def test_sorting_tokens_into_slices_changes_no_mask(compiler, vocabulary, grammar: str) -> None:
    text = llguidance.LLMatcher.grammar_from_regex(grammar)
    ours, plain = (
        llguidance.LLMatcher(compiler._tokenizer.with_slices(slices), text) for slices in (SLICES, [])
    )
    draw = random.Random(1)

    for _ in range(20):
        mask = ours.compute_bitmask()
        assert mask == plain.compute_bitmask()
        places = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        token_id = draw.choice(places)
        if token_id in (END, OTHER_END):
            break
        ours.consume_token(token_id)
        plain.consume_token(token_id)
