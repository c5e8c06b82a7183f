"""Chat templates modelled on published ones, one for each kind of tokenizer, and plain ChatML."""

from __future__ import annotations

from tests.worker.tokenizers import Style

QWEN_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nSignatures within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' %}
{%- set ns.searching = false %}{%- set ns.last_query = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}
{{- call.function.arguments }}
{%- else %}
{{- call.function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set content = system + message['content'] if loop.index0 == 0 else message['content'] %}
{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{- ' ' + content.strip() + ' ' + eos_token }}
{%- endif %}
{% endfor %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set given = messages[0]['content'] -%}
    {%- set first_user_prefix = (given if given is string else given[0]['text']) + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
QWEN_CODER = """\
{%- if messages[0]["role"] == "system" %}
{{- "<|im_start|>system\\n" + messages[0]["content"] }}
{%- elif tools %}
{{- "<|im_start|>system\\nYou are Qwen." }}
{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
{{- "\\n\\nTools:\\n<tools>" }}
{%- for tool in tools %}
{{- "\\n<function>\\n<name>" ~ tool.function.name ~ "</name>\\n</function>" }}
{%- endfor %}
{{- "\\n</tools>" }}
{%- endif %}
{%- if messages[0]["role"] == "system" or tools %}{{- "<|im_end|>\\n" }}{%- endif %}
{%- for message in messages if message.role != "system" %}
{%- if message.role == "assistant" and message.tool_calls %}
{{- "<|im_start|>assistant" }}
{%- if message.content is string and message.content | trim %}
{{- "\\n" + message.content | trim + "\\n" }}
{%- endif %}
{%- for call in message.tool_calls %}
{{- "\\n<tool_call>\\n<function=" + call.function.name + ">\\n" }}
{%- for key, value in call.function.arguments | items %}
{{- "<parameter=" + key + ">\\n" }}
{{- value | tojson if value is mapping or value is iterable and value is not string else value }}
{{- "\\n</parameter>\\n" }}
{%- endfor %}
{{- "</function>\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- elif message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{{- "<|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
# As people write them for Gemma 3, with the prompt of Google's documentation.
GEMMA_TOOLS = """\
{{- bos_token }}
{%- set prefix -%}
{%- if tools -%}
You have access to functions. To call them, answer with [name(parameter=value), ...]: \
{{ tools | tojson }}

{% endif -%}
{%- endset -%}
{%- for message in messages %}
{{- "<start_of_turn>" + ("model" if message.role == "assistant" else "user") + "\\n" }}
{{- prefix if loop.first else "" }}
{%- if message.tool_calls %}
{{- "[" }}
{%- for call in message.tool_calls %}
{{- call.function.name + "(" }}
{%- for key, value in call.function.arguments | items %}
{{- key + "=" + (value | tojson) + ("" if loop.last else ", ") }}
{%- endfor %}
{{- ")" + ("" if loop.last else ", ") }}
{%- endfor %}
{{- "]" }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- "<end_of_turn>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\\n" }}{%- endif %}
"""
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
TEMPLATES: dict[Style, str] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "qwen": QWEN_TEMPLATE,
    "gemma": GEMMA,
    "harmony": HARMONY,
}
