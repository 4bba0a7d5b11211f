"""The command ``shoal`` as a process; what it can do stands in ``deploy.commands``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; errors meant for people become one line and exit code 1.

    A value that is refused is such an error; flags that are unknown and arguments that are missing have the parser's
    exit code, 2.
    """
    # While modules are imported Ctrl-C just ends the process: a traceback of the import would tell nobody anything.
    hears_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy.commands import app
    from deploy.console import print_error
    from workers.engine.errors import ShoalError

    if hears_ctrl_c:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # vLLM's users write flags with underscores, too.
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments = [*(_with_dashes(argument) for argument in given[:end]), *given[end:]]
    try:
        app(arguments, prog_name="shoal")
    except ShoalError as error:
        print_error(str(error))
        raise SystemExit(1) from None


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, sign, value = argument.partition("=")
    return name.replace("_", "-") + sign + value


if __name__ == "__main__":
    main()
