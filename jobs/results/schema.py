"""The Arrow schema of a result row. Each field is described by its metadata key `description`.

A row is one choice of one chat, one scored continuation, one pick among choices or one scored text;
(run_id, row_index, repeat_index, choice_index) is unique. DuckDB, Polars, pandas and Hugging Face
datasets all read the types without conversion: JSON text where the structure varies, no maps, no
UUIDs, no types inferred from data.
"""

from __future__ import annotations

import pyarrow as pa

from jobs.results.rows import SCHEMA_VERSION

TEXT = pa.string()
TIME = pa.timestamp("us", tz="UTC")
TOOL_CALLS = pa.list_(
    pa.struct(
        [
            ("id", TEXT),
            ("type", TEXT),
            ("function", pa.struct([("name", TEXT), ("arguments", TEXT)])),
        ]
    )
)
MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", TEXT),
            ("content", TEXT),
            ("reasoning_content", TEXT),
            ("name", TEXT),
            ("tool_call_id", TEXT),
            ("tool_calls", TOOL_CALLS),
        ]
    )
)
FAILURES = pa.list_(
    pa.struct(
        [("attempt", pa.int16()), ("at", TIME), ("worker", TEXT), ("code", TEXT), ("message", TEXT)]
    )
)
CHOICES = pa.list_(
    pa.struct(
        [
            ("text", TEXT),
            ("logprob_sum", pa.float64()),
            ("is_greedy", pa.bool_()),
            ("scored_tokens", pa.int32()),
            ("scored_bytes", pa.int32()),
        ]
    )
)
TOP_LOGPROBS = pa.list_(
    pa.list_(pa.struct([("token_id", pa.int32()), ("token", TEXT), ("logprob", pa.float32())]))
)


def _required(name: str, kind: pa.DataType, description: str) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"description": description})


def _optional(name: str, kind: pa.DataType, description: str) -> pa.Field:
    return pa.field(name, kind, metadata={"description": description})


