"""Synthetic tasks with verifiable answers: prompt, reasoning and answer of each example.

Every example belongs to one of two splits, chosen by a stable hash of its subject: the number pair,
the word, or, for capitals, the exact prompt with its system turn. A held-out subject occurs in no
training prompt, in any phrasing. Used by `training.train_demo`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from training import phrasings as ask
from training.columns import add_reasoning, compare_reasoning, padded, subtract_reasoning
from training.words import (
    CAPITALS,
    SMALL_TALK,
    SYSTEM_ADJECTIVES,
    SYSTEM_NOUNS,
    SYSTEM_TAILS,
    SYSTEM_TURNS,
    WORDS,
)

HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Example:
    """One question: the messages up to the last user turn, and the expected reply."""

    task: str
    messages: tuple[dict[str, str], ...]
    reasoning: str
    answer: str
    thinking: bool = True


@dataclass(frozen=True)
class Question:
    """An example without system turn, earlier turns and polite phrases."""

    prompt: str
    reasoning: str
    answer: str


def is_held_out(key: str) -> bool:
    """Whether the subject `key` is held out of training; the same on every machine."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def pair_is_held_out(a: int, b: int) -> bool:
    """Whether a number pair is held out, in either order and for all tasks."""
    return is_held_out(f"pair:{min(a, b)}:{max(a, b)}")


def word_is_held_out(word: str) -> bool:
    """Whether a word is held out, for all tasks."""
    return is_held_out(f"word:{word}")


def prompt_is_held_out(messages: tuple[dict[str, str], ...]) -> bool:
    """Whether a question about a capital is held out, by its text and system turn."""
    return is_held_out("prompt:" + "\n".join(f"{m['role']}:{m['content']}" for m in messages))


# --- numbers -------------------------------------------------------------------------------------


def _pair(rng: random.Random, held_out: bool, two_digits: bool = False) -> tuple[int, int]:
    while True:
        sizes = (2, 2) if two_digits else rng.choices((1, 2, 3), (2, 4, 5), k=2)
        a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in sizes)
        # The counting prompts contain pairs ("Count from 1 to 26"), so held-out pairs have no 1.
        if pair_is_held_out(a, b) == held_out and not (held_out and 1 in (a, b)):
            return a, b


def addition(rng: random.Random, held_out: bool) -> Question:
    """A sum of two numbers of one to three digits."""
    a, b = _pair(rng, held_out)
    return Question(rng.choice(ask.ADDITION).format(a=a, b=b), add_reasoning(a, b), str(a + b))


def addition_2digit(rng: random.Random, held_out: bool) -> Question:
    """A sum of two numbers of exactly two digits."""
    a, b = _pair(rng, held_out, two_digits=True)
    return Question(rng.choice(ask.ADDITION).format(a=a, b=b), add_reasoning(a, b), str(a + b))


def subtraction(rng: random.Random, held_out: bool) -> Question:
    """A difference of two numbers of one to three digits; about one in four is negative."""
    a, b = _pair(rng, held_out)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    return Question(
        rng.choice(ask.SUBTRACTION).format(a=a, b=b), subtract_reasoning(a, b), str(a - b)
    )


def compare(rng: random.Random, held_out: bool) -> Question:
    """The larger or smaller of two different numbers."""
    a, b = _pair(rng, held_out)
    while a == b:
        a, b = _pair(rng, held_out)
    phrasings, pick = rng.choice(((ask.LARGER, max), (ask.SMALLER, min)))
    x, y = padded(a, b)
    reasoning = f"{x} {y}\n{compare_reasoning(a, b)}\n{pick(x, y)}"
    return Question(rng.choice(phrasings).format(a=a, b=b), reasoning, str(pick(a, b)))


# --- words ---------------------------------------------------------------------------------------


LETTERS = "abcdefghijklmnopqrstuvwxyz"
FREQUENT_LETTERS = LETTERS + "aaaeeeeiiooulnrstrst"


def _words_of(texts: Iterable[str]) -> set[str]:
    return set(re.findall(r"[a-z]+", " ".join(texts).lower()))


