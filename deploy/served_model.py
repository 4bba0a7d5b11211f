"""What the ingress is told of a model, from the settings it is served with and its files."""

from __future__ import annotations

from cluster.config import application_name
from deploy.preflight import check_length, text_files
from deploy.settings import ServeSettings
from router.config import ServedModelConfig
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles


def served_model_config(settings: ServeSettings, files: ModelFiles) -> ServedModelConfig:
    """The text side of the model in ``files``.

    Raises:
        InvalidRequest: a setting does not fit the model.
    """
    model = read_model_config(files)
    check_length(settings, files, model)
    max_model_len = settings.max_model_len or model.max_position_embeddings
    names = settings.served_names(files.name)
    return ServedModelConfig(
        files=text_files(settings, files),
        max_model_len=max_model_len,
        names=names,
        group=application_name(names[0]),
    )