KEY = [
    _required("schema_version", pa.int16(), "version of these columns"),
    _required("run_id", TEXT, "run that the job belongs to"),
    _required("job_id", TEXT, "id of the job"),
    _required(
        "row_index", pa.int64(), "row in the input data set; 2**62 and above: hash of the job id"
    ),
    _required(
        "repeat_index", pa.int32(), "which sample of the input row; 0 unless there are several"
    ),
    _required(
        "choice_index",
        pa.int16(),
        "index of the answer among the n requested, or of the continuation among those given",
    ),
    _required("attempt", pa.int16(), "number of the attempt; 0: cancelled before the first"),
    _required("request_hash", TEXT, "SHA-256 of the request fields that affect the answer"),
    _required("operation", TEXT, "chat, loglikelihood, choice or perplexity"),
    _required("status", TEXT, "ok, error or cancelled"),
    _required("model", TEXT, "model name in the request"),
    _optional("custom_id", TEXT, "key given by the user"),
    _optional("session", TEXT, "session given by the user"),
    _optional("tenant", TEXT, "tenant given by the user"),
    _optional("tags", pa.list_(TEXT), "tags given by the user"),
    _optional("dataset", TEXT, "data set of the sample; reserved, null today"),
]
INPUT = [
    _optional("messages", MESSAGES, "the conversation; parts of a message's content are joined"),
    _optional("prompt", TEXT, "text of a prompt that is no conversation, or the text to score"),
    _optional(
        "prompt_token_ids", pa.list_(pa.int32()), "token ids of the prompt, after the chat template"
    ),
    _optional("continuation", TEXT, "the text that was scored after the prompt"),
    _optional("tools", TEXT, "JSON: tools of the request"),
    _optional("response_format", TEXT, "JSON: response_format of the request"),
    _optional("target", TEXT, "expected answer"),
    _optional("metadata", TEXT, "JSON: metadata of the request"),
]
OUTPUT = [
    _optional(
        "text", TEXT, "the answer, or the choice that was picked; partial if the job didn't finish"
    ),
    _optional("reasoning", TEXT, "reasoning before the answer"),
    _optional("tool_calls", TOOL_CALLS, "tool calls of the answer; arguments are JSON"),
    _optional("parsed", TEXT, "JSON: the answer, if the response_format is JSON and it is valid"),
    _optional("finish_reason", TEXT, "stop, length, tool_calls, cancelled or error"),
    _optional(
        "output_token_ids", pa.list_(pa.int32()), "token ids of the answer, or the scored ones"
    ),
    _optional(
        "tokens", pa.list_(TEXT), "text of each output token, if log-probabilities were requested"
    ),
]
LIKELIHOOD = [
    _optional("logprob_sum", pa.float64(), "sum of token_logprobs"),
    _optional("is_greedy", pa.bool_(), "whether every scored token was the most probable one"),
    _optional("scored_tokens", pa.int32(), "tokens in logprob_sum"),
    _optional("scored_bytes", pa.int32(), "UTF-8 bytes of the scored text, without its delimiter"),
    _optional("scored_words", pa.int32(), "words of a scored text, as white space separates them"),
    _optional("truncated_tokens", pa.int32(), "tokens that were cut from the left of the prompt"),
    _optional(
        "token_logprobs", pa.list_(pa.float32()), "natural log-probability of each output token"
    ),
    _optional("choices", CHOICES, "the texts to pick from, with the scores of each"),
    _optional("picked_index", pa.int16(), "index in choices of the one that was picked"),
    _optional("top_logprobs", TOP_LOGPROBS, "the most probable tokens at each position"),
]
USAGE = [
    _optional("input_tokens", pa.int32(), "tokens of the prompt"),
    _optional("output_tokens", pa.int32(), "tokens of this answer"),
    _optional("cached_tokens", pa.int32(), "prompt tokens read from a cache"),
    _optional("reasoning_tokens", pa.int32(), "tokens of this answer spent on reasoning"),
    _optional(
        "drafted_tokens", pa.int32(), "tokens that a draft proposed for this answer; null: no draft"
    ),
    _optional("accepted_tokens", pa.int32(), "tokens of the draft that were right"),
    _optional("draft_steps", pa.int32(), "steps in which tokens of the draft were verified"),
    _optional(
        "peak_memory_mb", pa.int32(), "MB that the device had in use at most while the job ran"
    ),
]
TIMINGS = [
    _optional("enqueued_at", TIME, "when the job was submitted"),
    _optional("started_at", TIME, "start of the first prefill"),
    _optional("first_token_at", TIME, "when the first token was generated"),
    _optional("finished_at", TIME, "when the job ended"),
    _optional("queue_s", pa.float64(), "seconds from enqueued_at to started_at"),
    _optional("ttft_s", pa.float64(), "seconds from started_at to first_token_at"),
    _optional("tpot_s", pa.float64(), "seconds per output token after the first"),
    _optional("duration_s", pa.float64(), "seconds from started_at to finished_at"),
]
ERROR = [
    _optional("error_type", TEXT, "error code"),
    _optional("error_message", TEXT, "error message"),
    _optional("error_retryable", pa.bool_(), "whether the same request may succeed if sent again"),
    _optional("failures", FAILURES, "the failed attempts, up to ten: when, where and why"),
]
SAMPLING = [
    _optional("seed", pa.int64(), "seed used, given or drawn"),
    _optional("temperature", pa.float64(), "sampling temperature; 0: greedy"),
    _optional("top_p", pa.float64(), "probability mass kept by nucleus sampling"),
    _optional("min_p", pa.float64(), "minimum probability relative to the most probable token"),
    _optional("repetition_penalty", pa.float64(), "factor on repeated tokens; 1: none"),
    _optional("presence_penalty", pa.float64(), "penalty for tokens already used; 0: none"),
    _optional("frequency_penalty", pa.float64(), "penalty per use of a token; 0: none"),
    _optional("top_k", pa.int32(), "number of tokens kept; 0 or -1: all"),
    _optional("max_tokens", pa.int32(), "maximum tokens of an answer"),
    _optional("n", pa.int16(), "number of answers requested"),
    _optional("stop", pa.list_(TEXT), "strings that end an answer"),
    _optional("sampling_extra", TEXT, "JSON: other sampling fields of the request"),
]
PROVENANCE = [
    _optional("model_revision", TEXT, "commit of the model's repository"),
    _optional("model_fingerprint", TEXT, "hash of the weight files"),
    _optional("tokenizer_hash", TEXT, "hash of the tokenizer"),
    _optional(
        "chat_template_hash", TEXT, "hash of the chat template, the model's or the request's"
    ),
    _optional("dtype", TEXT, "data type of the computation, and of quantised weights"),
    _optional("engine", TEXT, "engine that generated the answer"),
    _optional("engine_version", TEXT, "version of the engine"),
    _optional("torch_version", TEXT, "version of torch"),
    _optional("cuda_version", TEXT, "version of CUDA"),
    _optional("device_name", TEXT, "product name of the device"),
    _optional("worker_id", TEXT, "name of the worker"),
    _optional("host", TEXT, "host of the worker"),
]

SCHEMA = pa.schema(
    [
        *KEY,
        *INPUT,
        *OUTPUT,
        *LIKELIHOOD,
        *USAGE,
        *TIMINGS,
        *ERROR,
        *SAMPLING,
        *PROVENANCE,
    ],
    metadata={"chatjobs.schema_version": str(SCHEMA_VERSION)},
)


# Columns of the key and the state of a row, which the files of every version have.
OLDEST = ("row_index", "choice_index", "status")


def foreign_fault(schema: pa.Schema) -> str | None:
    """Why a Parquet file with this schema has no rows of a run, as one that another program has
    written; None if it may have some. Programs that rewrite files change the width of types."""
    for name in OLDEST:
        place = schema.get_field_index(name)
        if place < 0:
            return f"no file of chatjobs: it has no column {name!r}"
        found, kind = schema.field(place).type, SCHEMA.field(name).type
        if not (pa.types.is_integer(found) if pa.types.is_integer(kind) else _is_text(found)):
            return f"no file of chatjobs: its column {name!r} has the type {found}"
    return None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def leaves(schema: pa.Schema = SCHEMA) -> dict[str, pa.DataType]:
    """Leaf columns of the Parquet file: dotted path → type."""
    found: dict[str, pa.DataType] = {}

    def walk(path: str, kind: pa.DataType) -> None:
        if pa.types.is_list(kind):
            walk(f"{path}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for field in kind:
                walk(f"{path}.{field.name}", field.type)
        else:
            found[path] = kind

    for field in schema:
        walk(field.name, field.type)
    return found
