"""ChunkBuilder: the form of chunks, which a follower and an in-process stream share."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from jobs import ChatChunk
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, TokenLogprob, Usage
from jobs.api.chunk import ToolCallDelta
from jobs.api.message import FunctionCall, ToolCall
from jobs.stream.chunks import ChunkBuilder
from jobs.stream.cursor import StreamCursor
from jobs.stream.delta import Delta, join
from jobs.stream.entries import Entry

F, G = (
    ToolCallDelta(index=i, id=f"call_{i}", function=FunctionCall(name=name, arguments='{"a": 1}'))
    for i, name in enumerate("fg")
)
COMPLETION = ChatCompletion(
    id="chatcmpl-j",
    created=5,
    model="demo",
    choices=[
        Choice(index=i, message=AssistantMessage(content=text), finish_reason="stop")
        for i, text in enumerate(["ab", ""])
    ],
    usage=Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5),
    system_fingerprint="f00",
)


def roles(chunk) -> list:
    return [choice.delta.role for choice in chunk.choices]


def test_the_first_delta_of_each_choice_carries_the_role():
    builder = ChunkBuilder("j", "demo", 5)
    assert roles(builder.chunk([Delta(0, "a")])) == ["assistant"]
    assert roles(builder.chunk([Delta(0, "b"), Delta(1, "x")])) == [None, "assistant"]
    assert roles(builder.reset()) == []
    assert roles(builder.chunk([Delta(0, "c")])) == ["assistant"]
    builder.skip([Delta(1, "x")])
    assert roles(builder.chunk([Delta(1, "y")])) == [None]


def test_a_chunk_has_all_of_a_delta_and_omits_empty_fields():
    builder = ChunkBuilder("j", "demo", 5)
    token = TokenLogprob(token="a", logprob=-1.0)
    full = builder.chunk([Delta(0, "a", "hm", (token,), "stop", (F,))], "1-1")
    assert full.to_dict() == {
        "id": "chatcmpl-j",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "demo",
        "cursor": "1-1",
        "choices": [
            {
                "index": 0,
                "delta": {
                    "role": "assistant",
                    "content": "a",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "call_0",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                "finish_reason": "stop",
                "logprobs": {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}]},
            }
        ],
    }
    (empty,) = builder.chunk([Delta(0)]).to_dict()["choices"]
    assert empty == {"index": 0, "delta": {}, "finish_reason": None}


def test_every_kind_of_chunk_is_valid_for_openai():
    builder = ChunkBuilder("j", "demo", 5)
    for chunk in (
        builder.chunk([Delta(0)]),
        builder.chunk([Delta(0, "a", logprobs=(TokenLogprob(token="a", logprob=-1.0),))]),
        builder.chunk([Delta(0, finish_reason="stop")]),
        builder.chunk([Delta(0, finish_reason="tool_calls", tool_calls=(F, G))]),
        builder.reset("2-0"),
        builder.usage(COMPLETION),
    ):
        OpenAIChunk.model_validate(chunk.to_dict())


def test_a_follower_gets_the_chunks_of_an_in_process_stream():
    deltas = [Delta(0, finish_reason=None, reasoning="r"), Delta(0, "ab"), Delta(1)]
    deltas += [Delta(0, finish_reason="stop"), Delta(1, finish_reason="stop")]
    builder = ChunkBuilder("j", "demo", 5)
    local = [builder.chunk([delta]) for delta in deltas] + [builder.usage(COMPLETION)]

    request = {"model": "demo", "stream_options": {"include_usage": True}}
    cursor = StreamCursor("j", request, 5)
    followed = []
    for seq, delta in enumerate(deltas, 1):
        followed += cursor.take(Entry("j", 1, seq, (delta,)))
    completion = COMPLETION.model_copy(deep=True)
    completion.choices[0].message.reasoning_content = "r"
    followed += cursor.complete(completion, 1)
    assert [{**chunk.to_dict(), "cursor": None} for chunk in followed] == [
        {**chunk.to_dict(), "cursor": None} for chunk in local
    ]
    assert local[-1].system_fingerprint == "f00"


def calling(*calls: ToolCallDelta, content: str | None = None) -> ChatCompletion:
    """A completion with these calls."""
    completion = COMPLETION.model_copy(deep=True)
    plain = [ToolCall(id=call.id, function=call.function) for call in calls]
    message = AssistantMessage(content=content, tool_calls=plain)
    completion.choices = [Choice(index=0, message=message, finish_reason="tool_calls")]
    return completion


def call_ids(chunks) -> list[str]:
    """The calls that a subscriber has after these chunks."""
    ids: list[str] = []
    for chunk in chunks:
        ids = [] if chunk.reset else ids
        ids += [c.id for choice in chunk.choices for c in choice.delta.tool_calls or ()]
    return ids


DELTAS = [Delta(0, "a"), Delta(0, tool_calls=(F,)), Delta(0, tool_calls=(G,)), Delta(0, "b")]
ENTRIES = [Entry("j", 1, seq, (delta,)) for seq, delta in enumerate(DELTAS, 1)]


def test_each_cursor_resumes_after_its_tool_calls():
    completion = calling(F, G, content="ab")
    whole = StreamCursor("j", {}, 5)
    chunks = [chunk for entry in ENTRIES for chunk in whole.take(entry)]
    chunks += whole.complete(completion, 1)
    assert call_ids(chunks) == ["call_0", "call_1"]
    for number, chunk in enumerate(chunks):
        resumed = StreamCursor("j", {}, 5, chunk.cursor)
        rest = [chunk for entry in ENTRIES for chunk in resumed.take(entry)]
        rest += resumed.complete(completion, 1)
        assert call_ids([*chunks[: number + 1], *rest]) == ["call_0", "call_1"]
        assert not any(chunk.reset for chunk in rest)


def test_calls_that_the_log_lacks_come_with_the_completion():
    for known in range(len(ENTRIES) + 1):
        cursor = StreamCursor("j", {}, 5)
        chunks = [chunk for entry in ENTRIES[:known] for chunk in cursor.take(entry)]
        chunks += cursor.complete(calling(F, G, content="ab"), 1)
        assert call_ids(chunks) == ["call_0", "call_1"]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_of_another_attempt_are_reset():
    cursor = StreamCursor("j", {}, 5)
    chunks = [chunk for entry in ENTRIES[:2] for chunk in cursor.take(entry)]
    chunks += cursor.take(Entry("j", 2, 1, (Delta(0, tool_calls=(G,)),)))
    assert call_ids(chunks) == ["call_1"]
    assert [chunk.reset for chunk in chunks] == [None, None, True, None]
    other = StreamCursor("j", {}, 5)
    chunks = [chunk for entry in ENTRIES[:2] for chunk in other.take(entry)]
    chunks += other.complete(calling(G), 2)
    assert call_ids(chunks) == ["call_1"]


TOKENS = [TokenLogprob(token=text, logprob=-1.0) for text in "abcdef"]
OUTPUT = [
    Delta(0, reasoning="hm", logprobs=(TOKENS[0],), token_ids=(1,), prompt_token_ids=(8, 9)),
    Delta(1, "x"),
    Delta(0, "a", logprobs=(TOKENS[1],), token_ids=(2, 3)),
    Delta(0, "b", logprobs=(TOKENS[2],), tool_calls=(F,), token_ids=(4,)),
    Delta(1, "y"),
    Delta(0, tool_calls=(G,), logprobs=(TOKENS[3],)),
    Delta(0, finish_reason="tool_calls"),
    Delta(1, "z", finish_reason="length"),
]


def merged(chunks: list[ChatChunk]) -> dict[int, Any]:
    """The text of a reader that appends each chunk and knows nothing of attempts."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        assert not chunk.reset
        for choice in chunk.choices:
            delta = choice.delta
            parts = [
                [delta.role],
                [*(delta.reasoning_content or "")],
                [*(delta.content or "")],
                [token.token for token in (choice.logprobs and choice.logprobs.content) or ()],
                [call.id for call in delta.tool_calls or ()],
                [choice.finish_reason],
                choice.token_ids or [],
                (chunk.prompt_token_ids or []) if choice.index == 0 else [],
            ]
            mine = found.setdefault(choice.index, [[] for _ in parts])
            for have, part in zip(mine, parts, strict=True):
                have += [one for one in part if one is not None]
    return found


