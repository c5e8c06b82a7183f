"""`Delta`: the output that one or more engine steps added to one choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jobs.api.answer import FinishReason, TokenLogprob
from jobs.api.chunk import ToolCallDelta


class Delta(NamedTuple):
    """New output of one choice. `to_wire` gives its form in a stream entry."""

    choice: int
    content: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()  # if the request asks for them
    prompt_token_ids: tuple[int, ...] = ()  # the same, in the first delta of choice 0

    def to_wire(self) -> dict[str, Any]:
        """JSON object with short keys: i, c, r, l, f, t, k, p. Empty fields are omitted."""
        wire: dict[str, Any] = {"i": self.choice}
        if self.content:
            wire["c"] = self.content
        if self.reasoning:
            wire["r"] = self.reasoning
        if self.logprobs:
            wire["l"] = [token.to_dict() for token in self.logprobs]
        if self.finish_reason:
            wire["f"] = self.finish_reason
        if self.tool_calls:
            wire["t"] = [call.to_dict() for call in self.tool_calls]
        if self.token_ids:
            wire["k"] = self.token_ids
        if self.prompt_token_ids:
            wire["p"] = self.prompt_token_ids
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Delta:
        """The delta that `to_wire` encoded. Unknown keys are ignored."""
        return cls(
            choice=wire["i"],
            content=wire.get("c") or "",
            reasoning=wire.get("r") or "",
            logprobs=tuple(TokenLogprob.model_validate(token) for token in wire.get("l") or ()),
            finish_reason=wire.get("f") or None,
            tool_calls=tuple(ToolCallDelta.model_validate(call) for call in wire.get("t") or ()),
            token_ids=tuple(wire.get("k") or ()),
            prompt_token_ids=tuple(wire.get("p") or ()),
        )


def join(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """Concatenate the deltas of each choice. Returns one delta per choice, ordered by choice."""
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return tuple([_joined(by_choice[choice]) for choice in sorted(by_choice)])


def _joined(parts: list[Delta]) -> Delta:
    if len(parts) == 1:
        return parts[0]
    reasons = [part.finish_reason for part in parts if part.finish_reason]
    return Delta(
        choice=parts[0].choice,
        content="".join([part.content for part in parts]),
        reasoning="".join([part.reasoning for part in parts]),
        logprobs=tuple([token for part in parts for token in part.logprobs]),
        finish_reason=reasons[-1] if reasons else None,
        tool_calls=tuple([call for part in parts for call in part.tool_calls]),
        token_ids=tuple([id for part in parts for id in part.token_ids]),
        prompt_token_ids=tuple([id for part in parts for id in part.prompt_token_ids]),
    )
