"""The endpoints of batches: a line's body as the request of its job, and the rows of the job as the
body of its response. Both are those that the endpoint itself has, without a stream.

A response is made of rows, so what rows do not hold is refused before the job is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobs.api.answer import ChatCompletion
from jobs.errors import JobError, invalid
from jobs.gateway.completions.answers import reply
from jobs.gateway.completions.asked import Call, Echo, about_prompt
from jobs.gateway.options import take_background, take_flag
from jobs.gateway.responses.answers import finished
from jobs.gateway.responses.asked import Asked, renamed

Body = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

OWN_OPTIONS = ("id", "run", "row", "repeat", "custom_id")  # of a job, which the batch sets


@dataclass(frozen=True, slots=True)
class Form:
    """One endpoint. `request`: the fields of a chat; raises InvalidRequest. `response`: the body,
    of the answer in the form of a chat. `renamed`: an error of the chat with its own names."""

    request: Callable[[dict[str, Any]], Body]
    response: Callable[[Body, dict[str, Any], Rows], dict[str, Any]]
    renamed: Callable[[JobError], JobError]


def request_of(endpoint: str, body: Body) -> Body:
    """The request of the job for a line with this body. Raises InvalidRequest."""
    rest = dict(body)
    take_background(rest)
    if take_flag(rest, "stream"):
        raise invalid("stream: the answers of a batch are not streamed: remove it", "stream")
    if rest.get("store") is False:
        raise invalid(
            "store: the files of a batch are made of its rows, which would have no answer: remove "
            "it",
            "store",
        )
    if isinstance(options := rest.get("job"), dict):
        for name in OWN_OPTIONS:
            if options.get(name) is not None:
                raise invalid(f"job.{name}: the batch sets it: remove it", f"job.{name}")
    return FORMS[endpoint].request(rest)


def response_of(endpoint: str, body: Body, answer: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """The body of the response to a line with this body. `answer`: a ChatCompletion in JSON, which
    the rows of its job are. Raises InvalidRequest for a body that `request_of` refuses."""
    return FORMS[endpoint].response(body, answer, rows)


def renamed_for(endpoint: str, error: JobError) -> JobError:
    """An error of a line's job, with the names of fields that the endpoint has."""
    return FORMS[endpoint].renamed(error)


def _chat(body: dict[str, Any]) -> Body:
    if body.get("prompt_logprobs") is not None:
        raise invalid(
            "prompt_logprobs: a batch has no log-probabilities of prompts: send the request to "
            "/v1/chat/completions",
            "prompt_logprobs",
        )
    return body


def _chat_response(body: Body, answer: dict[str, Any], rows: Rows) -> dict[str, Any]:
    if body.get("return_token_ids") is not True:
        return answer
    for choice, row in zip(answer["choices"], rows, strict=True):
        choice["token_ids"] = row["output_token_ids"]
    return {**answer, "prompt_token_ids": rows[0]["prompt_token_ids"]}


def _completion(body: dict[str, Any]) -> Body:
    call = Call.read(body)
    if len(call.prompts) > 1:
        raise invalid(
            f"prompt: a line of a batch has one prompt, got {len(call.prompts)}: write a line for "
            "each",
            "prompt",
        )
    if call.echo and call.logprobs is not None:
        raise invalid(
            "logprobs: a batch has no log-probabilities of prompts: remove echo, or send the "
            "request to /v1/completions",
            "logprobs",
        )
    if call.echo and not isinstance(call.prompts[0], str):
        raise invalid(
            "echo: a batch has no text of a prompt of token ids: send a text, or remove echo",
            "echo",
        )
    return call.jobs()[0]


def _completion_response(body: Body, answer: dict[str, Any], rows: Rows) -> dict[str, Any]:
    call = Call.read({name: value for name, value in body.items() if name != "background"})
    call = replace(call, echoes=[Echo.of(prompt, None) for prompt in call.prompts])
    answer = _chat_response(body, answer, rows)
    return reply(call, rows[0]["job_id"], [ChatCompletion.model_validate(answer)])


def _response(body: dict[str, Any]) -> Body:
    asked = _asked(body)
    if asked.response["previous_response_id"] is not None:
        raise invalid(
            "previous_response_id: a line of a batch goes on from no response: send the "
            "conversation as input",
            "previous_response_id",
        )
    chat = {name: value for name, value in asked.chat.items() if name != "store"}
    options = {name: value for name, value in chat["job"].items() if name != "id"}
    return {**chat, "job": options}


def _response_response(body: Body, answer: dict[str, Any], rows: Rows) -> dict[str, Any]:
    job = {**(body.get("job") or {}), "id": rows[0]["job_id"]}
    asked = _asked({**body, "job": job})
    response = {**asked.response, "created_at": answer["created"]}
    return finished(replace(asked, response=response), ChatCompletion.model_validate(answer))


def _asked(body: Body) -> Asked:
    """A response of a batch is in its file, and is not stored."""
    rest = {name: value for name, value in body.items() if name != "background"}
    return Asked.read({**rest, "store": False})


def _same(error: JobError) -> JobError:
    return error


CHAT = "/v1/chat/completions"
FORMS = {
    CHAT: Form(_chat, _chat_response, _same),
    "/v1/completions": Form(_completion, _completion_response, about_prompt),
    "/v1/responses": Form(_response, _response_response, renamed),
}
ENDPOINTS = tuple(FORMS)
