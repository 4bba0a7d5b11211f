"""Settings from a YAML file: the same names as flags, with dashes or underscores."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import yaml

from deploy.settings import ServeSettings
from workers.engine.errors import InvalidRequest


def read_config(path: Path) -> dict[str, object]:
    """What the file sets, by setting's name.

    Raises:
        InvalidRequest: it cannot be read, is no YAML mapping, or has a key that is no setting.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--config {path} cannot be read: {error}", "config") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise InvalidRequest(f"--config {path} is no YAML{where}", "config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidRequest(f"--config {path} holds no mapping of settings to values", "config")
    return {_setting(str(key), path): value for key, value in content.items()}


def _setting(key: str, path: Path) -> str:
    name = key.replace("-", "_")
    if name in ServeSettings.model_fields:
        return name
    near = get_close_matches(name, ServeSettings.model_fields, n=1)
    hint = f": did you mean {near[0].replace('_', '-')}?" if near else ""
    raise InvalidRequest(f"{path} sets {key!r}, which is no setting{hint}", name)
