"""Sign-ins to the page, by key and through a provider: how often an address may fail, and what the audit log has of
them. Used on the loop's thread."""

from __future__ import annotations

from cortex.gateway.dispatch.operator.audit import AuditLog
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.page.failed_sign_ins import FailedSignIns
from cortex.http.request import Request
from cortex.wire.errors import CortexError


class SignInAttempts:
    """Counts and records attempts. What the client sent is never recorded: it has keys, codes and tokens."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._failures = FailedSignIns()

    def check(self, request: Request) -> None:
        """Raises RateLimitExceeded where this address failed too often. Such an attempt is not made and not recorded,
        so that no address can fill the audit log."""
        self._failures.check(request.client)

    def succeeded(self, request: Request, key: KeySection) -> None:
        """Record a sign-in that gives what `key` may do."""
        self._audit.record(
            _action(request),
            200,
            key_id=key.id,
            key_name=key.name,
            client=request.client,
            detail="signed in as operator" if key.operator else "signed in",
        )

    def failed(self, request: Request, error: CortexError) -> None:
        """Count and record a sign-in that was rejected, or that failed at the provider."""
        self._failures.failed(request.client)
        self._audit.record(_action(request), error.status, client=request.client, detail=error.message)


def _action(request: Request) -> str:
    return f"{request.method.decode('latin-1')} {request.path.decode('latin-1')}"
