"""``shoal bench perplexity``"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.bench.options import JsonOption, check_context
from deploy.bench.report import environment, show_runs, write_result
from workers.engine.errors import InvalidRequest


def perplexity(
    text: Annotated[
        Path, typer.Option(help="The text, which should not be one that weights were calibrated on.")
    ],
    model: Annotated[str | None, typer.Option(help="A folder, a .gguf file or a hub id.")] = None,
    against: Annotated[
        str | None, typer.Option(help="The same model in another form, to compare with.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="Of --model, at load.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Where --model has none of its own.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text.")] = 8000,
    piece_len: Annotated[int, typer.Option(min=2, help="Tokens that are read together.")] = 1000,
    cpu_threads: Annotated[int | None, typer.Option(min=1, help="On a CPU.")] = None,
    json_path: JsonOption = None,
) -> None:
    """How well a model foretells a text, and what it loses against another form of it, with the standard error."""
    from deploy.bench.perplexity import perplexity as perplexity_of
    from deploy.bench.perplexity import token_losses
    from deploy.offline.llm import LLM

    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--text {text} cannot be read: {error}", "text") from error

    for name in (model,) if against is None else (model, against):
        check_context(name, None, piece_len + 1, f"--piece-len {piece_len}")

    def losses(name: str | None, how: str | None) -> list[float]:
        llm = LLM(
            name, quantization=how, tokenizer=tokenizer, cpu_threads=cpu_threads, max_model_len=piece_len + 1,
            max_num_seqs=1, kv_cache_gib=0.5, swap_space=0, enable_prefix_caching=False,
        )  # fmt: skip
        try:
            assert llm.tokenizer is not None, "it was not left out"
            token_ids = llm.tokenizer.encode(words, add_special_tokens=False)[:max_tokens]
            if len(token_ids) < 2:
                raise InvalidRequest(
                    f"--text {text} has {len(token_ids)} tokens, two at least are needed", "text"
                )
            return token_losses(llm, token_ids, piece_len)
        finally:
            llm.close()

    others = None if against is None else losses(against, None)
    found = asdict(perplexity_of(losses(model, quantization), others))
    settings: dict[str, Any] = {
        "model": model, "against": against, "quantization": quantization, "text": text.name, "piece_len": piece_len,
    }  # fmt: skip
    show_runs("perplexity", [found])
    write_result(
        json_path,
        {"bench": "perplexity", "environment": environment(), "settings": settings, **found},
    )
