"""What the log says about a configuration that is valid and may still surprise its operator."""

from __future__ import annotations

import logging

from cortex.gateway.config import Config

log = logging.getLogger(__name__)


def warn_about_access(config: Config, *, is_open: bool, has_keys: bool) -> None:
    """Warn when everybody may use the gateway, or nobody. `is_open`: it admits requests without a key."""
    section = config.gateway
    if not is_open:
        if not has_keys and not config.sign_in.is_enabled:
            log.warning(
                "every request is rejected: this gateway had keys and has none now. "
                "Add one with `cortex keys add`, or set gateway.open = true to admit everybody"
            )
        elif section.open:
            log.warning("gateway.open has no effect while there are keys: remove it, or them")
        return
    reason = "gateway.open is true" if section.open else "it has no keys yet, and gateway.open_until_keys is true"
    for address in config.public_addresses:
        log.warning("anybody who can reach %s may use this gateway: %s", address, reason)


def warn_about_restart(before: Config, after: Config) -> None:
    """Name the changed keys that a reload does not apply."""
    addresses = ("listen", "metrics_listen", "ollama_listen", "open_listing", "tls_cert", "tls_key", "cors_origins")
    for key in (*addresses, "state", "max_body_mb", "connect_timeout_s", "poll_interval_s"):
        if getattr(before.gateway, key) != getattr(after.gateway, key):
            log.warning("gateway.%s has changed: restart the gateway to use it", key)
    for key in ("limits", "ledger", "telemetry"):
        if getattr(before, key) != getattr(after, key):
            log.warning("%s has changed: restart the gateway to use it", key)
    if before.responses.database != after.responses.database:
        log.warning("responses.database has changed: restart the gateway to use it")
