"""Prompt templates of each task, used by `training.tasks`.

`{a}`, `{b}` and `{n}` are numbers, `{w}` is a word, `{ws}` are several words, `{c}` is a letter
or a country.
"""

from __future__ import annotations

ADDITION = (
    "What is {a} + {b}?", "What is {a}+{b}?", "What's {a} + {b}?", "what is {a} + {b}",
    "{a}+{b}?", "{a} + {b}?", "{a}+{b}", "{a} + {b}", "{a}+{b}=", "{a} + {b} =", "{a} + {b} = ?",
    "Add {a} and {b}.", "Add {a} to {b}.", "Compute {a} + {b}.", "Compute {a}+{b}",
    "Calculate {a} + {b}.", "Calculate: {a}+{b}", "How much is {a} + {b}?", "{a} plus {b}",
    "How much is {a} plus {b}?", "What is {a} plus {b}?", "What is the sum of {a} and {b}?",
    "Find the sum of {a} and {b}.", "Can you add {a} and {b}?",
    "I have {a} apples and get {b} more. How many apples do I have?",
)  # fmt: skip
SUBTRACTION = (
    "What is {a} - {b}?", "What is {a}-{b}?", "What's {a} - {b}?", "what is {a} - {b}",
    "{a}-{b}?", "{a} - {b}?", "{a}-{b}", "{a} - {b}", "{a}-{b}=", "{a} - {b} =", "{a} - {b} = ?",
    "Subtract {b} from {a}.", "Take {b} away from {a}.", "Compute {a} - {b}.", "Compute {a}-{b}",
    "Calculate {a} - {b}.", "Calculate: {a}-{b}", "How much is {a} - {b}?", "{a} minus {b}",
    "How much is {a} minus {b}?", "What is {a} minus {b}?", "Can you subtract {b} from {a}?",
)  # fmt: skip
LARGER = (
    "Which number is larger, {a} or {b}?", "Which is larger, {a} or {b}?",
    "Which is bigger: {a} or {b}?", "Which number is greater, {a} or {b}?",
    "What is the larger of {a} and {b}?", "Compare {a} and {b}. Which is larger?",
    "Name the larger number: {a}, {b}", "What is the maximum of {a} and {b}?",
)  # fmt: skip
SMALLER = (
    "Which number is smaller, {a} or {b}?", "Which is smaller, {a} or {b}?",
    "Which is less: {a} or {b}?", "Which number is lower, {a} or {b}?",
    "What is the smaller of {a} and {b}?", "Compare {a} and {b}. Which is smaller?",
    "Name the smaller number: {a}, {b}", "What is the minimum of {a} and {b}?",
)  # fmt: skip
REVERSE = (
    "Reverse the word: {w}", "Reverse the word {w}.", "Reverse: {w}", "Reverse {w}.",
    "Write {w} backwards.", "Spell {w} backwards.", "What is {w} backwards?",
    "What is {w} spelled backwards?", "Turn the word {w} around.",
)  # fmt: skip
SORT = (
    "Sort the letters of the word: {w}", "Sort the letters of {w}.", "Sort the letters in {w}.",
    "Put the letters of {w} in alphabetical order.", "Write the letters of {w} in order.",
    "Sort the letters: {w}", "Order the letters of {w} alphabetically.",
)  # fmt: skip
ORDER = (
    "Sort these words: {ws}", "Sort the words: {ws}", "Sort alphabetically: {ws}",
    "Put these words in alphabetical order: {ws}", "Sort {ws} alphabetically.",
    "Put in order: {ws}", "Order these words from a to z: {ws}",
)  # fmt: skip
COUNT = (
    "How many times does the letter {c} occur in {w}?", "How often does {c} appear in {w}?",
    "How many {c} are in {w}?", "How many times is {c} in the word {w}?",
    "Count the letter {c} in {w}.", "Count the {c} in the word {w}.",
    "How many letters {c} are there in the word {w}?",
)  # fmt: skip
LENGTH = (
    "How many letters are in {w}?", "How many letters are in the word {w}?",
    "How many letters does {w} have?", "Count the letters in {w}.", "How long is the word {w}?",
    "What is the length of the word {w}?", "Count the letters of the word: {w}",
)  # fmt: skip
CAPITAL = (
    "What is the capital of {c}?", "What's the capital of {c}?", "what is the capital of {c}",
    "Capital of {c}?", "The capital of {c} is", "Name the capital of {c}.", "{c}: capital?",
    "Which city is the capital of {c}?", "Tell me the capital of {c}.", "Capital of {c}",
    "Do you know the capital of {c}?",
)  # fmt: skip
COUNTING = ("Count to {n}.", "Count from 1 to {n}.", "Please count to {n}.", "count to {n}")
POLITE = ("Please answer: {}", "Hi! {}", "Hello. {}", "{} Thanks!", "Question: {}", "{}\n", " {}")

ALL: tuple[str, ...] = (
    *(*ADDITION, *SUBTRACTION, *LARGER, *SMALLER, *REVERSE, *SORT, *ORDER, *COUNT, *LENGTH),
    *(*CAPITAL, *COUNTING, *POLITE),
)
