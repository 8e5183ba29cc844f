"""Read and write Hugging Face checkpoint folders, one tensor at a time.

Reading fills the tensors a rank owns, so every rank of an expert-parallel group reads its own experts and no rank
ever holds the whole model. Writing needs one of our tensors at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestream.config.errors import ConfigError
from sidestream.convert.families import FAMILIES, Family, family_of
from sidestream.convert.folder import ModelFolder
from sidestream.convert.tensors import pieces
from sidestream.model.config import ModelShape
from sidestream.model.transformer import MoETransformer
from sidestream.tracking.untrusted import printable

SHARD_BYTES = 4 * 2**30


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    return ModelFolder(folder).config


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        why, install = "safetensors is not installed", "pip install 'safetensors>=0.5'"
        raise ConfigError(
            "initial_weights", "<folder>", why, expected=install, fix="initial_weights=null"
        ) from None
    return safetensors


class Reader:
    """Tensors of a folder by name; files stay open, tensors are read when asked for.

    Raises:
        ConfigError: A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._open, self._stack = ModelFolder(folder), {}, ExitStack()  # type: ignore[var-annotated]
        library = _safetensors()
        self._safe_open, self._safetensors_error = library.safe_open, library.SafetensorError
        self._stored = self._folder.tensors

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def get(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            ConfigError: It is missing, or holds a value that is not finite.
        """
        if name not in self._stored:
            raise self._folder.refused(name, "this tensor is missing")
        file = self._stored[name].file
        try:
            if file not in self._open:
                real = self._folder.locate(file)
                self._open[file] = self._stack.enter_context(self._safe_open(real, framework="pt"))
            tensor = self._open[file].get_tensor(name)
        except (self._safetensors_error, OSError) as error:  # what our look at its head lets pass
            raise self._folder.refused(file, printable(error)) from None
        if not torch.isfinite(tensor).all():
            raise self._folder.refused(name, "holds values that are not finite")
        return tensor


@torch.no_grad()
def load_huggingface(model: MoETransformer, folder: Path) -> None:
    """Fill this rank's part of a model, before `Reduction.shard`.

    Args:
        model: A model of the same shape; experts are plain tensors of `model.parts.expert_range`.
        folder: A Hugging Face checkpoint.

    Raises:
        ConfigError: Another model type, a missing tensor, a tensor we have no place for, or another shape.
    """
    theirs_folder = ModelFolder(folder)
    theirs_folder.check_tensors()
    family = family_of(theirs_folder.config)
    every_expert = range(model.shape.num_experts)
    with Reader(folder) as reader:
        expected: set[str] = set()
        for name, parameter in model.named_parameters():
            for piece in _pieces(name, model.shape, family, range(*model.parts.expert_range)):
                theirs = reader.get(piece.name)
                ours = parameter.data[piece.index]
                if (ours.t() if piece.transposed else ours).shape != theirs.shape:
                    why = f"{piece.name} is {tuple(theirs.shape)} in the checkpoint, {tuple(ours.shape)} here"
                    raise ConfigError(
                        "model", folder, why, expected="the checkpoint's sizes", fix="model=<its preset>"
                    )
                piece.put(parameter.data, theirs)
            expected |= {piece.name for piece in _pieces(name, model.shape, family, every_expert)}
        if model.shape.tie_embeddings and "lm_head.weight" in reader.names:
            expected.add("lm_head.weight")
            if not torch.equal(reader.get("lm_head.weight"), reader.get("model.embed_tokens.weight")):
                why = "is not the embedding, which tie_word_embeddings=true says"
                raise theirs_folder.refused("lm_head.weight", why)
        if unknown := sorted(name for name in reader.names - expected if not name.endswith("inv_freq")):
            why = f"{len(unknown)} tensors have no place in this model, first {unknown[0]}"
            raise ConfigError(
                "model", folder, why, expected="the checkpoint's sizes", fix="model=<its preset>"
            )


def _pieces(name: str, shape: ModelShape, family: Family, experts: range) -> list[Any]:
    try:
        return list(pieces(name, shape, family, experts))
    except KeyError:
        why = f"{family.model_type} has no counterpart of our parameter {name}"
        raise ConfigError(
            "model", name, why, expected="a model of that family", fix="model=<its preset>"
        ) from None


def write_huggingface(
    folder: Path,
    *,
    names: Iterable[str],
    tensor: Callable[[str], Tensor],
    shape: ModelShape,
    config: dict[str, Any],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a folder that `from_pretrained` reads; aside, then checked and renamed. Nothing stays of a failure.

    Args:
        folder: Must not exist.
        names: Our parameter names.
        tensor: Name -> the whole tensor, all experts; asked for one at a time.
        shape: The model's shape.
        config: From `config_json`.
        dtype: Dtype of the written weights.
        shard_bytes: Size of a file.
        check: Told where the finished folder lies before it gets its name; raises what stands against it.

    Raises:
        ConfigError: `folder` exists, or a weight is not finite in `dtype`.
    """
    with written_aside(folder) as partial:
        _write_weights(partial, names, tensor, shape, FAMILIES[config["model_type"]], dtype, shard_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        check(partial)


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder to write in that gets the name `folder` at the end, and is removed if something fails before.

    Raises:
        ConfigError: `folder` exists.
    """
    if folder.exists():
        raise ConfigError("out", printable(folder), "it exists", expected="a new folder", fix="another name")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(
    partial: Path,
    names: Iterable[str],
    tensor: Callable[[str], Tensor],
    shape: ModelShape,
    family: Family,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    written: list[list[str]] = []
    size, total = 0, 0

    def flush() -> None:
        # The number of files is known at the end; they are renamed then.
        _safetensors().torch.save_file(
            shards[0], partial / f"{len(written)}.safetensors", metadata={"format": "pt"}
        )
        written.append(list(shards[0]))
        shards[0] = {}

    for name in names:
        ours = tensor(name)
        for piece in _pieces(name, shape, family, range(shape.num_experts)):
            theirs = piece.take(ours).to(dtype)
            if not torch.isfinite(theirs).all():
                why = f"{piece.name} holds values that are not finite in {dtype}"
                raise ConfigError("dtype", dtype, why, expected="finite weights", fix="--dtype float32")
            nbytes = theirs.numel() * theirs.element_size()
            if size and size + nbytes > shard_bytes:
                flush()
                size = 0
            shards[0][piece.name] = theirs
            size, total = size + nbytes, total + nbytes
    flush()
    _name_shards(partial, written, total)


def _name_shards(folder: Path, written: list[list[str]], total: int) -> None:
    if len(written) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(written):
        file = f"model-{index + 1:05d}-of-{len(written):05d}.safetensors"
        (folder / f"{index}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(content, indent=2) + "\n", encoding="utf-8"
    )
