"""Steps that are traced without the number of their rows, where it matters that the graph does not know it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdist.strategies.variables import variable_with_value


class TracedRows:
    """Whether the graphs of one kind of a model's steps know the number of their rows.

    A graph that knows the number may hold it as a constant, which nothing tells from a constant of the user's. A step
    that computes losses by hand is traced without the number, one for which it turns out to matter is traced again. If
    a trace without it raises, as where a layer reads it, the step is traced with it from then on.

    Args:
        are_unknown: bool, whether steps are traced without the number from the first trace on.

    Attributes:
        are_unknown: bool, whether steps are traced without the number.
        is_final: bool, whether that does not change any more.
    """

    def __init__(self, *, are_unknown: bool = False) -> None:
        self.are_unknown = are_unknown
        self.is_final = are_unknown
        self._can_trace_again = False
        self._is_asked = False
        self._has_failed = False
        self._makes_values = False
        self._has_made = False

    def traced(self, trace: Callable[[], Any], renew: Callable[[], None], *, is_first: bool = True) -> Any:
        """Traces the step, without running it, and again if the number of rows is to be hidden or cannot be.

        As TensorFlow does, it traces a step once more that has made variables: Keras and users ask whether there are
        any, as an optimizer asks whether it is built.

        Args:
            trace: callable that traces it and returns the result.
            renew: callable after which `trace` traces a new function.
            is_first: bool, whether variables that the step makes have their values at once.
        """
        self._can_trace_again, self._is_asked, self._has_failed = not self.is_final, False, False
        self._makes_values, self._has_made = is_first, False
        try:
            result = trace()
        except Exception:
            if not self._has_failed:
                raise
            self.are_unknown, self.is_final = False, True
        else:
            if not (self._is_asked or self._has_made):
                return result
            self.are_unknown = self.are_unknown or self._is_asked
            is_first = is_first and not self._has_made
        finally:
            self._can_trace_again = self._makes_values = False
        renew()
        return self.traced(trace, renew, is_first=is_first)

    def hide_row_count(self) -> None:
        """Traces the step without the number of its rows from the next trace on, if that is possible."""
        self.are_unknown = self.are_unknown or not self.is_final

    def is_traced_again(self, *, knows_number: bool) -> bool:
        """Returns whether the step, of which something is to be computed now, is traced again, as it then can be.

        Args:
            knows_number: bool, whether the graph knows the number of rows, which is then hidden.
        """
        self._is_asked = self._is_asked or (self._can_trace_again and knows_number and not self.are_unknown)
        return self._is_asked

    @property
    def is_asked(self) -> bool:
        """Whether something has asked for the step to be traced again: what this trace finds does not count."""
        return self._is_asked

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which a step is traced, or runs eagerly."""
        try:
            with tf.variable_creator_scope(self._with_value):
                yield
        except Exception:
            self._has_failed = self.are_unknown and not tf.executing_eagerly()
            raise

    def _with_value(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        made = variable_with_value(kwargs) if self._makes_values else None
        self._has_made = self._has_made or made is not None
        return next_creator(**kwargs) if made is None else made
