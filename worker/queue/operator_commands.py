"""Runs the commands of operators (jobs/store/operator.py) in the rounds of the worker's loop.

A command is a task: a generator that is resumed once in each round until it returns. So it never
blocks the loop, whatever it waits for. Owns the tasks that run, and the answers until Redis has
them. Used by the loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

from jobs.errors import JobError, failure_of, invalid
from jobs.store.operator import Answer, Answers, OperatorCommand

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]
# Yields None if there is nothing new, or facts about its progress; returns the facts of its end.
# Raises JobError.
Task = Generator[Facts | None, None, Facts]
Handler = Callable[[Facts], Task]


class OperatorCommands:
    """The commands of one worker. `handlers`: makes the task of each command from its arguments."""

    def __init__(self, answers: Answers, handlers: Mapping[str, Handler]) -> None:
        self._answers, self._handlers = answers, handlers
        self._tasks: dict[str, tuple[str, Task]] = {}  # name and task, by id
        self._unsent: dict[str, list[Answer]] = {}  # by id

    @property
    def any_running(self) -> bool:
        return bool(self._tasks)

    def start(self, command: OperatorCommand) -> None:
        """Begin a command. An id that is known is that of a message which came twice."""
        if command.id in self._tasks or command.id in self._unsent:
            return
        self._answer(command.id, Answer({}))
        handler = self._handlers.get(command.name)
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            error = invalid(
                f"this worker has no command {command.name!r}; it has: {known}", "command"
            )
            self._answer(command.id, Answer({}, error=error))
            return
        logger.info("operator's command: %s", command.name)
        self._tasks[command.id] = command.name, handler(command.args)

    def advance(self) -> bool:
        """Resume each task once. True if there is an answer to send."""
        for command_id, (name, task) in list(self._tasks.items()):
            try:
                facts = next(task)
            except StopIteration as stop:
                answer = Answer(stop.value, final=True)
            except Exception as error:  # a faulty command must not end the worker
                failure = failure_of(error)
                if failure is not error:
                    logger.exception("the command %s failed", name)
                answer = Answer({}, error=failure)
            else:
                if facts is None:
                    continue
                answer = Answer(facts)
            if answer.ended:
                del self._tasks[command_id]
            self._answer(command_id, answer)
        return bool(self._unsent)

    def send(self) -> None:
        """Send the answers. Those that Redis does not take are sent the next time. Raises
        redis.RedisError."""
        for command_id in list(self._unsent):
            self._answers.send(command_id, self._unsent[command_id])
            del self._unsent[command_id]

    def stop(self) -> None:
        """End the tasks: the worker stops."""
        for command_id, (name, task) in self._tasks.items():
            task.close()
            error = JobError("cancelled", f"the worker stops; the command {name} is not done")
            self._answer(command_id, Answer({}, error=error))
        self._tasks.clear()

    def _answer(self, command_id: str, answer: Answer) -> None:
        self._unsent.setdefault(command_id, []).append(answer)
