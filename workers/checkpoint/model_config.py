"""Reads what a model is made of, from a Hugging Face folder or a GGUF file. No tensors, no torch."""

from __future__ import annotations

from workers.checkpoint.gguf_config import config_from_gguf
from workers.checkpoint.gguf_file import GgufFile
from workers.checkpoint.hf_config import FAMILIES, config_from_hf_folder
from workers.checkpoint.model_shape import Experts, ModelConfig, RopeScaling
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError

__all__ = ["FAMILIES", "Experts", "ModelConfig", "RopeScaling", "read_model_config"]


def read_model_config(files: ModelFiles, model_impl: str = "auto") -> ModelConfig:
    """Read the config of a .gguf file or a Hugging Face folder.

    Args:
        files: the model.
        model_impl: whose layers it is to have, one of ``hf_config.MODEL_IMPLS``.

    Raises:
        UserError: nothing readable there, or a model of a family that Shoal does not have.
    """
    if files.path.is_dir():
        return config_from_hf_folder(files.path, model_impl)
    if files.path.suffix == ".gguf":
        if model_impl == "transformers":
            raise UserError(f"{files.path}: GGUF files have native layers alone; leave it out", "model_impl")
        return config_from_gguf(GgufFile(files.path))
    raise UserError(f"{files.path} is neither a .gguf file nor a folder with config.json")