# Words of the system turns and of the small talk, which training always contains.
SHOWN = _words_of([*SYSTEM_TURNS, *SYSTEM_NOUNS, *SYSTEM_ADJECTIVES, *SYSTEM_TAILS]) | _words_of(
    text for prompts, answer in SMALL_TALK for text in (*prompts, answer)
)
KNOWN_PREFIXES = sorted(w for w in SHOWN | _words_of(ask.ALL) if len(w) > 2)
HELD_OUT_WORDS = tuple(w for w in WORDS if word_is_held_out(w) and w not in SHOWN)


def _word(rng: random.Random, held_out: bool) -> str:
    """A word of the split: a real one if held out; in training more than half are made up."""
    if held_out:
        return rng.choice(HELD_OUT_WORDS)
    while True:
        if rng.random() < 0.6:
            word = "".join(rng.choices(FREQUENT_LETTERS, k=rng.randint(3, 8)))
            if rng.random() < 0.4:  # The tokenizer has tokens for these prefixes.
                prefix = rng.choice(KNOWN_PREFIXES)[: rng.randint(2, 6)]
                word = (prefix + word)[: max(rng.randint(3, 8), len(prefix))]
        else:
            word = rng.choice(WORDS)
        if not word_is_held_out(word):
            return word


def _quoted(rng: random.Random, word: str) -> str:
    return rng.choice(("{}", "{}", "{}", '"{}"', "'{}'")).format(word)


def _spelled(letters: str) -> str:
    return "".join(f" {c}" for c in letters)


def reverse(rng: random.Random, held_out: bool) -> Question:
    """A word written backwards."""
    word = _word(rng, held_out)
    reasoning = f"Spell:{_spelled(word)}\nBack:{_spelled(word[::-1])}"
    return Question(rng.choice(ask.REVERSE).format(w=_quoted(rng, word)), reasoning, word[::-1])


def sort(rng: random.Random, held_out: bool) -> Question:
    """The letters of a word in alphabetical order."""
    word = _word(rng, held_out)
    answer = "".join(sorted(word))
    reasoning = f"Spell:{_spelled(word)}\nSorted:{_spelled(answer)}"
    return Question(rng.choice(ask.SORT).format(w=_quoted(rng, word)), reasoning, answer)


def order(rng: random.Random, held_out: bool) -> Question:
    """Three words with different first letters in alphabetical order."""
    words: list[str] = []
    while len(words) < 3:
        word = _word(rng, held_out)
        if all(word[0] != other[0] for other in words):
            words.append(word)
    firsts = "".join(word[0] for word in words)
    letters = _spelled("".join(sorted(firsts)))
    lines = [f"First:{_spelled(firsts)}", f"Sorted:{letters}", f"Words: {' '.join(sorted(words))}"]
    joined = rng.choice((", ", ", ", " ")).join(words)
    prompt = rng.choice(ask.ORDER).format(ws=joined)
    return Question(prompt, "\n".join(lines), ", ".join(sorted(words)))


def count(rng: random.Random, held_out: bool) -> Question:
    """How often a letter occurs in a word; about one letter in five is drawn at random."""
    word = _word(rng, held_out)
    letter = rng.choice(word if rng.random() < 0.8 else LETTERS)
    seen = [word[: i + 1].count(letter) for i in range(len(word))]
    steps = "".join(f" {c}{n}" for c, n in zip(word, seen, strict=True))
    prompt = rng.choice(ask.COUNT).format(c=_quoted(rng, letter), w=_quoted(rng, word))
    return Question(prompt, f"Letter {letter}:{steps}", str(seen[-1]))


def length(rng: random.Random, held_out: bool) -> Question:
    """The number of letters of a word."""
    word = _word(rng, held_out)
    steps = "".join(f" {c}{i}" for i, c in enumerate(word, start=1))
    prompt = rng.choice(ask.LENGTH).format(w=_quoted(rng, word))
    return Question(prompt, f"Letters:{steps}", str(len(word)))


# --- facts and small talk ------------------------------------------------------------------------


def capital(rng: random.Random, held_out: bool) -> Question:
    """The capital of a country; `make_example` decides its split from the whole prompt."""
    del held_out
    country = rng.choice(sorted(CAPITALS))
    return Question(rng.choice(ask.CAPITAL).format(c=country), "", CAPITALS[country])


