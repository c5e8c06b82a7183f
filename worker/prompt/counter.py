"""Child process that tokenizes long prompts: `python -m worker.prompt.counter BYTES`.

Its address space is limited to BYTES, and each prompt to a CPU time, after which the kernel kills
the process.

Protocol: one JSON value per line. First the content of a tokenizer.json, then requests: `text`,
`context` (tokens), `longest` (bytes of the longest token), `seconds`. Reply, one of
    ids       the token ids
    at_least  the number of tokens that the text has at least, and that the context can't hold
    panic     the library's reason for giving up on the text
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tokenizers import Tokenizer

from worker.processes.memory_limit import limit_memory
from worker.processes.pages import trim_heap
from worker.prompt import limited_child

COUNTED_CHARACTERS = 16_384  # characters that are counted at once
CUT = 32  # tokens that a cut through the text may add
DENSE = 4  # a text with fewer characters per token of the context is not counted first


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # Without the position of each token it takes a third of the time.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def count(tokenizer: Tokenizer, text: str, context: int, longest: int) -> int:
    """A lower bound of the number of tokens, counted in pieces. It stops as soon as the context
    can't hold the tokens so far and the rest, even if all tokens of the rest are the longest."""
    least = 0
    for start in range(0, len(text), COUNTED_CHARACTERS):
        piece = text[start : start + COUNTED_CHARACTERS]
        least += max(0, len(encode(tokenizer, piece)) - CUT)
        rest = len(text) - start - len(piece)
        bound = least + -(-rest // longest)
        if bound >= context:
            return bound
    return least


def reply_to(tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    text, context = request["text"], request["context"]
    try:
        if len(text) > DENSE * context:
            least = count(tokenizer, text, context, request["longest"])
            if least >= context:
                return {"at_least": least}
        return {"ids": encode(tokenizer, text)}
    except MemoryError:
        os.abort()  # as the library does when it runs out of memory
    except BaseException as error:  # a panic of the library
        return {"panic": " ".join(f"{type(error).__name__}: {error}".split())}


def main() -> None:
    limit_memory(int(sys.argv[1]))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text does not need the pool of threads
    content = next(sys.stdin.buffer, None)
    if content is None:  # the worker has ended
        return
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for request in limited_child.requests():
        limited_child.send(json.dumps(reply_to(tokenizer, request)))
        trim_heap()


if __name__ == "__main__":
    main()
