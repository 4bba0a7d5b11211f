"""What a cluster of a model on this machine cannot do, said before Ray is started: a minute sooner."""

from __future__ import annotations

from deploy.model_check import check_length, check_model
from deploy.settings import ServeSettings
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.source import DEMO_MODEL, ModelFiles
from workers.checkpoint.vocabulary import load_vocabulary
from workers.engine.errors import InvalidRequest


def check_cluster(settings: ServeSettings, files: ModelFiles, model: ModelConfig) -> None:
    """Return if replicas of this model can start on this machine, as far as can be told without starting one.

    Raises:
        UserError: what does not fit, with the flag, its value and what is possible.
    """
    if settings.scripted:
        check_length(settings, files, model)
        return
    check_model(settings, files, model)
    if files.name != DEMO_MODEL or settings.tokenizer is not None:  # the demo's is known, and takes seconds
        load_vocabulary(text_files(settings, files))


def text_files(settings: ServeSettings, files: ModelFiles) -> ModelFiles:
    """Where tokenizer and chat template are read from.

    Raises:
        InvalidRequest: ``--tokenizer`` names what is no place for one.
    """
    if settings.tokenizer is None:
        return files
    own = ModelFiles(settings.tokenizer.absolute(), files.name)
    if not (own.path if own.is_gguf else own.path / "tokenizer.json").is_file():
        raise InvalidRequest(
            f"--tokenizer {settings.tokenizer} is neither a folder with tokenizer.json nor a .gguf file: give one of "
            "the two",
            "tokenizer",
        )
    return own
