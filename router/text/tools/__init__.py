"""Tool calls in a model's own words: parsed as they stream, shown to models in prompts, enforced by grammars."""
