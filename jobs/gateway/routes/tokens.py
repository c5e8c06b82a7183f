"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them: token ids without a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.request import ChatRequest
from jobs.api.wire import describe
from jobs.errors import InvalidRequest, invalid
from jobs.gateway.bodies import read_json
from jobs.gateway.endpoints import route
from jobs.gateway.failures import JsonReply
from jobs.gateway.gateway import Gateway
from jobs.gateway.options import about, take_flag
from jobs.gateway.tenants import Tenant

# Fields of a chat that need what only its job has: the turns so far, or the room of a context.
OF_JOBS = (
    *("job", "truncate", "truncate_prompt_tokens", "prompt_token_ids", "apply_chat_template"),
    "chat_template",  # which is rendered only where a worker was told to
)
OF_TEXTS = {"model", "prompt", "add_special_tokens"}


def routes(gateway: Gateway) -> list[Route]:
    tokens = _Tokens(gateway)
    return [
        route(gateway, "POST", "/tokenize", tokens.tokenize),
        route(gateway, "POST", "/detokenize", tokens.detokenize),
        route(gateway, "GET", "/tokenizer_info", tokens.info),
    ]


class _Tokens:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: Request, tenant: Tenant) -> ASGIApp:
        """The token ids that a job with this prompt, or these messages, would have."""
        body = await self._read(request)
        wants_pieces = take_flag(body, "return_token_strs")
        model = await self._gateway.models.find(body.get("model"))
        prompts = await self._gateway.tokenizers.of(model)

        def work() -> JsonReply:
            ids = prompts.encode(_chat_of({**body, "model": model.id}))
            return JsonReply(
                {
                    "count": len(ids),
                    "max_model_len": model.max_model_len,
                    "tokens": ids,
                    "token_strs": prompts.pieces(ids) if wants_pieces else None,
                }
            )

        return await self._gateway.tokenizers.run(work)

    async def detokenize(self, request: Request, tenant: Tenant) -> ASGIApp:
        """The text of token ids."""
        body = await self._read(request)
        _refuse(body.keys() - {"model", "tokens"}, "model, tokens")
        model = await self._gateway.models.find(body.get("model"))
        prompts = await self._gateway.tokenizers.of(model)

        def work() -> JsonReply:
            ids = _ids_of(body.get("tokens"), model.id, prompts.vocab_size)
            return JsonReply({"prompt": prompts.decode(ids)})

        return await self._gateway.tokenizers.run(work)

    async def info(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Special tokens and chat template of the model in the query."""
        model = await self._gateway.models.find(request.query_params.get("model"))
        prompts = await self._gateway.tokenizers.of(model)
        about = {"model": model.id, "model_max_length": model.max_model_len}
        return JsonReply(about | prompts.info())

    async def _read(self, request: Request) -> dict[str, Any]:
        settings = self._gateway.settings
        return await read_json(request, settings.max_body, settings.read_seconds)


def _ids_of(ids: Any, model: str, size: int) -> list[int]:
    """The token ids of a request. `size`: of the vocabulary. Raises InvalidRequest."""
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise invalid(f"tokens: expected a list of token ids, got {describe(ids)}", "tokens")
    for number, one in enumerate(ids):
        if not 0 <= one < size:
            raise invalid(
                f"tokens[{number}]: {one} is no token of {model}, whose ids are below {size}",
                "tokens",
            )
    return ids


def _chat_of(body: Mapping[str, Any]) -> ChatRequest:
    """The chat whose prompt is wanted. Raises InvalidRequest."""
    if ("prompt" in body) == ("messages" in body):
        raise invalid("prompt: give either a prompt or messages", "prompt")
    if "messages" in body:
        for name in OF_JOBS:
            if body.get(name) is not None:
                raise invalid(f"{name}: only a job has it: remove the field", name)
        return ChatRequest.parse(body)
    _refuse(body.keys() - OF_TEXTS, "model, prompt, add_special_tokens, return_token_strs")
    prompt = body["prompt"]
    if not isinstance(prompt, str):
        raise invalid(f"prompt: expected a text, got {describe(prompt)}", "prompt")
    chat = {
        "model": body["model"],
        "messages": [{"role": "user", "content": prompt}],
        "apply_chat_template": False,
        "add_special_tokens": body.get("add_special_tokens"),
    }
    try:
        return ChatRequest.parse(chat)
    except InvalidRequest as error:
        is_prompt = (error.param or "").startswith("messages")
        raise about(error, "prompt") if is_prompt else error from None


def _refuse(unknown: set[str], known: str) -> None:
    if unknown:
        name = min(unknown)
        raise invalid(f"{describe(name)} is not a field of this route, which has {known}", name)
