"""The beginning of the grammar of a completion: the reasoning of the model, which is free text.

The grammar of an answer begins where the reasoning ends, by the same marks as the reader of the
answer: so a token that belongs to both, a draft across the end and a sequence that begins anew need
nothing of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jobs.api.grammar import Parts, quoted
from worker.checkpoint.tokenizer import Tokenizer
from worker.text.harmony import CHANNEL, END, MESSAGE, START
from worker.text.reasoning import ReasoningTags

_ANY = r"/(?s:.*)/"
_LINES = r"/\n{0,4}/"  # between reasoning and answer: left out of both
_BLANK = r"/[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class Thinking:
    """What may precede the answer in a completion: `rules` of Lark, with the placeholder `@@` for
    the answer. `behind`: the rules where a budget has ended the reasoning."""

    rules: str = "start: @@"
    behind: str = "start: @@"

    def before(self, answer: str) -> Parts:
        """The first part of a grammar whose others include one of this name."""
        return [{"lark_grammar": self.rules.replace("@@", f"@{answer}")}]

    def ended_before(self, answer: str) -> Parts:
        """The same, of a grammar that begins behind the mark that ends the reasoning."""
        return [{"lark_grammar": self.behind.replace("@@", f"@{answer}")}]


def literal(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Writes a text for Lark: as the special token that it is, else as text."""

    def write(text: str) -> str:
        token_id = tokenizer.id_of(text)
        special = token_id is not None and tokenizer.is_special(token_id)
        return f"<[{token_id}]>" if special else quoted(text)

    return write


def by_tags(tags: ReasoningTags, tokenizer: Tokenizer, *, inside: bool) -> Thinking:
    """A block of reasoning at the beginning. `inside`: the prompt has opened it."""
    write = literal(tokenizer)
    opening, closing = write(tags.opening), write(tags.closing)
    if closing.startswith("<["):
        rules = f"body: {_ANY} {closing}"
    else:
        rules = f"body[suffix={closing}]: {_ANY}"
    behind = f"start: {_LINES} @@"
    if inside:
        return Thinking(f"start: body {_LINES} @@\n{rules}\n", behind)
    return Thinking(f"start: @@ | {_BLANK} {opening} body {_LINES} @@\n{rules}\n", behind)


def by_harmony(tokenizer: Tokenizer, prompt: str) -> Thinking:
    """Messages in the channel analysis, then one in the channel final."""
    write = literal(tokenizer)
    start, channel, message, end = (write(mark) for mark in (START, CHANNEL, MESSAGE, END))
    rules = (
        f'start: {{first}}\nfinal: {channel} "final" {message} @@\n'
        f'analysis: {channel} "analysis" {message} rest\n'
        f'rest: {_ANY} {end} {start} "assistant"\n'
    )
    _, _, begun = prompt.rpartition(START)
    first = "analysis* final"
    if MESSAGE in begun:  # the completion continues a message
        first = "rest analysis* final" if "analysis" in begun.partition(MESSAGE)[0] else "@@"
    return Thinking(rules.replace("{first}", first))
