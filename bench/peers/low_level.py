"""One GGUF file through the C interface of llama.cpp, as the Python packages of llama.cpp and its
forks expose it: one llama_decode for all prompts, then one for each step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.peers.protocol import Answer

ROOM = 32  # cache positions beyond the prompt and the completion
CONVERSATION = 4096  # cache positions for turns
MICRO_BATCH = 512  # llama.cpp's default: tokens of one forward pass in a prefill


class LowLevel:
    """One model file, and a context per shape of measurement. `api`: the package's functions,
    under their names in today's llama.h."""

    def __init__(self, api: Any, path: str, threads: int) -> None:
        self._api, self._path, self._threads = api, path, threads
        api.llama_backend_init()
        self._model = self._read()
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._shape: tuple[int, int] | None = None
        self._context: Any = None
        self._known: list[int] = []  # tokens of the last turn whose state the context has

    @property
    def answers(self) -> dict[str, Answer]:
        return {
            "prompts": lambda asked: {"seconds": self._generate(**asked)[-1]},
            "serve": lambda asked: self._serve(asked["serve"], asked["at_once"]),
        }

    def load(self) -> float:
        """Seconds to read the file once more."""
        start = time.perf_counter()
        model = self._read()
        taken = time.perf_counter() - start
        self._api.llama_model_free(model)
        return taken

    def turn(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds to the first token, and the tokens. What the prompt has in common with that of
        the turn before is kept."""
        context = self._context_for(1, CONVERSATION)
        start = time.perf_counter()
        same = 0
        while same < min(len(self._known), len(prompt) - 1) and self._known[same] == prompt[same]:
            same += 1
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, same, -1)
        rows = [(token, at, 0, False) for at, token in enumerate(prompt)][same:]
        answer = self._decode(context, [*rows[:-1], (*rows[-1][:3], True)])
        first = time.perf_counter() - start
        while len(answer) < tokens:
            at = len(prompt) + len(answer) - 1
            answer += self._decode(context, [(answer[-1], at, 0, True)])
        self._known = [*prompt, *answer[:-1]]
        return first, answer

    def _serve(self, requests: list[tuple[list[int], int]], at_once: int) -> dict[str, Any]:
        """There is no scheduler: all requests run at once, and have the same length."""
        prompts, (tokens, *others) = [ids for ids, _ in requests], {n for _, n in requests}
        if at_once != len(requests) or others or len({len(prompt) for prompt in prompts}) > 1:
            raise SystemExit("only requests of one length can run, all at once")
        arrivals = self._generate(prompts, tokens)
        return {"submitted": [0.0] * at_once, "arrivals": [arrivals] * at_once}

    def _generate(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Seconds to each token of one greedy generation."""
        length = len(prompts[0])
        context = self._context_for(len(prompts), length + tokens + ROOM)
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        self._known = []
        start = time.perf_counter()
        last = self._prefill(context, prompts)
        arrivals = [time.perf_counter() - start]
        for step in range(tokens - 1):
            rows = [(last[seq], length + step, seq, True) for seq in range(len(prompts))]
            last = self._decode(context, rows)
            arrivals.append(time.perf_counter() - start)
        return arrivals

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
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, seq, logits) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
            batch.logits[row] = logits
        if self._api.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        greedy = []
        for row, (_, _, _, logits) in enumerate(rows):
            if logits:
                pointer = self._api.llama_get_logits_ith(context, row)
                greedy.append(int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax()))
        self._api.llama_batch_free(batch)
        return greedy

    def _read(self) -> Any:
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 0
        model = self._api.llama_model_load_from_file(self._path.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp can't load {self._path}")
        return model

    def _context_for(self, sequences: int, length: int) -> Any:
        if self._shape != (sequences, length):
            if self._context is not None:
                self._api.llama_free(self._context)
            params = self._api.llama_context_default_params()
            params.n_ctx = sequences * -(-length // 256) * 256
            params.n_batch, params.n_ubatch = max(2048, sequences * length), MICRO_BATCH
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            self._context = self._api.llama_init_from_model(self._model, params)
            if not self._context:
                raise SystemExit("llama.cpp can't make a context")
            self._shape, self._known = (sequences, length), []
        return self._context
