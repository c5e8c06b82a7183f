"""Restricts the tokens of a completion to the form of its answer and a budget of its reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from worker.constraints.grammars import CompiledGrammar
from worker.constraints.matcher import Matcher
from worker.constraints.thinking_budget import FIELD, ThinkingBudget


@dataclass(frozen=True, eq=False)
class Constraint:
    """Of a request: a grammar, a budget, or both. `answer`: the grammar of what follows reasoning
    that the budget ends. May be used by several threads."""

    grammar: CompiledGrammar | None = None
    budget: ThinkingBudget | None = None
    answer: CompiledGrammar | None = None

    @property
    def field(self) -> str:
        """Of the request, in errors."""
        return FIELD if self.grammar is None else self.grammar.field

    def matcher(self, stops: frozenset[int]) -> Matcher:
        """The state of one sequence. `stops`: the tokens that end its completion."""
        thinking = None if self.budget is None else self.budget.count()
        if self.grammar is None:
            return Matcher(None, frozenset(), stops, thinking)
        ends = self.grammar.ends
        answer = None if self.answer is None else self.answer.start
        return Matcher(self.grammar.start, ends, stops - ends, thinking, answer)
