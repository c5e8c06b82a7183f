"""Tokenizes prompts in bounded time and memory.

A short prompt is tokenized here. A long one goes to a child process with limits, because the
tokenizers library holds Python's lock while it works, needs hundreds of bytes per character, and
panics on some texts. See counter.py for what that process does.
"""

from __future__ import annotations

from typing import NamedTuple

from jobs.errors import JobError
from jobs.sizes import counted
from worker.backend import TooLong
from worker.checkpoint.tokenizer import Tokenizer, check_unicode, not_encodable
from worker.prompt.limited_process import Ended, LimitedProcess

SHORT_CHARACTERS = 16_384  # characters of a prompt that is tokenized in this process
TOKENIZE_SECONDS = 5.0  # CPU time for one prompt
TOKENIZE_BYTES = 4 * 2**30  # address space of the child
ADVICE = "shorten the messages or use a model with a longer context"


class Around(NamedTuple):
    """The special tokens before and after a text."""

    before: list[int]
    after: list[int]


def with_special(ids: list[int], around: Around | None) -> list[int]:
    """Token ids with special tokens around them, unless they begin with those."""
    if around is None:
        return ids
    before = [] if ids[: len(around.before)] == around.before else around.before
    return [*before, *ids, *around.after]


class PromptEncoder:
    """Tokenizes the prompts of one model, whose context holds `context` tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._child = LimitedProcess(
            "the process that tokenizes long prompts",
            "worker.prompt.counter",
            TOKENIZE_BYTES,
            tokenizer.to_json,
        )

    def encode(self, text: str, last: int | None = None, around: Around | None = None) -> list[int]:
        """Token ids of a prompt, fewer than the context; only the `last` ones if given. `around`:
        special tokens that it has. Raises JobError: context_length_exceeded, invalid_request."""
        check_unicode(text)
        if last is None:
            ids = with_special(self._encode_whole(text), around)
        else:
            ids = self.encode_all(text, around)[-last:]
        if len(ids) >= self._context:
            raise self._exceeded(len(ids))
        return ids

    def encode_all(self, text: str, around: Around | None = None) -> list[int]:
        """Token ids of a text of any length: only time and memory limit it. `around`: special
        tokens that it has. Raises JobError."""
        check_unicode(text)
        return with_special(self._encode(text, context=len(text) + 1), around)

    def _encode_whole(self, text: str) -> list[int]:
        most = self._context * self._tokenizer.longest_token
        if len(text) > most:
            tokens = -(-len(text) // self._tokenizer.longest_token)
            fact = (
                f"the prompt has {len(text)} characters and the context of "
                f"{counted(self._context, 'token')} holds at most {most}"
            )
            raise TooLong(f"{fact}: {ADVICE}", "messages", tokens + 1)
        return self._encode(text, self._context)

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def _encode(self, text: str, context: int) -> list[int]:
        """Token ids; may raise context_length_exceeded early if they are more than `context`."""
        if len(text) <= SHORT_CHARACTERS:
            return self._tokenizer.encode(text)
        request = {
            "text": text,
            "context": context,
            "longest": self._tokenizer.longest_token,
            "seconds": TOKENIZE_SECONDS,
        }
        try:
            reply = self._child.exchange(request, last="panic")
        except Ended as ended:
            if not (ended.overtime or ended.aborted):
                raise JobError("internal", f"{ended}: try again") from None
            fact = (
                f"the prompt has {len(text)} characters, and tokenizing it takes more than "
                f"{TOKENIZE_SECONDS:g} s of CPU time or {TOKENIZE_BYTES >> 30} GiB of memory"
            )
            raise JobError("context_length_exceeded", f"{fact}: {ADVICE}", "messages") from None
        match reply:
            case {"ids": list(ids)}:
                return ids
            case {"at_least": count}:
                raise self._exceeded(int(count), "at least ")
            case {"panic": reason}:
                raise not_encodable(str(reason))
        raise JobError("internal", f"the process that tokenizes long prompts replied {reply!r}")

    def _exceeded(self, count: int, bound: str = "") -> TooLong:
        fact = (
            f"the prompt has {bound}{count} tokens and the context holds {self._context}, "
            "completion included"
        )
        return TooLong(f"{fact}: {ADVICE}", "messages", count + 1)
