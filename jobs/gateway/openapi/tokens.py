"""The operations that count tokens."""

from __future__ import annotations

from jobs.gateway.openapi.operation import (
    JSON,
    Family,
    Operation,
    Schema,
    object_of,
    of_query,
    ref,
)

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
FLAG: Schema = {"type": ["boolean", "null"]}
MODEL: Schema = {"type": "string", "description": "May be left out while one is served."}
IDS: Schema = {"type": "array", "items": INTEGER}
CONTEXT: Schema = {"type": ["integer", "null"], "description": "Tokens of a sequence."}

REQUEST = object_of(
    {
        "model": MODEL,
        "prompt": TEXT,
        "messages": {"type": "array", "items": ref("Message"), "minItems": 1},
        "tools": {"type": ["array", "null"], "items": ref("Tool")},
        "chat_template_kwargs": {"type": ["object", "null"]},
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "add_special_tokens": FLAG,
        "return_token_strs": FLAG,
    },
    *("model", "prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "return_token_strs"),
    description="A prompt, or messages with the fields of a chat that are about its prompt.",
    oneOf=[{"required": ["prompt"]}, {"required": ["messages"]}],
)
REPLY = object_of(
    {
        "count": {"type": "integer", "description": "usage.prompt_tokens of such a job."},
        "max_model_len": CONTEXT,
        "tokens": IDS,
        "token_strs": {"type": ["array", "null"], "items": TEXT},
    }
)
ERRORS = frozenset({400, 404})

FAMILY = Family(
    "tokens",
    {
        ("POST", "/tokenize"): Operation(
            "tokenize",
            "The token ids of a prompt or of messages.",
            {JSON: REPLY},
            body={JSON: REQUEST},
            errors=ERRORS,
        ),
        ("POST", "/detokenize"): Operation(
            "detokenize",
            "The text of token ids.",
            {JSON: object_of({"prompt": TEXT})},
            body={JSON: object_of({"model": MODEL, "tokens": IDS}, "model")},
            errors=ERRORS,
        ),
        ("GET", "/tokenizer_info"): Operation(
            "getTokenizer",
            "Special tokens and chat template of a model.",
            {
                JSON: object_of(
                    {
                        "model": TEXT,
                        "model_max_length": CONTEXT,
                        "chat_template": {"type": ["string", "null"]},
                        "vocab_size": INTEGER,
                    },
                    description="Special tokens have names such as eos_token.",
                )
            },
            errors=ERRORS,
            parameters=[of_query("model", "May be left out while one is served.")],
        ),
    },
)