@pytest.mark.parametrize("died", range(len(OUTPUT) + 1))
@pytest.mark.parametrize("size", [1, 2, 3, len(OUTPUT)])
def test_an_attempt_that_agrees_repeats_no_part_of_any_choice(died: int, size: int) -> None:
    """Wherever the first one died, and however the second one's output is cut; a reader who resumes
    at any chunk sees the same."""
    groups = [OUTPUT[start : start + size] for start in range(0, len(OUTPUT), size)]
    entries = [Entry("j", 1, seq, (delta,)) for seq, delta in enumerate(OUTPUT[:died], 1)]
    entries += [Entry("j", 2, seq, tuple(group)) for seq, group in enumerate(groups, 1)]
    cursor = StreamCursor("j", {}, 5)
    chunks = [chunk for entry in entries for chunk in cursor.take(entry)]
    assert merged(chunks) == {
        0: [
            *(["assistant"], [*"hm"], [*"ab"], [*"abcd"], ["call_0", "call_1"], ["tool_calls"]),
            *([1, 2, 3, 4], [8, 9]),
        ],
        1: [["assistant"], [], [*"xyz"], [], [], ["length"], [], []],
    }
    for number, chunk in enumerate(chunks):
        resumed = StreamCursor("j", {}, 5, chunk.cursor)
        resumed.attempt = 2
        rest = [one for entry in entries for one in resumed.take(entry)]
        assert merged([*chunks[: number + 1], *rest]) == merged(chunks)


