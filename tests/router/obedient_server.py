"""As ``edge_server.py``, before the real engine with real grammars and a model that does as it is told.

For tests whose point is what clients make of calls and forms, not whether a small model can follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

from conftest import make_byte_vocabulary
from edge_server import LINE, serve
from engine_replica import EngineReplica

CALLS: tuple[tuple[str, str, dict[str, object]], ...] = (
    (r"magic_function\(3\)", "magic_function", {"input": 3}),
    (r"magic_function_no_args\(\)", "magic_function_no_args", {}),
    (r"Pirate greeting", "greeting_generator", {"answer_style": "Pirate"}),
    (r"weather in San Francisco", "get_weather", {"location": "San Francisco, CA"}),
    ("你好啊集团", "unicode_customer", {"customer_name": "你好啊集团", "description": "technology"}),
    ("こんにちは", "unicode_customer", {"customer_name": "こんにちは株式会社", "description": "会社"}),
)
"""What calls for which function, with which arguments."""


def obey(prompt: bytes) -> bytes:
    """What the model says after a conversation."""
    text = prompt.decode("utf-8", "replace")
    asked = text.rpartition("<|start|>user\n")[2] or text
    if "'setup' and 'punchline' keys" in asked:
        return b'{"setup": "Why?", "punchline": "Cats."}'
    for pattern, name, arguments in CALLS:
        # Once a function has answered, the model tells what it has learned.
        if re.search(pattern, asked) and name in text and "sunny" not in asked:
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            return f"<tool_call>\n{call}\n</tool_call>".encode()
    return LINE.encode()


async def main() -> None:
    """Serve, taking steps while there is work."""
    replica = EngineReplica(make_byte_vocabulary(), script=obey)

    async def step() -> None:
        while True:  # a server's loop: nothing is waited for but more work
            await replica.run()
            await asyncio.sleep(0.001)

    stepping = asyncio.create_task(step())
    await serve(replica, tool_call_parser="hermes")
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping


if __name__ == "__main__":
    asyncio.run(main())
