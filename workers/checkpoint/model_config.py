"""Reads what a model is made of, from a Hugging Face folder or a GGUF file. No tensors, no torch."""

from __future__ import annotations

from workers.checkpoint.gguf_config import config_from_gguf
from workers.checkpoint.gguf_file import GgufFile
from workers.checkpoint.hf_config import FAMILIES, config_from_hf_folder
from workers.checkpoint.model_shape import Experts, ModelConfig, RopeScaling
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError

__all__ = ["FAMILIES", "Experts", "ModelConfig", "RopeScaling", "read_model_config"]


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Read the config of a .gguf file or a Hugging Face folder.

    Raises:
        UserError: nothing readable there, or a model of a family that Shoal does not have.
    """
    if files.path.is_dir():
        return config_from_hf_folder(files.path)
    if files.path.suffix == ".gguf":
        return config_from_gguf(GgufFile(files.path))
    raise UserError(f"{files.path} is neither a .gguf file nor a folder with config.json")
