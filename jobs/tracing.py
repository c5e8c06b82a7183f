"""Spans of OpenTelemetry, for processes whose OTEL_* variables ask for them.

The only module that imports opentelemetry, and only if $OTEL_TRACES_EXPORTER names an exporter.
Spans are made when they have ended, from times that are known anyway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any

from jobs.encoding import encodable
from jobs.install import command_for

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

logger = logging.getLogger(__name__)

EXPORTERS = "OTEL_TRACES_EXPORTER"
SERVICE = "chatjobs"  # unless the variables name another one
HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context, as keys of a request's metadata


class _NoExporter(Exception):
    """A name that no installed package has registered an exporter under."""


class Tracing:
    """Makes spans that have ended. May be shared by threads."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer(SERVICE, version("chatjobs"))
        self._propagator = TraceContextTextMapPropagator()

    def caller(self, metadata: Any) -> Context:
        """The span that the metadata of a request names; that of a new trace if they name none, or
        none that is valid."""
        given = metadata if isinstance(metadata, Mapping) else {}
        headers = {name: given[name] for name in HEADERS if isinstance(given.get(name), str)}
        return self._propagator.extract(headers)

    def knows(self, caller: Context) -> bool:
        """True if a caller is a valid span."""
        from opentelemetry.trace import get_current_span

        return get_current_span(caller).get_span_context().is_valid

    def span(
        self,
        name: str,
        begin: float,
        end: float,
        parent: Context,
        attributes: Mapping[str, Any],
        *,
        consumer: bool = False,
        error: tuple[str, str] | None = None,
    ) -> Context:
        """Make a span, and return it as the parent of others. Times are seconds since the epoch.
        Attributes that are None are left out. consumer: it takes a job of another process. error:
        its code and its message."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            name,
            parent,
            SpanKind.CONSUMER if consumer else SpanKind.INTERNAL,
            {key: _plain(value) for key, value in attributes.items() if value is not None},
            start_time=_nanoseconds(begin),
        )
        if error is not None:
            code, message = error
            span.set_attribute("error.type", code)
            span.set_status(Status(StatusCode.ERROR, _plain(message)))
        span.end(_nanoseconds(max(begin, end)))
        return set_span_in_context(span, parent)


def open_tracing() -> Tracing | None:
    """The spans of this process; None unless the variables ask for some. Logs why they can't be
    exported."""
    names = [name.strip() for name in os.environ.get(EXPORTERS, "").split(",")]
    wanted = [name for name in names if name and name != "none"]
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from opentelemetry import trace

        configured = trace.get_tracer_provider()
        if not isinstance(configured, trace.ProxyTracerProvider):  # by opentelemetry-instrument
            return Tracing(configured)
        return Tracing(_provider(wanted))
    except ImportError:
        reason = f"OpenTelemetry is not installed ({command_for('otel')})"
    except _NoExporter as error:
        reason = str(error)
    except Exception as error:  # a value that the SDK or the exporter does not take
        reason = f"{type(error).__name__}: {error}"
    logger.warning("spans are not exported, which %s asks for: %s", EXPORTERS, reason)
    return None


def _provider(exporters: list[str]) -> TracerProvider:
    """A provider that the SDK configures by its variables. Raises what the exporters raise."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    installed = {one.name: one for one in entry_points(group="opentelemetry_traces_exporter")}
    makers = []
    for name in map(_entry_point, exporters):
        if name not in installed:
            raise _NoExporter(f"no exporter {name!r} (installed: {', '.join(sorted(installed))})")
        makers.append(installed[name].load())
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(resource=resource)
    for make in makers:
        provider.add_span_processor(BatchSpanProcessor(make()))
    return provider


def _entry_point(exporter: str) -> str:
    """The name under which the package of an exporter has registered it."""
    if exporter != "otlp":
        return exporter
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    protocol = protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


def _plain(value: Any) -> Any:
    """An attribute that can be encoded: one that can't would cost other spans of its batch."""
    return encodable(value) if isinstance(value, str) else value


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
