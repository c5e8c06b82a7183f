"""A piece of a file that was cut for its download is said to be one, and the command that the error
names makes a model of the pieces."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.worker.folders import WEIGHTS, logits, refusal
from tests.worker.gguf.converter import convert
from worker.checkpoint.pieces import how_to_join, how_to_join_among

NAMES = {
    "{whole}.part{number:02}": 0,
    "{whole}.part-{number:02}": 1,
    "{whole}.part{number}": 1,
    "{whole}.part{number}of3": 1,
    "{whole}-split-{letter}": 0,
    "{whole}.{number:03}": 1,
    "{whole}.a{letter}": 0,
    "{whole}.{number}.part": 1,
    "{stem}-part{number}{suffix}": 1,
    "{stem}.part-{number}{suffix}": 1,
}


@pytest.fixture(scope="module")
def gguf(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(original, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def cut(file: Path, folder: Path, form: str, first: int, count: int = 3) -> list[Path]:
    """The file's bytes in `count` pieces; the first of them has the whole header."""
    content, pieces = file.read_bytes(), []
    size = -(-len(content) // count)
    for i in range(count):
        number = first + i
        name = form.format(
            whole=file.name,
            stem=file.stem,
            suffix=file.suffix,
            number=number,
            letter=chr(ord("a") + number),
        )
        pieces.append(folder / name)
        pieces[-1].write_bytes(content[i * size : (i + 1) * size])
    return pieces


def command_of(message: str) -> str:
    """The command that an error names."""
    return message.partition("(cat ")[2].rpartition(")")[0]


def code_of(piece: Path, pieces: Sequence[Path]) -> str:
    named = piece.suffix == ".gguf" or (piece == pieces[0] and piece.suffix != ".part")
    return "unsupported_model" if named else "model_not_found"


@pytest.mark.parametrize(("form", "first"), NAMES.items())
def test_each_piece_names_the_command_that_joins_them(
    form: str, first: int, gguf: Path, tmp_path: Path
) -> None:
    pieces = cut(gguf, tmp_path, form, first)
    messages = [refusal(piece, code_of(piece, pieces)) for piece in pieces]
    for message in messages:
        assert "is one of 3 pieces of a file by its name: join all of them in order" in message
    (command,) = {command_of(message) for message in messages}
    subprocess.run(f"cat {command}", shell=True, cwd=tmp_path, check=True)
    assert torch.equal(logits(tmp_path / command.partition(" > ")[2]), logits(gguf))


def test_a_piece_alone_is_known_by_its_name(gguf: Path, tmp_path: Path) -> None:
    first, *others = cut(gguf, tmp_path, "{whole}.part{number:02}", 0)
    for piece in others:
        piece.unlink()
    later = tmp_path / "later"
    later.mkdir()
    last = Path(shutil.copy(first, later / others[-1].name))
    last.write_bytes(last.read_bytes()[99:])
    for piece, code in ((first, "unsupported_model"), (last, "model_not_found")):
        message = refusal(piece, code)
        assert message.endswith(
            f"is a piece of a file by its name: join all of them in order (cat {piece.name} … > "
            "tiny.gguf), and give the whole file"
        )


def test_pieces_are_joined_in_the_order_of_their_numbers(gguf: Path, tmp_path: Path) -> None:
    *_, last = cut(gguf, tmp_path, "{whole}.part{number}", 1, count=11)
    command = command_of(refusal(last, "model_not_found"))
    assert command == "tiny.gguf.part1 tiny.gguf.part2 … tiny.gguf.part11 > tiny.gguf"


def test_a_folder_of_pieces_names_the_command(gguf: Path, tmp_path: Path) -> None:
    pieces = cut(gguf, tmp_path, "{whole}.part{number:02}", 0)
    assert command_of(refusal(tmp_path)).endswith(" > tiny.gguf")
    pieces[0].unlink()
    message = refusal(tmp_path, "model_not_found")
    assert "there are pieces of a file: join all of them in order (cat tiny.gguf.part01 " in message


def test_pieces_of_safetensors_are_known_as_well(original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "model")
    cut(folder / WEIGHTS, folder, "{whole}.part{number}", 1)
    (folder / WEIGHTS).unlink()
    message = refusal(folder, "model_not_found")
    assert "there are pieces of a file" in message
    assert command_of(refusal(folder / f"{WEIGHTS}.part1")) == command_of(message)
    subprocess.run(f"cat {command_of(message)}", shell=True, cwd=folder, check=True)
    assert torch.equal(logits(folder), logits(original))


def test_names_with_spaces_are_quoted(gguf: Path, tmp_path: Path) -> None:
    spaced = Path(shutil.copy(gguf, tmp_path / "my model.gguf"))
    first, *_ = cut(spaced, tmp_path, "{whole}.part{number}", 1)
    assert command_of(refusal(first)).startswith("'my model.gguf.part1' ")


@pytest.mark.parametrize(
    "name",
    [
        "model.gguf",
        "Llama-3.2-1B",
        "model-00001-of-00002.gguf",
        "model-00001-of-00002.safetensors",
        "party.gguf",
        "spare.part",
        "model.gguf.part",
        "v1.10",
        "notes-2.part",
    ],
)
def test_other_names_are_not_taken_for_pieces(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert how_to_join(tmp_path / name) is None
    assert how_to_join_among([name]) is None