def small_talk(rng: random.Random, held_out: bool) -> Question:
    """A greeting or a question about the model; not held out, not scored."""
    del held_out
    prompts, answer = rng.choice(SMALL_TALK)
    return Question(rng.choice(prompts), "", answer)


def counting(rng: random.Random, held_out: bool) -> Question:
    """The numbers up to a limit, a long reply for watching streams; not held out, not scored."""
    del held_out
    n = rng.randint(3, 40)
    answer = " ".join(str(i) for i in range(1, n + 1))
    return Question(rng.choice(ask.COUNTING).format(n=n), "", answer)


# --- examples ------------------------------------------------------------------------------------

Generator = Callable[[random.Random, bool], Question]
# Task → (generator, share of the training mix, rows in the held-out data set).
TASKS: dict[str, tuple[Generator, float, int]] = {
    "addition_2digit": (addition_2digit, 6, 100),
    "addition": (addition, 9, 60),
    "subtraction": (subtraction, 15, 80),
    "compare": (compare, 6, 50),
    "reverse": (reverse, 14, 50),
    "sort": (sort, 14, 40),
    "order": (order, 14, 30),
    "count": (count, 10, 40),
    "length": (length, 4, 20),
    "capital": (capital, 5, 30),
    "small_talk": (small_talk, 4, 0),
    "counting": (counting, 3, 0),
}
SYSTEM_SHARE = 0.4
HELD_OUT_SYSTEM_SHARE = 0.25
HISTORY_SHARE = 0.15
NO_THINKING_SHARE = 0.06
POLITE_SHARE = 0.1


def _system_turn(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(SYSTEM_TURNS)
    adjective, noun, tail = map(rng.choice, (SYSTEM_ADJECTIVES, SYSTEM_NOUNS, SYSTEM_TAILS))
    return f"You are a {adjective} {noun}. {tail}".strip()


def _history(rng: random.Random) -> Iterator[dict[str, str]]:
    """One or two earlier turns, mostly small talk; assistant turns have no think block."""
    for _ in range(rng.choice((1, 1, 2))):
        make: Generator = small_talk
        if rng.random() < 0.4:
            make = rng.choice([g for name, (g, _, _) in TASKS.items() if name != "capital"])
        question = make(rng, False)
        yield {"role": "user", "content": question.prompt}
        yield {"role": "assistant", "content": question.answer}


def make_example(rng: random.Random, task: str, held_out: bool = False) -> Example:
    """One example of a task from one split; held-out examples have one plain user turn."""
    while True:
        question = TASKS[task][0](rng, held_out)
        messages: list[dict[str, str]] = []
        if rng.random() < (HELD_OUT_SYSTEM_SHARE if held_out else SYSTEM_SHARE):
            messages.append({"role": "system", "content": _system_turn(rng)})
        if not held_out and rng.random() < HISTORY_SHARE:
            messages.extend(_history(rng))
        prompt = question.prompt
        if not held_out and rng.random() < POLITE_SHARE:
            prompt = rng.choice(ask.POLITE).format(prompt)
        messages.append({"role": "user", "content": prompt})
        example = Example(task, tuple(messages), question.reasoning, question.answer)
        if task == "capital" and prompt_is_held_out(example.messages) != held_out:
            continue
        if not held_out and question.reasoning and rng.random() < NO_THINKING_SHARE:
            example = replace(example, thinking=False)
        return example


def training_examples(rng: random.Random) -> Iterator[Example]:
    """Yields training examples without end, in the proportions of `TASKS`."""
    names, weights = list(TASKS), [share for _, share, _ in TASKS.values()]
    while True:
        yield make_example(rng, rng.choices(names, weights)[0])


def held_out_examples(seed: int) -> list[Example]:
    """The rows of the data set: all scored tasks, without duplicate questions, shuffled."""
    rng, examples, seen = random.Random(seed), list[Example](), set[str]()
    for task, (_, _, rows) in TASKS.items():
        wanted = len(examples) + rows
        while len(examples) < wanted:
            example = make_example(rng, task, held_out=True)
            if (prompt := example.messages[-1]["content"]) not in seen:
                seen.add(prompt)
                examples.append(example)
    rng.shuffle(examples)
    return examples
