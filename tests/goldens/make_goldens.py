"""Writes ``smollm2_135m.json`` and ``smollm2_135m_more.json``: greedy continuations by transformers, in float32, on the
dequantized GGUF weights. The second, with prompts for devices faster than a CPU, are made with ``--more``.

Run by hand: ``python tests/goldens/make_goldens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf`` (needs accelerate).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
LONG = (
    "The lighthouse keeper had counted the ships every evening for thirty years. He knew the grain barges by their "
    "slow lamps, the ferries by their music, and the fishing boats by the gulls that followed them home. On the "
    "first night of winter a vessel came that he could not name. It carried no lamp at all, and yet the water "
    "around it shone as if the moon had fallen in. He wrote the hour in his book, as the rules required, and under "
    "'remarks' he wrote nothing, because there was no word for it. In the morning the page was wet, and the ink had "
    "run into the shape of a small harbour that was on none of his charts."
)
PROMPTS = {
    "short": "The capital of France is",
    "one word": "Once",
    "long": LONG,
    "code": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n',
    "digits and spaces": "    \t\n 3.14159 2.71828\n\n  1 + 1 =",
    "list": "Five fruits, one a line:\n1. Apple\n2.",
    "unicode": "Übermäßig große Flüsse — naïve café, 東京 and 🙂:",
    "json": '{"name": "Ada", "year": 1815, "fields": ["mathematics",',
}
MORE = {
    "recipe": "To bake a simple loaf of bread you need flour, water, salt and",
    "history": "In 1969, the first humans landed on",
    "letter": "Dear Sir or Madam,\n\nI am writing to",
    "story": "The dragon looked at the small girl and said,",
    "sql": "SELECT name, COUNT(*) FROM orders WHERE",
    "html": "<html>\n  <head>\n    <title>",
    "french": "Bonjour, je m'appelle Marie et j'habite",
    "german": "Der Hund lief schnell über die",
    "counting": "1, 2, 3, 4, 5, 6, 7,",
    "question": "Why is the sky blue? The short answer is that",
    "poem": "Roses are red,\nViolets are blue,\n",
    "shell": "#!/bin/bash\nfor file in *.txt; do\n",
    "quoted": '"I never said that," she whispered. "You must have',
    "long, twice": LONG + " " + LONG,
}
CHATS = {
    "chat": [{"role": "user", "content": "Explain gravity in two sentences."}],
    "chat with system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is a prime number?"},
        {"role": "assistant", "content": "A number with exactly two divisors."},
        {"role": "user", "content": "Name three of them."},
    ],
}


def main(gguf_path: Path, is_more: bool) -> None:
    """Load, generate, write beside this file."""
    torch.set_num_threads(1)
    where = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The conversion drops the digit splitting of this model's pre-tokenizer.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    prompts = {
        name: tokenizer.encode(text, add_special_tokens=False)
        for name, text in (MORE if is_more else PROMPTS).items()
    }
    for name, messages in ({} if is_more else CHATS).items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts[name] = tokenizer.encode(text, add_special_tokens=False)
    cases = [{"name": name, **continue_greedily(model, ids)} for name, ids in prompts.items()]
    versions = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    lines = ",\n".join(json.dumps(case) for case in cases)
    target = Path(__file__).with_name("smollm2_135m_more.json" if is_more else "smollm2_135m.json")
    target.write_text(f'{{"versions": {versions},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
    for case in cases:
        margin = min(case["margins"])
        print(f"{case['name']}: {len(case['prompt_token_ids'])} prompt tokens, least margin {margin:.4f}")


@torch.inference_mode()
def continue_greedily(model: torch.nn.Module, prompt_token_ids: list[int]) -> dict[str, list]:
    """Return the prompt, ``NUM_TOKENS`` likeliest tokens (past any end of sequence) and logit margins to the second."""
    tokens, margins = [], []
    fed, cache = torch.tensor([prompt_token_ids]), None
    for _ in range(NUM_TOKENS):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        fed = best.indices[:1][None]
    return {"prompt_token_ids": prompt_token_ids, "output_token_ids": tokens, "margins": margins}


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_more="--more" in sys.argv)
