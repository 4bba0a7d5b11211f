"""Five hundred random JSON schemas: each is enforced to its end, or refused with the keyword at fault."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import Vocabulary
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.errors import InvalidRequest
from workers.engine.request import ChoiceParams, EngineRequest, FinishReason
from workers.grammar import GrammarCompiler
from workers.obedient_rank import ObedientRank

END = 2
NUM_SCHEMAS = 500
UNSUPPORTED = (
    "uniqueItems",
    "contains",
    "not",
    "if",
    "dependentRequired",
    "propertyNames",
    "unevaluatedProperties",
)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """One schema, of the kinds that people write; one in twenty with a keyword that few libraries know."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object"] * 6 + ["array"] * 3 + ["anyOf", "allOf", "types", "oneOf"]
    schema = _of_kind(rng, rng.choice(kinds), depth)
    if rng.random() < 0.02:
        name = rng.choice(UNSUPPORTED)
        schema[name] = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(name, {"type": "string"})
    return schema


def _of_kind(rng: random.Random, kind: str, depth: int) -> dict[str, Any]:
    match kind:
        case "string":
            return {"type": "string", **rng.choice(_STRINGS)}
        case "integer":
            low = rng.randint(-50, 50)
            return {
                "type": "integer",
                **rng.choice([{}, {"minimum": low}, {"minimum": low, "maximum": low + 30}]),
            }
        case "number":
            return {
                "type": "number",
                **rng.choice([{}, {"minimum": 0, "maximum": 1}, {"exclusiveMinimum": 2}]),
            }
        case "enum":
            return {"enum": rng.sample(["a", "b c", 'd"e', 1, 2.5, True, None, "é"], rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(["x", 3, False, None, [1, "a"], {"k": 1}])}
        case "object":
            return _object(rng, depth, is_root=depth == 3)
        case "array":
            low = rng.randint(0, 2)
            bounds = rng.choice([{}, {"minItems": low}, {"minItems": low, "maxItems": low + 2}])
            if rng.random() < 0.15:
                return {
                    "type": "array",
                    "prefixItems": [random_schema(rng, 0), random_schema(rng, 0)],
                    "items": False,
                }
            return {"type": "array", "items": random_schema(rng, depth - 1), **bounds}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "allOf":
            return {
                "allOf": [{"type": "object", "properties": {"a": random_schema(rng, 0)}}, _object(rng, depth)]
            }
        case "oneOf":
            return {"oneOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}]}
        case "types":
            return {"type": rng.sample(["string", "integer", "null", "boolean"], 2)}
        case _:
            return {"type": kind}


def _object(rng: random.Random, depth: int, is_root: bool = False) -> dict[str, Any]:
    names = rng.sample(["id", "name", "tags", "a", "b", "long name", "é"], rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {n: random_schema(rng, depth - 1) for n in names},
    }
    if names and rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    schema.update(
        rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
    )
    if is_root and rng.random() < 0.3:
        schema["$defs"] = {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
    return schema


_STRINGS: list[dict[str, Any]] = [
    {}, {}, {}, {"minLength": 3}, {"maxLength": 5}, {"minLength": 2, "maxLength": 2}, {"pattern": "^[a-z]{2,4}$"},
    {"pattern": "^(foo|bar)-[0-9]+$"}, {"format": "date"}, {"format": "uuid"}, {"format": "email"},
    {"format": "date-time"},
]  # fmt: skip


@pytest.fixture(scope="module")
def token_bytes(demo_vocabulary: Vocabulary) -> list[bytes]:
    return list(demo_vocabulary.token_bytes)


@pytest.fixture(scope="module")
def compiler(token_bytes: list[bytes]) -> GrammarCompiler:
    return GrammarCompiler(token_bytes, {0, 1, 2}, (END,))


def outcome(schema: dict[str, Any], compiler: GrammarCompiler, token_bytes: list[bytes]) -> str:
    """ "enforced", or why not; raises if what came out is not valid."""
    options = {"whitespace_pattern": r"( |\n[ ]{0,16})?"}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
    try:
        matcher = compiler.matcher(grammar)
    except InvalidRequest as error:
        return error.message
    config = EngineConfig(max_model_len=2048, num_blocks=256, eos_token_ids=(END,), run_ahead=1)
    engine, executor = Engine(config), ObedientRank(config, token_bytes)
    engine.add(EngineRequest("r", [1], ChoiceParams(max_tokens=2000, grammar=grammar)), 0.0, matcher)
    tokens: list[int] = []
    reason = None
    while engine.has_work:
        while (plan := engine.plan(0.0)) is not None:
            executor.launch(plan)
        for output in engine.apply(executor.collect(), 0.0):
            tokens += output.token_ids
            reason = output.finish_reason
            assert output.error is None, output.error
    assert reason is FinishReason.STOP, (schema, b"".join(token_bytes[i] for i in tokens)[:300])
    text = b"".join(token_bytes[i] for i in tokens if i != END).decode()
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    return "enforced"


def test_each_schema_is_enforced_or_refused_by_keyword(compiler, token_bytes) -> None:
    schemas = [random_schema(random.Random(number)) for number in range(NUM_SCHEMAS)]

    outcomes = [outcome(schema, compiler, token_bytes) for schema in schemas]

    refused = [(schema, why) for schema, why in zip(schemas, outcomes, strict=True) if why != "enforced"]
    assert len(refused) <= 0.1 * len(schemas), [why for _, why in refused]
    for schema, why in refused:
        words = [word.strip("'[],.:") for word in why.replace('"', " ").split()]
        assert any(f'"{word}"' in json.dumps(schema) for word in words), (why, schema)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_small_model_writes_is_valid_or_cut_off(
    demo_model: ModelFiles, compiler: GrammarCompiler, token_bytes: list[bytes]
) -> None:
    from workers.model.rank import Rank
    from workers.model.rank_config import RankConfig

    rank = Rank(RankConfig(files=demo_model, max_model_len=512, max_num_seqs=32))
    rank.load()
    rank.allocate(32 * 32)
    engine = Engine(
        EngineConfig(max_model_len=512, num_blocks=32 * 32, max_num_seqs=32, eos_token_ids=(END,))
    )
    schemas: dict[str, dict[str, Any]] = {}
    prompt = [i for i, token in enumerate(token_bytes) if token in (b"JSON", b":", b"Here")]
    for number in range(64):
        schema = random_schema(random.Random(number))
        options = {"whitespace_pattern": r"( |\n[ ]{0,16})?"}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        try:
            matcher = compiler.matcher(grammar)
        except InvalidRequest:
            continue
        params = ChoiceParams(max_tokens=120, temperature=1.0, seed=number, grammar=grammar)
        engine.add(EngineRequest(str(number), prompt, params), 0.0, matcher)
        schemas[str(number)] = schema
    texts = dict.fromkeys(schemas, b"")
    reasons: dict[str, FinishReason] = {}
    while engine.has_work:
        while (plan := engine.plan(0.0)) is not None:
            rank.launch(plan)
        for output in engine.apply(rank.collect(), 0.0):
            assert output.error is None, output.error
            texts[output.request_id] += b"".join(token_bytes[i] for i in output.token_ids if i != END)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason

    assert set(reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    ended = [name for name, reason in reasons.items() if reason is FinishReason.STOP]
    assert len(ended) >= len(schemas) / 8  # the rest talk on inside a string
    for name in ended:
        jsonschema.validate(json.loads(texts[name]), schemas[name], jsonschema.Draft202012Validator)
