"""llama.cpp through llama-cpp-python, as a child process that answers measurements on stdin.

    python llama_cpp_peer.py MODEL.gguf THREADS

Each line of stdin is a JSON object {"prompts": [[token id, …], …], "tokens": n}. The reply is a
line {"seconds": s}: the time to prefill all prompts and to generate n tokens for each of them
greedily, as one batch. {"turn": [token id, …], "tokens": n} generates n tokens after one prompt and
keeps the state of what the turn before it had in common, as llama.cpp's server does; the reply is
{"seconds": s, "answer": [token id, …]} with the time to the first token. {"load": true} reads the
file once more; the reply is {"seconds": s}. This runs in an environment of its own, which has numpy
and llama_cpp only.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

ROOM = 32  # cache positions beyond the prompt and the completion
CONVERSATION = 4096  # cache positions for turns
MICRO_BATCH = 512  # llama.cpp's default: tokens of one forward pass in a prefill


class Peer:
    """One model file, and a context per shape of measurement."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._path = path
        self._model = self._read()
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._threads = threads
        self._shape: tuple[int, int, int] | None = None
        self._context: Any = None
        self._known: list[int] = []  # tokens of the last turn whose state the context has

    def load(self) -> float:
        """Seconds to read the file once more."""
        start = time.perf_counter()
        model = self._read()
        taken = time.perf_counter() - start
        llama_cpp.llama_model_free(model)
        return taken

    def _read(self) -> Any:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(self._path.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp can't load {self._path}")
        return model

    def turn(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds to the first token, and the tokens."""
        context = self._context_for(1, CONVERSATION, MICRO_BATCH)
        start = time.perf_counter()
        same = 0
        while same < min(len(self._known), len(prompt) - 1) and self._known[same] == prompt[same]:
            same += 1
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, same, -1)
        rows = [(token, at, 0, False) for at, token in enumerate(prompt)][same:]
        answer = self._decode(context, [*rows[:-1], (*rows[-1][:3], True)])
        first = time.perf_counter() - start
        while len(answer) < tokens:
            at = len(prompt) + len(answer) - 1
            answer += self._decode(context, [(answer[-1], at, 0, True)])
        self._known = [*prompt, *answer[:-1]]
        return first, answer

    def measure(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds of one greedy generation."""
        # To measure decoding the prompts are read with as many tokens at a time as a decode step
        # has: some builds end with SIGSEGV on larger batches of quantised weights.
        at_once = MICRO_BATCH if tokens == 1 else len(prompts)
        context = self._context_for(len(prompts), len(prompts[0]) + tokens + ROOM, at_once)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        self._known = []
        start = time.perf_counter()
        last = self._prefill(context, prompts)
        length = len(prompts[0])
        for step in range(tokens - 1):
            rows = [(last[seq], length + step, seq, True) for seq in range(len(prompts))]
            last = self._decode(context, rows)
        return time.perf_counter() - start

    def _prefill(self, context: Any, prompts: list[list[int]]) -> list[int]:
        """Greedy next tokens after all prompts."""
        rows = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        return self._decode(context, rows)

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One llama_decode of (token, position, sequence, wants logits); greedy tokens of the rows
        that want logits."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, seq, logits) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
            batch.logits[row] = logits
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        greedy = []
        for row, (_, _, _, logits) in enumerate(rows):
            if logits:
                pointer = llama_cpp.llama_get_logits_ith(context, row)
                greedy.append(int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax()))
        llama_cpp.llama_batch_free(batch)
        return greedy

    def _context_for(self, sequences: int, length: int, at_once: int) -> Any:
        if self._shape != (sequences, length, at_once):
            if self._context is not None:
                llama_cpp.llama_free(self._context)
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = sequences * -(-length // 256) * 256
            params.n_batch, params.n_ubatch = max(2048, sequences * length), at_once
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if not self._context:
                raise SystemExit("llama.cpp can't make a context")
            self._shape, self._known = (sequences, length, at_once), []
        return self._context


def main() -> None:
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": True, "version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "turn" in asked:
            seconds, answer = peer.turn(asked["turn"], asked["tokens"])
            reply = {"seconds": seconds, "answer": answer}
        elif "load" in asked:
            reply = {"seconds": peer.load()}
        else:
            reply = {"seconds": peer.measure(asked["prompts"], asked["tokens"])}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
