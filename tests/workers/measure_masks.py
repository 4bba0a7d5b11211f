"""Measures what a grammar's row costs the brain: CPU time of a mask, with llguidance's own slices and with ours.

.venv/bin/python tests/workers/measure_masks.py

The vocabulary is made up: 128,256 tokens, half of them words after a space. Time of one thread, so that what else the
machine does changes little.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import llguidance
import numpy as np

from deploy.bench.structured import FORMS
from deploy.offline.structured import StructuredOutputsParams
from workers.grammar import _LIMITS, SLICES, _Tokens

VOCAB_SIZE = 128_256
NUM_ROWS, NUM_STEPS, NUM_FIRST = 16, 30, 3
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
MORE = {
    "lines": StructuredOutputsParams(regex="(.{1,60}\\n){50,90}"),
    "names": StructuredOutputsParams(regex="([A-Za-z_][A-Za-z0-9_]{0,20}, ){90,99}"),
    "words": StructuredOutputsParams(grammar='start: WORD (" " WORD)*\nWORD: /[a-z]+/'),
}


def made_up_tokens(draw: random.Random) -> list[bytes]:
    """Bytes, words that begin with a space, words that do not, capitalized ones, and signs of JSON."""
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(found) < VOCAB_SIZE - 256:
        word = "".join(draw.choices(LETTERS, weights=range(26, 0, -1), k=draw.randint(2, 8)))
        signs = "".join(draw.choices('{}[]":,0123456789 \n', k=draw.randint(2, 5)))
        kinds = (f" {word}", word, word.capitalize(), signs)
        found[draw.choices(kinds, weights=(50, 35, 10, 5))[0].encode()] = None
    return [*found, *(b"<|s%d|>" % i for i in range(256))]


def mask_us(tokenizer: llguidance.LLTokenizer, grammar: str) -> float:
    """Mean CPU time of a mask, over rows that each draw among their allowed tokens."""
    draw = random.Random(1)
    matchers = [llguidance.LLMatcher(tokenizer, grammar, limits=_LIMITS) for _ in range(NUM_ROWS)]
    times_s = []
    for _ in range(NUM_STEPS):
        begun_s = time.thread_time()
        masks = [matcher.compute_bitmask() for matcher in matchers]
        times_s.append((time.thread_time() - begun_s) / NUM_ROWS)
        for matcher, mask in zip(matchers, masks, strict=True):
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            matcher.consume_token(int(draw.choice(np.flatnonzero(bits))))
    return 1e6 * statistics.mean(times_s[NUM_FIRST:])


def main() -> None:
    """Print a line for each form."""
    tokens = made_up_tokens(random.Random(0))
    special = range(VOCAB_SIZE - 256, VOCAB_SIZE)
    wrapper = llguidance.TokenizerWrapper(_Tokens(tokens, special, [VOCAB_SIZE - 1]))
    plain = llguidance.LLTokenizer(wrapper, eos_token=[VOCAB_SIZE - 1])
    kinds: Sequence[tuple[str, llguidance.LLTokenizer]] = [
        ("llguidance's", plain),
        ("ours", plain.with_slices(SLICES)),
    ]
    for form, params in {**FORMS, **MORE}.items():
        told = ", ".join(f"{name} {mask_us(tokenizer, params.text):.0f} us" for name, tokenizer in kinds)
        print(f"{form:8} a mask with slices of {told}")


if __name__ == "__main__":
    main()
