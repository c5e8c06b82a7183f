"""The body of a chat request for an upstream, in OpenAI's form with the extensions of vLLM."""

from __future__ import annotations

from typing import Any

from jobs.api.request import ChatRequest
from jobs.encoding import to_json
from jobs.errors import invalid

# Fields that stay with the job.
OWN = frozenset(
    ("job", "model", "user", "metadata", "store", "stream", "stream_options", "enable_thinking")
)
# Fields that an upstream can't do over HTTP as they are meant, with what to do instead.
REFUSED = {
    "prompt_logprobs": "servers don't stream them: use a worker with the model's files",
    "prompt_token_ids": "it is sent messages: use a worker with the model's files",
    "truncate": "it needs the model's tokenizer: shorten the messages, or use a worker with the "
    "model's files",
}
ROLES = {"function": "tool", "ipython": "tool"}  # other names of a role, by OpenAI's


def body_of(request: ChatRequest, model: str, shown: str) -> str:
    """JSON text. `model`: its name there; `shown`: the address of the upstream, for errors. Fields
    are sent as the request has them, and none that it has not. Raises InvalidRequest for a field
    that would have no effect."""
    for name, instead in REFUSED.items():
        if getattr(request, name) is not None:
            raise invalid(
                f"{name} is not possible with the upstream {shown}: {instead}",
                name,
            )
    if request.apply_chat_template is False:
        raise invalid(
            f"apply_chat_template: the upstream {shown} applies its template: remove it",
            "apply_chat_template",
        )
    if request.separate_reasoning is False:
        raise invalid(
            f"separate_reasoning: the upstream {shown} decides how it returns reasoning: remove it",
            "separate_reasoning",
        )
    given = request.to_dict()
    body: dict[str, Any] = {name: value for name, value in given.items() if name not in OWN}
    body.pop("apply_chat_template", None)
    body.pop("separate_reasoning", None)
    for message in body["messages"]:
        message["role"] = ROLES.get(message["role"], message["role"])
        message.setdefault("content", None)
    if request.enable_thinking is not None:
        template = body.setdefault("chat_template_kwargs", {})
        template.setdefault("enable_thinking", request.enable_thinking)
    body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    return to_json(body)
