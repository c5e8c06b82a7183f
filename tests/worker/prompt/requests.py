"""Shared by the tests of prompts: messages, builders, and what transformers renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from jobs import ChatRequest
from tests.worker.sources import open_folder
from tests.worker.tokenizers import Style, save_tokenizer
from worker.prompt.builder import PromptBuilder
from worker.prompt.template import ChatTemplate

SYSTEM = {"role": "system", "content": "Answer briefly.  Größe & <b>Ordnung</b>!"}
HELLO = {"role": "user", "content": " Hello, 你好 🎉 \n"}
ANSWER = {"role": "assistant", "content": "Hi there."}
AGAIN = {"role": "user", "content": "And 2 + 3?"}
THOUGHT = {"role": "assistant", "content": "Hi.", "reasoning_content": "\nGreet back.\n"}
INLINE = {"role": "assistant", "content": "<think>\nGreet.\n</think>\n\nHi."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": '{"city": "Köln", "days": [1, 2.5, null]}',
            },
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <soon> in a city's centre",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "default": None}},
                "required": ["city"],
            },
        },
    }
]


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=list(messages), **fields)


def builder(folder: Path, context: int = 4096) -> PromptBuilder:
    source = open_folder(folder)
    return PromptBuilder(source.name, source.tokenizer, ChatTemplate.of(source), context)


def expected(folder: Path, wanted: ChatRequest) -> str:
    """The prompt that transformers renders for the same request."""
    messages = []
    for message in wanted.messages:
        plain = message.to_dict()
        for call in plain.get("tool_calls", []):  # its documentation asks for objects here
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        messages.append(plain)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    text: str = theirs.apply_chat_template(
        messages,
        tools=[tool.to_dict() for tool in wanted.tools] if wanted.tools else None,
        tokenize=False,
        add_generation_prompt=True,
        **(wanted.chat_template_kwargs or {}),
    )
    return text


def save(folder: Path, style: Style, template: Any) -> Path:
    save_tokenizer(folder, style, template)
    return folder


def template(source: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **others}, {"eos_token": "</s>"})


def rendered(source: str, wanted: ChatRequest, folder: Path) -> str:
    return builder(save(folder, "qwen", source)).build(wanted).text
