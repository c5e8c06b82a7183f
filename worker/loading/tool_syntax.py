"""The syntax in which a model writes tool calls: the one that its chat template writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from jobs.api.request import ChatRequest
from jobs.errors import JobError, invalid
from worker.prompt.template import (
    PROBE_CALL,
    PROBE_QUESTION,
    PROBE_TOOL,
    ChatTemplate,
    require_fault_of_template,
)
from worker.text.tool_call import Call
from worker.text.tool_parser import SYNTAXES, ToolParser

logger = logging.getLogger(__name__)

ANSWER = "b7q"


def tool_syntax(template: ChatTemplate | None, chosen: str | None, model: str) -> str | None:
    """The name of a model's syntax: the one that the user has chosen, else the one whose parser
    reads the call that the template writes for an earlier answer. None: calls stay text. Raises
    JobError."""
    if chosen is not None:
        if chosen not in SYNTAXES:
            known = ", ".join(sorted(SYNTAXES))
            raise invalid(f"tool_parser must be one of {known}, got {chosen!r}", "tool_parser")
        if template is not None and not template.takes_tools:
            logger.warning(
                "%s: its chat template ignores tools, so their definitions do not reach the model: "
                "requests must describe them in their messages",
                model,
            )
        return chosen
    if template is None or not template.takes_tools:
        return None
    found = _written_syntax(template)
    if found is None:
        logger.warning(
            "%s: its chat template takes tools, and writes calls in a syntax that is not known: "
            "calls in answers stay text, unless a tool parser is chosen (%s)",
            model,
            ", ".join(sorted(SYNTAXES)),
        )
    return found


def parser_maker(syntax: str | None, request: ChatRequest) -> Callable[[], ToolParser | None]:
    """Makes parsers for the answers to a request; they are None if calls are not looked for."""
    if syntax is None or not request.tools or request.tool_choice == "none":
        return lambda: None
    functions = {tool.function.name: tool.function.parameters or {} for tool in request.tools}
    return lambda: ToolParser(SYNTAXES[syntax](functions))


def _written_syntax(template: ChatTemplate) -> str | None:
    calling = {**PROBE_CALL, "content": ""} if template.calls_need_content else PROBE_CALL
    try:
        prompt = template.render([PROBE_QUESTION], [PROBE_TOOL])
        text, other = (
            template.render([PROBE_QUESTION, answer], [PROBE_TOOL], add_generation_prompt=False)
            for answer in (calling, {"role": "assistant", "content": ANSWER})
        )
    except JobError as error:
        require_fault_of_template(error)
        return None
    # The text around any answer: the end of the question, a header, a footer.
    around = _after_question(other).replace(ANSWER, "")
    for name in sorted(SYNTAXES):
        if _rest(name, _after_question(text)) == _bare(around):
            return name
        # An answer that must begin with the call: it begins where the prompt ends.
        if text.startswith(prompt) and other.startswith(prompt):
            answer, around_answer = text.removeprefix(prompt), other.removeprefix(prompt)
            if _rest(name, answer) == _bare(around_answer.replace(ANSWER, "")):
                return name
    return None


def _after_question(text: str) -> str:
    return text.rpartition(str(PROBE_QUESTION["content"]))[2]


def _rest(syntax: str, text: str) -> str | None:
    """The text that a parser leaves around the call of the probe, without white space; None if it
    doesn't find exactly this call."""
    function = PROBE_TOOL["function"]
    parser = ToolParser(SYNTAXES[syntax]({function["name"]: function["parameters"]}))
    shown, calls = parser.push(text)
    more, found = parser.flush()
    wanted = PROBE_CALL["tool_calls"][0]["function"]
    if calls + found != [Call(wanted["name"], json.dumps(wanted["arguments"]))]:
        return None
    return _bare(shown + more)


def _bare(text: str) -> str:
    return "".join(text.split())
