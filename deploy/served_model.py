"""What the ingress is told of a model, from the settings it is served with and its files."""

from __future__ import annotations

from jinja2 import TemplateError

from cluster.config import application_name
from deploy.model_check import check_length
from deploy.preflight import text_files
from deploy.settings import ServeSettings
from router.config import ServedModelConfig
from router.text.chat_template import ChatTemplate
from workers.checkpoint.model_config import ModelConfig, read_model_config
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest


def served_model_config(
    settings: ServeSettings, files: ModelFiles, model: ModelConfig | None = None
) -> ServedModelConfig:
    """The text side of the model in ``files``; ``model`` is its config where that has been read already.

    Raises:
        InvalidRequest: a setting does not fit the model.
    """
    model = model or read_model_config(files, settings.model_impl)
    check_length(settings, files, model)
    max_model_len = settings.max_model_len or model.max_position_embeddings
    names = settings.served_names(files.name)
    return ServedModelConfig(
        files=text_files(settings, files),
        max_model_len=max_model_len,
        names=names,
        group=application_name(names[0]),
        chat_template=template_of(settings),
        tool_call_parser=settings.tool_call_parser,
        enable_auto_tool_choice=settings.enable_auto_tool_choice,
        reasoning_parser=settings.reasoning_parser,
        scales_to_zero=settings.least_replicas == 0,
        min_replicas=settings.least_replicas,
    )


def template_of(settings: ServeSettings) -> str | None:
    """The source of ``--chat-template``, if there is one.

    Raises:
        InvalidRequest: it cannot be read, or is no template.
    """
    path = settings.chat_template
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise InvalidRequest(f"--chat-template {path}: {error}", "chat_template") from error
    return source
