"""The uses of an instruct model: templates, conversations, streams, drafts, logprobs."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jobs import ChatRequest, JobError, Sampling
from tests.cli.conftest import COMMAND
from tests.real.conftest import Real
from worker import ChatSession, Engine

pytestmark = pytest.mark.real

QUESTION = {"role": "user", "content": "Name the capital of France."}


def ask(real: Real, *messages: dict[str, Any], **fields: Any) -> Any:
    request = {"model": "real", "messages": messages or [QUESTION], "temperature": 0, **fields}
    return real.engine.chat(request)


def test_a_question_has_a_real_answer(smollm2: Real) -> None:
    completion = ask(smollm2, max_tokens=40)
    assert "Paris" in completion.text
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION],
        [{"role": "system", "content": "Be brief."}, QUESTION],
        [QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Why?"}],
    ],
    ids=["question", "system", "turns"],
)
def test_the_template_gives_the_token_ids_of_transformers(
    smollm2: Real, messages: list[dict[str, str]]
) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    ours = smollm2.engine.prompt_ids(ChatRequest(model="real", messages=messages))
    assert ours == expected


def test_tools_are_refused_where_the_template_has_none(smollm2: Real) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(JobError, match="tools"):
        ask(smollm2, tools=[tool])


def test_a_conversation_remembers_and_reuses_its_beginning(smollm2: Real) -> None:
    session = ChatSession(smollm2.engine, temperature=0, max_tokens=40)
    session.respond("Name the capital of France.")
    second = session.respond("And which country did I ask about?")
    assert "France" in second.text
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens > 30


def test_a_common_prompt_is_computed_once(smollm2: Real) -> None:
    system = {"role": "system", "content": "You know the capitals of the world. " * 30}
    first = ask(smollm2, system, QUESTION, max_tokens=20)
    again = ask(smollm2, system, QUESTION, max_tokens=20)
    assert again.usage.prompt_tokens_details.cached_tokens > 200
    assert again.text == first.text


def test_a_draft_of_ngrams_changes_no_token(smollm2: Real, tmp_path: Path) -> None:
    """In float32, where no near tie depends on how many tokens a step has."""
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    request = {
        "model": "real",
        "messages": [{"role": "user", "content": "red, green, blue, yellow\n" * 8}],
        "temperature": 0,
        "max_tokens": 60,
    }
    options: dict[str, Any] = {"dtype": "fp32", "max_batch": 1, "chat_template": template}
    alone = Engine.load(str(smollm2.path), device="cpu", **options)
    drafted = Engine.load(str(smollm2.path), device="cpu", draft="ngram", **options)
    found, expected = drafted.chat(request), alone.chat(request)
    assert found.text == expected.text
    details = found.usage.completion_tokens_details if found.usage else None
    assert details is not None and (details.accepted_prediction_tokens or 0) > 8


def test_a_stream_has_whole_characters(smollm2: Real) -> None:
    encode = smollm2.engine.tokenizer.encode
    prompt = encode("😀 你好 Привет naïve\n" * 6, add_special_tokens=False)
    sampling = Sampling(temperature=0, max_tokens=40)
    tokens = list(smollm2.engine.generate_stream(prompt, sampling))
    text = "".join(token.text for token in tokens)
    assert text.startswith("😀 你好 Привет naïve\n")
    assert text == smollm2.engine.tokenizer.decode([token.id for token in tokens])
    assert any(not token.text for token in tokens)  # characters of several tokens
    assert all("\ufffd" not in token.text for token in tokens)


def test_a_stop_string_ends_the_answer_before_it(smollm2: Real) -> None:
    whole = ask(smollm2, max_tokens=40).text
    word = whole.split()[3]
    cut = ask(smollm2, max_tokens=40, stop=[word])
    assert cut.text == whole[: whole.index(word)]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs_belong_to_the_tokens_of_the_answer(smollm2: Real) -> None:
    choice = ask(smollm2, max_tokens=20, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert "".join(one.token for one in content[:-1]) == choice.message.content
    assert content[-1].token == "<|im_end|>"
    for one in content:
        assert one.logprob == one.top_logprobs[0].logprob
        assert all(a.logprob >= b.logprob for a, b in pairwise(one.top_logprobs))


def test_score_is_the_sum_of_the_logprobs_of_an_answer(smollm2: Real) -> None:
    encode = smollm2.engine.tokenizer.encode
    prompt = encode("The capital of France is", add_special_tokens=False)
    paris, rome = (encode(name, add_special_tokens=False) for name in (" Paris", " Rome"))
    assert sum(smollm2.engine.score(prompt, paris)) > sum(smollm2.engine.score(prompt, rome))


def test_the_command_line_gives_a_real_answer_without_redis(smollm2: Real) -> None:
    words = [
        "chat",
        "--local",
        "-m",
        str(smollm2.path),
        "-o",
        "temperature=0",
        "-o",
        "max_tokens=30",
    ]
    done = subprocess.run(
        [COMMAND, *words, "Why is the sky blue?"], capture_output=True, text=True, check=True
    )
    assert "light" in done.stdout
