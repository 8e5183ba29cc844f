"""A Hugging Face folder is data from anybody: what is missing, damaged or leads elsewhere is one line, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.config.errors import ConfigError
from sidestream.convert.folder import INDEX, SINGLE, ModelFolder
from tests.convert.tiny import ROOT, change_config, write_random

pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "hf"
    write_random("qwen3_moe", path, tie_word_embeddings=False)
    return path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "hf")
    return tmp_path / "hf"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / SINGLE)


def save(folder: Path, content: dict[str, torch.Tensor], name: str = SINGLE) -> None:
    from safetensors.torch import save_file

    save_file({key: value.contiguous() for key, value in content.items()}, folder / name)


def with_tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """Replaces a tensor, or takes it out."""

    def change(folder: Path) -> None:
        content = tensors(folder)
        content.pop(name, None)
        save(folder, content if value is None else content | {name: value})

    return change


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes())) and None


def with_head(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Rewrites the head of the file, and nothing else."""

    def rewrite(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + length])
        text = change(head)
        encoded = (text if isinstance(text, str) else json.dumps(head)).encode()
        return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]

    return with_bytes(rewrite)


def in_two_files(folder: Path, change: Callable[[dict[str, str]], Any] = lambda weight_map: None) -> None:
    content = tensors(folder)
    names = sorted(content)
    (folder / SINGLE).unlink()
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save(folder, {name: content[name] for name in part}, file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    new = change(weight_map)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": new if isinstance(new, dict | list) else weight_map})
    )


