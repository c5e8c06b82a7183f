"""The one Arrow schema of a result row. Each field's meaning is its metadata `description`.

A row is one choice of one job; (run_id, row_index, choice_index) is unique. Types are chosen so
that DuckDB, Polars, pandas and Hugging Face datasets all read them as they are: strings of JSON
where a shape isn't fixed, no map, no uuid, no type that is inferred from data.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

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
TOP_LOGPROBS = pa.list_(
    pa.list_(pa.struct([("token_id", pa.int32()), ("token", TEXT), ("logprob", pa.float32())]))
)


def _always(name: str, kind: pa.DataType, description: str) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"description": description})


def _maybe(name: str, kind: pa.DataType, description: str) -> pa.Field:
    return pa.field(name, kind, metadata={"description": description})


KEY = [
    _always("schema_version", pa.int16(), "version of these columns"),
    _always("run_id", TEXT, "the run that the job belongs to"),
    _always("job_id", TEXT, "id of the job"),
    _always("row_index", pa.int64(), "row of the input data set; from 2**62: a hash of the job id"),
    _always("choice_index", pa.int16(), "which of the n answers to the request"),
    _always("attempt", pa.int16(), "executions so far; 0: cancelled before the first"),
    _always("request_hash", TEXT, "SHA-256 of what the answer depends on, in canonical JSON"),
    _always("operation", TEXT, "chat"),
    _always("status", TEXT, "ok, error or cancelled"),
    _always("model", TEXT, "the model's name in the request"),
    _maybe("custom_id", TEXT, "the user's own key"),
    _maybe("sample_id", TEXT, "key of the sample in its data set"),
    _maybe("dataset", TEXT, "where the sample comes from"),
    _maybe("dataset_revision", TEXT, "version of the data set"),
    _maybe("dataset_split", TEXT, "split of the data set"),
]
INPUT = [
    _maybe("messages", MESSAGES, "the conversation; the parts of a content are joined"),
    _maybe("prompt", TEXT, "the prompt as text, after the chat template"),
    _maybe("prompt_token_ids", pa.list_(pa.int32()), "the prompt as the model saw it"),
    _maybe("continuation", TEXT, "the text that was scored, where one was given"),
    _maybe("tools", TEXT, "JSON: the tools of the request"),
    _maybe("response_format", TEXT, "JSON: the response_format of the request"),
    _maybe("target", TEXT, "the expected answer"),
    _maybe("metadata", TEXT, "JSON: the metadata of the request"),
]
OUTPUT = [
    _maybe("text", TEXT, "the answer; of an error or a cancellation, what there was of it"),
    _maybe("reasoning", TEXT, "what the model thought before it answered"),
    _maybe("tool_calls", TOOL_CALLS, "calls that the model asks for; arguments are JSON"),
    _maybe("parsed", TEXT, "JSON: the answer, where a JSON response_format was asked for"),
    _maybe("finish_reason", TEXT, "stop, length, tool_calls, cancelled or error"),
    _maybe("output_token_ids", pa.list_(pa.int32()), "the answer as the model wrote it"),
]
LIKELIHOOD = [
    _maybe("logprob_sum", pa.float64(), "natural log-probability of all output tokens together"),
    _maybe("is_greedy", pa.bool_(), "whether each scored token was the most probable one"),
    _maybe("scored_tokens", pa.int32(), "tokens in logprob_sum"),
    _maybe("scored_bytes", pa.int32(), "bytes of their text"),
    _maybe("token_logprobs", pa.list_(pa.float32()), "natural log-probability of each token"),
    _maybe("prompt_logprobs", pa.list_(pa.float32()), "the same for the prompt"),
    _maybe("top_logprobs", TOP_LOGPROBS, "the most probable tokens at each position"),
]
USAGE = [
    _maybe("input_tokens", pa.int32(), "tokens of the prompt"),
    _maybe("output_tokens", pa.int32(), "tokens of this answer"),
    _maybe("cached_tokens", pa.int32(), "tokens of the prompt that came from the cache"),
    _maybe("reasoning_tokens", pa.int32(), "output tokens that were thinking"),
]
TIMINGS = [
    _maybe("enqueued_at", TIME, "when the job was submitted"),
    _maybe("started_at", TIME, "when its prompt went into the model"),
    _maybe("first_token_at", TIME, "when its first token came out"),
    _maybe("finished_at", TIME, "when it ended"),
    _maybe("queue_s", pa.float64(), "seconds from enqueued_at to started_at"),
    _maybe("ttft_s", pa.float64(), "seconds from started_at to first_token_at"),
    _maybe("tpot_s", pa.float64(), "seconds per output token after the first"),
    _maybe("duration_s", pa.float64(), "seconds from started_at to finished_at"),
    _maybe("batch_size_avg", pa.float32(), "sequences that shared its forward passes"),
    _maybe("from_cache", pa.bool_(), "whether the answer was taken from an earlier one"),
]
ERROR = [
    _maybe("error_type", TEXT, "code of the error"),
    _maybe("error_message", TEXT, "what went wrong, for a person"),
    _maybe("error_retryable", pa.bool_(), "whether the same request may succeed later"),
]
SAMPLING = [
    _maybe("seed", pa.int64(), "the seed that was used, given or drawn"),
    _maybe("temperature", pa.float64(), "as used, like all of these"),
    _maybe("top_p", pa.float64(), "nucleus: probability mass that is kept"),
    _maybe("min_p", pa.float64(), "least probability, relative to the best token's"),
    _maybe("repetition_penalty", pa.float64(), "1: none"),
    _maybe("presence_penalty", pa.float64(), "0: none"),
    _maybe("frequency_penalty", pa.float64(), "0: none"),
    _maybe("top_k", pa.int32(), "how many tokens are kept; 0 or -1: all"),
    _maybe("max_tokens", pa.int32(), "limit of the answer's length"),
    _maybe("n", pa.int16(), "answers asked for"),
    _maybe("stop", pa.list_(TEXT), "strings that end an answer"),
    _maybe("sampling_extra", TEXT, "JSON: the other sampling fields that were set"),
]
PROVENANCE = [
    _maybe("model_revision", TEXT, "commit of the model's repository"),
    _maybe("model_fingerprint", TEXT, "hash of the weight files"),
    _maybe("tokenizer_hash", TEXT, "hash of the tokenizer"),
    _maybe("chat_template_hash", TEXT, "hash of the chat template"),
    _maybe("adapter", TEXT, "adapter on the weights"),
    _maybe("dtype", TEXT, "number format of the computation"),
    _maybe("quantization", TEXT, "how the weights are stored, if smaller"),
    _maybe("kv_cache_dtype", TEXT, "number format of the KV cache"),
    _maybe("attention", TEXT, "implementation of attention"),
    _maybe("batch_invariant", pa.bool_(), "whether neighbours in a batch can't change a result"),
    _maybe("engine", TEXT, "what generated the answer"),
    _maybe("engine_version", TEXT, "its version"),
    _maybe("torch_version", TEXT, "version of torch"),
    _maybe("cuda_version", TEXT, "version of CUDA"),
    _maybe("device_name", TEXT, "the device's product name"),
    _maybe("device_count", pa.int16(), "devices that shared the model"),
    _maybe("worker_id", TEXT, "name of the worker"),
    _maybe("host", TEXT, "machine of the worker"),
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


def leaves(schema: pa.Schema = SCHEMA) -> dict[str, pa.DataType]:
    """Parquet's leaf columns: dotted path to type."""
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
