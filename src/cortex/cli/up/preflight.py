"""Checks before any process is started, so that an error appears within a second and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import socket

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up.run_files import Ports


def require_engine() -> None:
    """Raises when only the gateway is installed."""
    if missing := [name for name in ("torch", "tokenizers") if importlib.util.find_spec(name) is None]:
        raise CommandError(
            f"the engine is not installed ({', '.join(missing)} missing)",
            "install it with: pip install 'cortex-fleet[neuron]'",
        )


def require_free_ports(host: str, ports: Ports) -> None:
    """Raises for the first port that cannot be bound, with the option that changes it."""
    wanted = [
        (host, ports.gateway, "--port"),
        (host, ports.metrics, "--metrics-port"),
        ("127.0.0.1", ports.neuron, "--neuron-port"),
    ]
    if len({ports.gateway, ports.metrics, ports.neuron}) < len(wanted):
        raise CommandError("the three ports must differ", "choose others with --port, --metrics-port", ExitCode.USAGE)
    if ports.ollama is not None:
        wanted.append((host, ports.ollama, "--ollama"))
    for address, port, option in wanted:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.getaddrinfo(address, port, family)  # `create_server` gives its error another type
            socket.create_server((address, port), family=family).close()
        except PermissionError as error:
            raise CommandError(
                f"port {port} is reserved for the system", f"choose one above 1023 with {option}", ExitCode.NO_ROOM
            ) from error
        except socket.gaierror as error:
            raise CommandError(
                f"{address} is not an address of this machine", "choose one with --host", ExitCode.USAGE
            ) from error
        except OSError as error:
            raise CommandError(
                f"port {port} cannot be used on {address} ({os.strerror(error.errno or 0)})",
                f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or "
                + ("leave out --ollama" if option == "--ollama" else f"choose another with {option}"),
                ExitCode.NO_ROOM,
            ) from error
