"""Answers with tool calls, in the texts that each model family writes, and texts that are none."""

from __future__ import annotations

import json
from typing import Any

from worker.text.tool_call import Call

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "ratio": {"type": "number"},
            "places": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
            "until": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "note": {"type": ["string", "null"]},
            "free": {"description": "of any type"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def weather(**arguments: Any) -> Call:
    return Call("get_weather", json.dumps(arguments, ensure_ascii=False))


NOW = Call("now", "{}")
PARIS = weather(city="Paris")
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def coder(name: str, value: str) -> str:
    return CODER.replace("city", name).replace("Paris", value)


# Calls without one or more of their tags.
TAIL = "\n</tool_call>"
_TWO = "<function=get_weather><parameter=city>x y\n<parameter=days>2</parameter></function>"
OPEN_VALUES = (
    _TWO,
    f"<tool_call>{_TWO}</tool_call>",
    _TWO.replace("</parameter>", ""),
    _TWO.replace("\n", ""),
    _TWO.replace("\n", "</parameter></parameter>"),
    _TWO.replace("</function>", TAIL),
    _TWO.replace("</parameter></function>", TAIL),
)
OPEN_ENDS = (
    CODER.replace("</parameter>\n", ""),
    CODER.replace("</function>\n", ""),
    CODER.replace("</parameter>\n</function>\n", ""),
    CODER.replace("</parameter>\n", "").removesuffix(TAIL),
    CODER.replace("</function>\n", "").removeprefix("<tool_call>\n"),
)
CODE = (  # values that hold tags
    "a </parameter> b",
    "</function> and </tool_call> end a call",
    "</function></function>",
    "<function=f> begins one",
    "<tool_call> and </tool_call>",
)

LITERALS: list[tuple[str, Any]] = [  # as Python reads them
    *(("0x1F", 31), ("-0b101", -5), ("0o17", 15), ("1_000", 1000), ("+7", 7), ("- 2", -2)),
    *((".5", 0.5), ("5.", 5.0), ("-1_0.5e-1", -1.05), ("0", 0), ("00", 0)),
    *(("True", True), ("true", True), ("null", None)),
    ('"""a"""', "a"),
    ("'''a'b''\nc'''", "a'b''\nc"),
    ('"""a\\""" b"""', 'a""" b'),
    *(('""', ""), ("''''''", ""), ("''", "")),
    ("'a' \"b\"\n'''c'''", "abc"),
    *((r"r'a\n'", "a\\n"), ("u'a'", "a"), (r"'\d\''", "\\d'"), (r"'\x41\101\u00e9'", "AA\u00e9")),
    *((r"'\N{BULLET}'", "\u2022"), ("'a\\\nb'", "ab")),
    *(("(1, 2)", [1, 2]), ("(1,)", [1]), ("(1)", 1), ("('a' 'b')", "ab"), ("()", [])),
    *(("{1, 2, 1}", [1, 2]), ("{'a'}", ["a"]), ("{'a',}", ["a"]), ("set()", []), ("{}", {})),
    ("{'a': (1, {2}), 'b': -0x1}", {"a": [1, [2]], "b": -1}),
]

WELL_FORMED: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", HERMES, "", [PARIS]),
    ("hermes", f"\n\n{HERMES}\n", "", [PARIS]),
    ("hermes", f"{HERMES}\n{HERMES_NOW}", "", [PARIS, NOW]),
    ("hermes", f"I'll look.\n\n{HERMES}", "I'll look.", [PARIS]),
    ("hermes", f"First {HERMES} then\n{HERMES_NOW} done.", "First  then\n done.", [PARIS, NOW]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [PARIS]),
    ("hermes", HERMES.removesuffix("call>"), "", [PARIS]),
    ("hermes", HERMES.replace("Paris", "</tool_call> é"), "", [weather(city="</tool_call> é")]),
    ("hermes", HERMES.replace('"arguments"', '"parameters"'), "", [PARIS]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", HERMES.replace("get_weather", "unknown"), "", [Call("unknown", PARIS.arguments)]),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n'
        "</tool_call>",
        "",
        [PARIS],
    ),
    ("llama3_json", LLAMA, "", [PARIS]),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", [PARIS]),
    ("llama3_json", f"Let me see.<|python_tag|>{LLAMA}", "Let me see.", [PARIS]),
    ("llama3_json", f'{LLAMA}; {{"name": "now", "parameters": {{}}}}', "", [PARIS, NOW]),
    ("llama3_json", f'{LLAMA}\n{{"name": "now", "parameters": {{}}}};', "", [PARIS, NOW]),
    ("llama3_json", '{"type": "function", ' + LLAMA[1:], "", [PARIS]),
    ("llama3_json", LLAMA.replace("Paris", '}}\\"{{'), "", [weather(city='}}"{{')]),
    ("qwen3_coder", CODER, "", [PARIS]),
    ("qwen3_coder", f"Sure.\n\n{CODER}\n{CODER_NOW}", "Sure.", [PARIS, NOW]),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", [PARIS]),
    ("qwen3_coder", CODER.removesuffix("\n</tool_call>"), "", [PARIS]),
    ("qwen3_coder", CODER.replace("\n", ""), "", [PARIS]),
    ("qwen3_coder", CODER.replace("Paris", "a\n\n<b></c>\n"), "", [weather(city="a\n\n<b></c>\n")]),
    (
        "qwen3_coder",
        CODER.replace("Paris", "if x:\n    </function>"),
        "",
        [weather(city="if x:\n    </function>")],
    ),
    ("qwen3_coder", CODER.replace("Paris", "5"), "", [weather(city="5")]),
    ("qwen3_coder", coder("days", "5"), "", [weather(days=5)]),
    ("qwen3_coder", coder("days", "some"), "", [weather(days="some")]),
    ("qwen3_coder", coder("metric", "true"), "", [weather(metric=True)]),
    ("qwen3_coder", coder("metric", "False"), "", [weather(metric=False)]),
    ("qwen3_coder", coder("ratio", "2.5"), "", [weather(ratio=2.5)]),
    ("qwen3_coder", coder("ratio", "2"), "", [weather(ratio=2)]),
    ("qwen3_coder", coder("places", '["a", "b"]'), "", [weather(places=["a", "b"])]),
    ("qwen3_coder", coder("places", "['a', 'b']"), "", [weather(places=["a", "b"])]),
    ("qwen3_coder", coder("options", '{"x": null}'), "", [weather(options={"x": None})]),
    ("qwen3_coder", coder("until", "null"), "", [weather(until=None)]),
    ("qwen3_coder", coder("until", "3"), "", [weather(until=3)]),
    ("qwen3_coder", coder("note", "3"), "", [weather(note="3")]),
    ("qwen3_coder", coder("note", "null"), "", [weather(note=None)]),
    ("qwen3_coder", coder("free", "3"), "", [weather(free="3")]),
    ("qwen3_coder", coder("else", "3"), "", [weather(**{"else": "3"})]),
    *(("qwen3_coder", text, "", [weather(city="x y", days=2)]) for text in OPEN_VALUES),
    *(("qwen3_coder", text, "", [PARIS]) for text in OPEN_ENDS),
    (
        "qwen3_coder",
        f"{OPEN_ENDS[0]}\n{CODER_NOW.removesuffix(TAIL)}\n{CODER}",
        "",
        [PARIS, NOW, PARIS],
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=city>Paris</function> It is warm.",
        "It is warm.",
        [PARIS],
    ),
    ("qwen3_coder", CODER_NOW.replace("</function>\n", ""), "", [NOW]),
    *(("qwen3_coder", CODER.replace("Paris", text), "", [weather(city=text)]) for text in CODE),
    ("pythonic", '[get_weather(city="Paris")]', "", [PARIS]),
    ("pythonic", "[get_weather(city='Paris'), now()]", "", [PARIS, NOW]),
    (
        "pythonic",
        "[get_weather(city='a]\\'\\n\\u00e9', days=-2)]",
        "",
        [weather(city="a]'\né", days=-2)],
    ),
    (
        "pythonic",
        "[get_weather(options={'x': [1, 2.5e3, True, None]}, places=('a',))]",
        "",
        [weather(options={"x": [1, 2500.0, True, None]}, places=["a"])],
    ),
    *(
        ("pythonic", f"[get_weather(free={literal})]", "", [weather(free=value)])
        for literal, value in LITERALS
    ),
    ("pythonic", LLAMA, "", [PARIS]),
    ("pythonic", f"[{LLAMA}]", "", [PARIS]),
    ("pythonic", '```tool_code\nget_weather(city="Paris")\n```', "", [PARIS]),
    ("pythonic", '```tool_code\nprint(get_weather(city="Paris"))\nnow()\n```', "", [PARIS, NOW]),
    ("pythonic", '```tool_code\n[get_weather(city="Paris")]\n```', "", [PARIS]),
    ("pythonic", '```tool_code\nget_weather(city="Paris")\n', "", [PARIS]),
    ("pythonic", f"Okay.\n```json\n{LLAMA}\n```\n", "Okay.", [PARIS]),
    ("pythonic", f"```json\n[{LLAMA}, {LLAMA}]\n```", "", [PARIS, PARIS]),
]
MALFORMED: list[tuple[str, str]] = [
    ("hermes", "Just text."),
    ("hermes", " \n text with white space \n\n"),
    ("hermes", "<tool_call>"),
    ("hermes", "a <tool_ call>, a </tool_call> and a <tool"),
    ("hermes", HERMES.replace("}}", "}")),
    ("hermes", HERMES.replace('"Paris"', "Paris")),
    ("hermes", HERMES.replace('"Paris"', "NaN")),
    ("hermes", HERMES.replace('"Paris"', "1e999")),
    ("hermes", HERMES.replace("Paris", "\\ud800")),
    ("hermes", HERMES.replace("Paris", "a\nb")),
    ("hermes", HERMES.replace('{"city": "Paris"}', '["Paris"]')),
    ("hermes", HERMES.replace('"name"', '"title"')),
    ("hermes", HERMES.replace('"get_weather"', "7")),
    ("hermes", HERMES.replace("\n</tool", " and more\n</tool")),
    ("hermes", HERMES.replace('"Paris"', '"Paris", "city": "Rome"')),
    ("hermes", HERMES.replace('"Paris"', '{"a": 1, "a": 2}')),
    ("hermes", HERMES.replace('"arguments"', '"arguments": {}, "arguments"')),
    ("hermes", HERMES.replace('{"city": "Paris"}', '"{\\"city\\": 1, \\"city\\": 2}"')),
    ("hermes", HERMES[:50]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ' + '{"a":' * 100_000 + "</tool_call>"),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", '{"name": "get_weather", "parameters": {}, "note": "x"}'),
    ("llama3_json", f"The call is {LLAMA}."),
    ("llama3_json", LLAMA.replace('"Paris"', '"Paris", "city": "Rome"')),
    ("llama3_json", LLAMA[:-2]),
    ("llama3_json", "<|python_tag|>import math\nprint(math.pi)"),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", ";" + LLAMA),
    ("qwen3_coder", CODER.partition("</parameter>")[0]),
    ("qwen3_coder", CODER.partition("</function>")[0]),
    ("qwen3_coder", CODER.replace("</parameter>\n", "").partition("</function>")[0]),
    ("qwen3_coder", CODER.replace("</parameter>", "</parameter> and")),
    ("qwen3_coder", coder("city", "x</parameter>\ny\n<parameter=days>\n2")),
    ("qwen3_coder", coder("city", "x\n</function>\n<parameter=days>\n2")),
    ("qwen3_coder", coder("city", "x\n<parameter=city>\n2")),
    ("qwen3_coder", CODER.replace("<function=get_weather>", "<function>")),
    ("qwen3_coder", CODER.replace("<parameter=city>", "<param>")),
    ("qwen3_coder", CODER[:60]),
    ("qwen3_coder", HERMES),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[get_weather(city=Paris)]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[get_weather(city='Paris', city='Rome')]"),
    ("pythonic", "[get_weather(options={'a': 1, 'a': 2})]"),
    *(
        ("pythonic", f"[get_weather(free={literal})]")
        for literal in (
            *("b'a'", "f'a'", "1j", "007", "0x", "1__0", "--1", "1 + 1", "'a' + 'b'", "{1: 2}"),
            *(
                "{'a': 1, 2}",
                "{1, 'a': 2}",
                r"'\N{NO SUCH}'",
                r"'\x4'",
                "'a\nb'",
                "set([1])",
                "...",
                "'a'1",
            ),
            *("9" * 5000, "'\ud800'", "'''a''", "rb'a'", "a", "nan", "1e999"),
        )
    ),
    ("pythonic", LLAMA.replace('"Paris"', '"Paris", "city": "Rome"')),
    ("pythonic", "[other(city='Paris')]"),
    ("pythonic", "[get_weather(city='Paris'"),
    ("pythonic", "[get_weather(places=" + "[" * 100_000 + ")]"),
    ("pythonic", "```python\nget_weather(city='Paris')\n```"),
    ("pythonic", "```tool_code\nimport os\n```"),
    ("pythonic", "```tool_code\nget_weather(city='Paris').x\n```"),
    ("pythonic", '```json\n{"name": "Bob", "age": 5}\n```\n'),
    ("pythonic", "```jsonc\n" + LLAMA + "\n```"),
    ("pythonic", "```json\n[]\n```"),
]