def indexed(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return lambda folder: in_two_files(folder, change)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def linked(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(target)

    return change


def piped(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def with_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (without("config.json"), r"config\.json: missing"),
    "config of no JSON": (with_text("config.json", "{"), r"config\.json: no JSON"),
    "config of a list": (with_text("config.json", "[1]"), r"config\.json: expected an object, found list"),
    "config of nothing": (with_text("config.json", ""), r"config\.json: no JSON"),
    "config nested": (with_text("config.json", '{"a":' * 100_000), r"config\.json: "),
    "config says it twice": (
        with_text("config.json", '{"model_type": "olmoe", "rope_theta": 1, "rope_theta": 2}'),
        r"config\.json: rope_theta stands in it twice",
    ),
    "config linked out": (linked("config.json", "../elsewhere"), r"config\.json: leads out of the folder"),
    "config in a loop": (linked("config.json", "config.json"), r"config\.json: "),
    "config is a pipe": (piped("config.json"), r"config\.json: not a regular file"),
    "config is a folder": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
        r"config\.json: Is a directory",
    ),
    "no weights": (without(SINGLE), r"model\.safetensors: no weights"),
    "weights in a pickle": (
        lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"),
        r"pytorch_model\.bin: weights in pickle files are not read",
    ),
    "no index": (
        lambda folder: (folder / SINGLE).rename(folder / "model-00001-of-00002.safetensors"),
        r"index\.json: missing, with 1 weight files",
    ),
    "weights linked out": (linked(SINGLE, "../elsewhere"), r"model\.safetensors: leads out of the folder"),
    "weights are a pipe": (piped(SINGLE), r"model\.safetensors: not a regular file"),
    "an empty file": (with_bytes(lambda content: b""), r"model\.safetensors: truncated"),
    "half a head": (with_bytes(lambda content: content[:500]), r"model\.safetensors: truncated"),
    "half of the data": (with_bytes(lambda content: content[:-4000]), r"model\.safetensors: .* not whole"),
    "more than its data": (with_bytes(lambda content: content + b"1234"), r"model\.safetensors: .* not whole"),
    "a huge head": (
        with_bytes(lambda content: (2**62).to_bytes(8, "little") + content[8:]),
        r"model\.safetensors: truncated",
    ),
    "no head": (with_bytes(lambda content: b"\xff" * 9000), r"model\.safetensors: "),
    "a head without places": (
        with_head(lambda head: head[EXPERT].pop("data_offsets")),
        r"model\.safetensors: its head is damaged",
    ),
    "a head that is a list": (with_head(lambda head: "[1, 2]"), r"model\.safetensors: expected an object"),
    "tensors over each other": (
        with_head(lambda head: head[EXPERT].update(data_offsets=[0, 24 * 48 * 4])),
        r"model\.safetensors: the place of .* does not fit",
    ),
    "a shape of another size": (
        with_head(lambda head: head[EXPERT].update(shape=[24, 49])),
        r"the place of model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight does not fit",
    ),
    "a negative shape": (
        with_head(lambda head: head[EXPERT].update(shape=[-24, -48])),
        "has no shape or no dtype",
    ),
    "a dtype of nobody": (
        with_head(lambda head: head[EXPERT].update(dtype={"a": 1})),
        "has no shape or no dtype",
    ),
    "a tensor is missing": (with_tensor(EXPERT, None), rf"{EXPERT}: this tensor is missing"),
    "the head is missing": (with_tensor("lm_head.weight", None), r"lm_head\.weight: this tensor is missing"),
    "a tensor transposed": (with_tensor(EXPERT, torch.zeros(48, 24)), r"\[48, 24\] in .*asks for \[24, 48\]"),
    "a tensor of integers": (with_tensor(EXPERT, torch.zeros(24, 48, dtype=torch.int32)), "stored as I32"),
    "a tensor in eight bits": (
        with_tensor(EXPERT, torch.zeros(24, 48).to(torch.float8_e4m3fn)),
        "stored as F8_E4M3",
    ),
    "a tensor too much": (with_tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(60)), "no place"),
    "a layer too much": (lambda folder: change_config(folder, num_hidden_layers=3, mlp_only_layers=[2]), "no place"),
    "a layer too few": (lambda folder: change_config(folder, num_hidden_layers=5), r"layers\.4.*missing"),
    "an index without a map": (indexed(lambda weight_map: []), "has no weight_map"),
    "an index of numbers": (indexed(lambda weight_map: {**weight_map, EXPERT: 3}), "names something else"),
    "an index of a missing file": (
        indexed(lambda weight_map: {**weight_map, EXPERT: "c.safetensors"}),
        r"c\.safetensors: No such file",
    ),
    "an index of another file": (
        indexed(lambda weight_map: {**weight_map, EXPERT: "ab"[weight_map[EXPERT][0] == "a"] + ".safetensors"}),
        rf"says that {EXPERT} is in [ab]\.safetensors, where it is not",
    ),
    "an index that leads out": (
        indexed(lambda weight_map: {**weight_map, EXPERT: "../elsewhere.safetensors"}),
        r"\.\./elsewhere\.safetensors: leads out of the folder",
    ),
    "an index of an absolute path": (
        indexed(lambda weight_map: {**weight_map, EXPERT: "/etc/x.safetensors"}),
        r"/etc/x\.safetensors: leads out of the folder",
    ),
    "an index that leaves one out": (
        indexed(lambda weight_map: weight_map.pop(EXPERT)),
        rf"does not name {EXPERT}",
    ),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_not_whole_is_one_line(name: str, folder: Path) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(ConfigError, match=message) as refused:
        ModelFolder(folder).check_tensors()
    assert "\n" not in str(refused.value)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    from safetensors.torch import load_file

    in_two_files(folder)
    first = load_file(folder / "a.safetensors")
    name = min(first)
    save(folder, load_file(folder / "b.safetensors") | {name: first[name]}, "b.safetensors")
    with pytest.raises(ConfigError, match=rf"b\.safetensors: holds {name}, which a\.safetensors holds too"):
        ModelFolder(folder).check_tensors()


def test_values_that_are_not_finite_are_refused(folder: Path) -> None:
    from sidestream.convert.huggingface_folder import Reader

    with_tensor(EXPERT, torch.full((24, 48), float("nan")))(folder)
    with (
        Reader(folder) as reader,
        pytest.raises(ConfigError, match=f"{EXPERT}: holds values that are not finite"),
    ):
        reader.get(EXPERT)


def test_what_only_the_library_notices_is_one_line(folder: Path) -> None:
    from sidestream.convert.huggingface_folder import Reader

    with_head(lambda head: head.update(__metadata__={"format": 3}))(folder)
    with Reader(folder) as reader, pytest.raises(ConfigError, match=r"model\.safetensors: "):
        reader.get(EXPERT)


def test_a_tied_head_that_is_another_tensor_is_refused(folder: Path) -> None:
    from sidestream.commands.convert_hf import import_

    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight: is not the embedding"):
        import_(folder, folder.parent / "out")


def test_a_cache_of_links_to_blobs_is_read(written: Path, tmp_path: Path) -> None:
    """The layout of huggingface_hub; a link from there to elsewhere is still refused."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", SINGLE):
        shutil.copy(written / name, blobs / f"0{name}0")
        (snapshot / name).symlink_to(f"../../blobs/0{name}0")
    (tmp_path / "here").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "here"):
        ModelFolder(folder).check_tensors()
    shutil.move(blobs / f"0{SINGLE}0", tmp_path / "elsewhere")
    (blobs / f"0{SINGLE}0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="leads out of the folder"):
        ModelFolder(snapshot).check_tensors()


def test_several_files_and_a_rotary_table_of_old_releases_are_read(folder: Path) -> None:
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(5))(folder)
    in_two_files(folder)
    ModelFolder(folder).check_tensors()


@pytest.mark.parametrize(
    "value", ["3\tseed=1", "3 seed=1", "x\nseed=1", "${oc.env:HOME}", "a,b", "a=b", "$(id)", [1, "a b"]]
)
@pytest.mark.parametrize(
    "name", ["vocab_size", "mlp_only_layers", "rms_norm_eps", "model_type", "tie_word_embeddings"]
)
def test_nothing_is_smuggled_into_overrides(
    name: str, value: Any, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    from sidestream.commands.convert_hf import describe

    change_config(folder, **{name: value})
    with pytest.raises(ConfigError, match=r"config\.json:"):
        describe(folder)
    assert capsys.readouterr().out == ""


def test_words_are_what_a_shell_and_hydra_take_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    from sidestream.commands.convert_hf import describe, overrides

    describe(folder)
    assert "model.moe_layers=[1]" in capsys.readouterr().out.split()
    for value in ("a b", "a\tb", "${x}", "a=b", "[a]", "'x'", "a,b", "*"):
        with pytest.raises(ConfigError, match="not a word for the command line"):
            overrides({"model": {"qk_norm": value}})


@pytest.mark.full
@pytest.mark.timeout(200)
def test_the_command_ends_with_one_line_and_exit_code_2(folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])
    script = [sys.executable, str(ROOT / "scripts" / "convert_hf.py")]
    for arguments in (["import", folder, tmp_path / "out"], ["describe", tmp_path / "none"]):
        ended = subprocess.run([*script, *map(str, arguments)], capture_output=True, text=True, timeout=100)
        assert ended.returncode == 2, ended.stderr
        *told, error = ended.stderr.splitlines()
        assert ended.stdout == "" and error.startswith("error: ")
        assert all(line.startswith("importing the weights") for line in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
