"""BOS at the beginning of prompts: as llama.cpp for GGUF files, as transformers for others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from jobs import ChatRequest, JobError
from jobs.cli import build
from tests.worker.gguf.converter import convert
from tests.worker.gguf.vocabularies import write_vocabulary_file
from tests.worker.templates import CHATML
from tests.worker.tokenizers import Style, make_tokenizer, save_tokenizer
from worker import Engine
from worker.loading.find import find

BOS = "<|endoftext|>"
WITH_BOS = "{{ bos_token }}" + CHATML
REQUEST = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}])


def file(original: Path, tmp_path: Path, template: str, **metadata: Any) -> Path:
    bos = make_tokenizer("qwen").token_to_id(BOS)
    keys = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    keys |= {"tokenizer.ggml.bos_token_id": bos, "tokenizer.chat_template": template}
    return convert(original, tmp_path / "m.gguf", metadata=keys)


def prompt(path: Path, **options: Any) -> str:
    engine = Engine.load(str(path), device="cpu", **options)
    return engine.tokenizer.decode(engine.prompt_ids(REQUEST), skip_special_tokens=False)


PLAIN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [CHATML, WITH_BOS], ids=["without", "with"])
@pytest.mark.parametrize(
    ("metadata", "adds"),
    [({"add_bos_token": True}, True), ({"add_bos_token": False}, False), ({}, False)],
)
def test_a_gguf_file_decides_and_there_is_one_bos_token_at_most(
    metadata: dict[str, Any], adds: bool, template: str, original: Path, tmp_path: Path
) -> None:
    path = file(original, tmp_path, template, **metadata)
    written = template == WITH_BOS
    assert prompt(path) == (BOS if adds or written else "") + PLAIN
    assert prompt(path, add_bos=True) == BOS + PLAIN
    assert prompt(path, add_bos=False) == (BOS if written else "") + PLAIN


@pytest.mark.parametrize(
    ("style", "pre", "adds"),
    [
        ("gemma", "default", True),
        ("llama2", "default", True),
        ("llama3", "llama-bpe", True),
        ("llama3", "gpt-2", False),
        ("qwen", "qwen2", False),
    ],
)
def test_a_gguf_file_that_does_not_state_it_follows_its_kind_of_tokenizer(
    style: Style, pre: str, adds: bool, tmp_path: Path
) -> None:
    source = find(str(write_vocabulary_file(tmp_path / "v.gguf", style, pre)))
    assert source.adds_bos is adds
    begins = source.tokenizer.encode("x", add_special_tokens=True) != source.tokenizer.encode("x")
    assert begins is (adds and "bos_token" in source.special_tokens)


@pytest.mark.parametrize("template", [CHATML, WITH_BOS], ids=["without", "with"])
@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_a_folder_is_rendered_as_transformers_does(
    add_bos_token: bool | None, template: str, original: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "m"))
    save_tokenizer(folder, "llama3", template)
    edited = json.loads((folder / "tokenizer_config.json").read_text())
    if add_bos_token is not None:
        edited["add_bos_token"] = add_bos_token
    (folder / "tokenizer_config.json").write_text(json.dumps(edited))
    oracle = AutoTokenizer.from_pretrained(folder)
    expected: Any = oracle.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    source = find(str(folder))
    assert not source.adds_bos
    assert oracle.decode(expected) == prompt(folder)


def test_a_folder_gets_the_bos_token_on_request(original: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "m"))
    with pytest.raises(JobError, match="has no BOS token: leave the option out"):
        Engine.load(str(folder), device="cpu", add_bos=True)
    edited = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**edited, "bos_token": BOS}))
    assert prompt(folder, add_bos=True) == BOS + prompt(folder)
    with pytest.raises(JobError, match="add_bos is True, False or None; got 'yes'"):
        Engine.load(str(folder), device="cpu", add_bos="yes")  # type: ignore[arg-type]


def test_saved_prompts_begin_as_those_of_the_worker(original: Path, tmp_path: Path) -> None:
    path = file(original, tmp_path, CHATML, add_bos_token=True)
    system = tmp_path / "system"
    system.write_text("You answer each question of the user with a single word. " * 3)
    counts = []
    for options in ([], ["--add-bos"], ["--no-add-bos"]):
        words = ["prompts", "save", "-m", str(path), "--system", str(system), "--device", "cpu"]
        words += ["-o", str(tmp_path / "out"), "--force", "--json", *options]
        done = CliRunner().invoke(build(), words)
        assert done.exit_code == 0, done.stderr
        counts.append(json.loads(done.stdout)["tokens"])
    assert counts[0] == counts[1] == counts[2] + 1


def test_a_local_chat_begins_as_those_of_the_worker(original: Path, tmp_path: Path) -> None:
    path = file(original, tmp_path, CHATML, add_bos_token=True)
    counts = []
    for options in ([], ["--add-bos"], ["--no-add-bos"]):
        words = ["chat", "--local", "-m", str(path), "-o", "max_tokens=1", "--json", *options, "Hi"]
        done = CliRunner().invoke(build(), words)
        assert done.exit_code == 0, done.stderr
        counts.append(json.loads(done.stdout.splitlines()[-1])["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] == counts[2] + 1
