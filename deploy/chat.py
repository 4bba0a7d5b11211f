"""``shoal chat``: a conversation in the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from deploy.client import Client, ClientError
from deploy.console import read_line

_HELP = "/new starts over, /system TEXT sets the system message, /exit leaves (so do Ctrl-D and Ctrl-C)"


class Chat:
    """Keeps the conversation and shows it."""

    def __init__(
        self, client: Client, model: str, system: str | None, max_tokens: int, temperature: float
    ) -> None:
        self._client = client
        self._model = model
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._console = Console()
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._start_over()

    def run(self) -> None:
        """Read and answer until the user leaves."""
        is_typed = sys.stdin.isatty()  # a pipe is not told what to type
        if is_typed:
            self._console.print(f"[bold]{escape(self._model)}[/bold]  [dim]{_HELP}[/dim]\n")
        while True:
            read = read_line(self._console, "[bold cyan]you ›[/bold cyan] " if is_typed else "")
            if read is None:
                if is_typed:
                    self._console.print()
                return
            line = read.strip()
            if line in ("/exit", "/quit"):
                return
            if line and not self._command(line):
                self._answer(line)

    def _command(self, line: str) -> bool:
        if not line.startswith("/"):
            return False
        name, _, rest = line.partition(" ")
        if name == "/new":
            self._start_over()
        elif name == "/system":
            self._system = rest.strip() or None
            self._start_over()
        else:
            self._console.print(f"[dim]{_HELP}[/dim]")
        return True

    def _start_over(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        text = ""
        try:
            for piece in self._client.stream_chat(self._model, self._messages, **self._options):
                text += piece
                # As it comes and never again: what moves the cursor back garbles what is typed meanwhile.
                self._console.out(piece, end="", highlight=False)
        except KeyboardInterrupt:
            self._console.print(" [dim](stopped)[/dim]", end="")  # closing the stream cancels the request
        except ClientError as error:
            self._console.print(("\n" if text else "") + f"[red]error:[/red] {escape(str(error))}", end="")
        if text:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._messages.pop()
        self._console.print("\n")
