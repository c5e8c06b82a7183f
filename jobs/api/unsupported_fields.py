"""Fields of other APIs that this project does not implement: ignored, or refused with a reason.

A field of these tables that is null or empty is dropped silently, and so is one at a neutral value.
docs/requests.md lists every field.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from jobs.errors import invalid

# Fields of a request that have no effect on a local text model, with their neutral value.
IGNORED_FIELDS: dict[str, Any] = {
    "audio": None,
    "early_stopping": False,  # of beam search, as is the next one
    "length_penalty": 1.0,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "moderation": None,
    "prediction": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "spaces_between_special_tokens": True,
    "verbosity": None,
}
# Fields of a message, a content part, a tool call, its function or a tool that have no effect.
IGNORED_IN_MESSAGE = frozenset(
    (
        "annotations",
        "cache_control",
        "images",
        "parsed",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    )
)
IGNORED_IN_PART = frozenset(("annotations", "cache_control", "prompt_cache_breakpoint"))
IGNORED_IN_CALL = frozenset(("cache_control", "caller", "provider_specific_fields"))
IGNORED_IN_TOOL = frozenset(("cache_control",))
IGNORED_IN_FUNCTION = frozenset(("parsed_arguments", "provider_specific_fields"))


class Refused(NamedTuple):
    """A field that would change the answer and can't be done."""

    neutral: Any  # the value without effect, which is taken
    hint: str  # what to do instead


_FUNCTIONS = "it is OpenAI's former name of tools and tool_choice: use these"
_FORM = "remove it"
REFUSED_FIELDS: dict[str, Refused] = {
    "best_of": Refused(1, "use n, and choose among the answers"),
    "echo": Refused(False, "the prompt is in the result row"),
    "function_call": Refused("none", _FUNCTIONS),
    "functions": Refused(None, _FUNCTIONS),
    "guided_decoding_backend": Refused(None, "llguidance is the only one"),
    "guided_whitespace_pattern": Refused(
        None, "JSON has up to 8 characters of white space between its tokens"
    ),
    "include_reasoning": Refused(True, "read content alone"),
    "kv_transfer_params": Refused(None, _FORM),
    "logits_processors": Refused(None, "use logit_bias, bad_words or allowed_token_ids"),
    "modalities": Refused(["text"], "only text is generated"),
    "priority": Refused(0, 'use job.priority: "interactive" or "bulk"'),
    "return_tokens_as_token_ids": Refused(False, "token ids are in the result row"),
    "use_beam_search": Refused(False, "use n, and choose among the answers"),
    "vllm_xargs": Refused(None, _FORM),
    "web_search_options": Refused(None, "search before, and put the results into the messages"),
}


def drop_ignored(
    data: dict[str, Any], names: frozenset[str], path: str, ignored: list[str]
) -> dict[str, Any]:
    """`data` without the fields `names`; those that have a value are added to `ignored`."""
    ignored += [f"{path}.{name}" for name in names & data.keys() if not is_empty(data[name])]
    return {key: value for key, value in data.items() if key not in names}


def drop_stream_options(data: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """stream_options without the fields that official clients send and this project lacks."""
    usage = data.get("continuous_usage_stats")
    if not is_empty(usage) and not _same(usage, False):
        path = "stream_options.continuous_usage_stats"
        hint = "include_usage ends the stream with the token counts"
        raise invalid(f"{path} is not supported (only false is taken): {hint}", path)
    if _same(data.get("include_obfuscation"), False):
        data = {**data, "include_obfuscation": None}
    names = frozenset(("continuous_usage_stats", "include_obfuscation"))
    return drop_ignored({**data, "continuous_usage_stats": None}, names, "stream_options", ignored)


def drop_unsupported(data: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A request without the fields of the tables above. Raises InvalidRequest for a refused one."""
    kept = {}
    for name, value in data.items():
        if name in REFUSED_FIELDS:
            neutral, hint = REFUSED_FIELDS[name]
            if not is_empty(value) and not _same(value, neutral):
                values = "" if neutral is None else f" (only {json.dumps(neutral)} is taken)"
                raise invalid(f"{name} is not supported{values}: {hint}", name)
        elif name in IGNORED_FIELDS:
            if not is_empty(value) and not _same(value, IGNORED_FIELDS[name]):
                ignored.append(name)
        else:
            kept[name] = value
    return kept


def is_empty(value: Any) -> bool:
    """True for an empty value: null, an empty string or list, or an object of such values."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str | list | tuple) and not value)


def _same(value: Any, neutral: Any) -> bool:
    """Equality in JSON, where true is not 1; for a switch, 0 and 1 are taken as clients send it."""
    if isinstance(value, bool) and not isinstance(neutral, bool):
        return False
    return bool(value == neutral)