@pytest.mark.parametrize(
    "other",
    [
        Delta(0, "ax"),
        Delta(0, "abcd", "thought"),
        Delta(0, "a", finish_reason="stop"),
        Delta(0, "abc", finish_reason="length"),
        Delta(0, "ab", tool_calls=(G,)),
        Delta(0, "ab", logprobs=(TOKENS[5],)),
        Delta(0, "ab", token_ids=(5,)),
        Delta(0, "ab", prompt_token_ids=(5,)),
    ],
)
def test_an_attempt_that_differs_is_reset_and_given_whole(other: Delta) -> None:
    held = Delta(0, "abc", "", (TOKENS[0],), "tool_calls", (F,), (1,), (8, 9))
    cursor = StreamCursor("j", {}, 5)
    cursor.take(Entry("j", 1, 1, (held,)))
    first = cursor.take(Entry("j", 2, 1, (Delta(0, "a"),)))
    reset, chunk = cursor.take(Entry("j", 2, 2, (other._replace(content=other.content[1:]),)))
    assert first == []
    assert (reset.reset, reset.cursor, chunk.cursor) == (True, "2-0", "2-2")
    assert chunk.text == other.content
    assert chunk.choices[0].delta.role == "assistant"


def test_token_ids_that_the_log_lacks_come_with_the_completion() -> None:
    whole = COMPLETION.model_copy(deep=True)
    whole.prompt_token_ids, whole.choices[0].token_ids = [8, 9], [1, 2]
    whole.choices[1].token_ids = [3]
    (only,) = StreamCursor("j", {}, 5).complete(whole, 1)
    assert only.prompt_token_ids == [8, 9]
    assert [choice.token_ids for choice in only.choices] == [[1, 2], [3]]
    cursor = StreamCursor("j", {}, 5)
    first = Delta(0, "a", token_ids=(1,), prompt_token_ids=(8, 9))
    cursor.take(Entry("j", 1, 1, (first,)))
    (rest,) = cursor.complete(whole, 1)
    assert [choice.token_ids for choice in rest.choices] == [[2], [3]]
    assert (rest.prompt_token_ids, rest.reset) == (None, None)


def test_output_of_a_lost_attempt_is_not_given_out() -> None:
    """A reader who comes later sees the newest attempt alone."""
    cursor = StreamCursor("j", {}, 5)
    cursor.attempt = 2
    entries = [Entry("j", 1, 1, (Delta(0, "old"),)), Entry("j", 2, 1, (Delta(0, "new"),))]
    assert [chunk.text for entry in entries for chunk in cursor.take(entry)] == ["new"]


def test_joined_deltas_keep_all_calls():
    (joined,) = join(DELTAS)
    assert joined == Delta(0, "ab", tool_calls=(F, G))
