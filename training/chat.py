"""The chat format of the demo model: its template, and the same rendering in plain Python.

The template is written to tokenizer_config.json. Training uses `render_prompt`, which is faster; a
test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
THINK = "<think>"
END_THINK = "</think>"
EMPTY_THINK = f"{THINK}\n\n{END_THINK}\n\n"

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_query=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = text_of(message.content) -%}
    {%- if message.role == 'system' or message.role == 'developer' -%}
        {{- '<|im_start|>system\n' + content + '<|im_end|>\n' -}}
    {%- elif message.role == 'user' or message.role == 'tool' -%}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set reasoning = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set reasoning = message.reasoning_content.strip('\n') -%}
        {%- elif '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
        {%- endif -%}
        {%- if '</think>' in content -%}
            {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) -%}
            {{- '<think>\n' + reasoning + '\n</think>\n\n' -}}
        {%- endif -%}
        {{- content + '<|im_end|>\n' -}}
    {%- else -%}
        {{- raise_exception('unknown role ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\n\n</think>\n\n' -}}
    {%- endif -%}
{%- endif -%}
""".strip()


def render_prompt(messages: Sequence[dict[str, str]], thinking: bool = True) -> str:
    """The prompt up to the start of the reply, as the template renders it.

    Earlier assistant turns must be content without a think block.
    """
    turns = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
    return f"{turns}{IM_START}assistant\n{'' if thinking else EMPTY_THINK}"


def render_reply(reasoning: str, answer: str, thinking: bool = True) -> str:
    """The reply to learn after `render_prompt`, including its end token."""
    if not thinking:
        return f"{answer}{IM_END}"
    if not reasoning:
        return f"{EMPTY_THINK}{answer}{IM_END}"
    return f"{THINK}\n{reasoning}\n{END_THINK}\n\n{answer}{IM_END}"
