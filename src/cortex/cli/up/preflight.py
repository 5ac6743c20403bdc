"""Checks before any process is started, so that an error appears within a second and leaves nothing behind."""

from __future__ import annotations

import os
import socket

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up.run_files import Ports
from cortex.system.engine_packages import REMEDY, missing_packages


def require_engine(alternative: str = "") -> None:
    """Raises when the engine is not installed. `alternative`: what else would do."""
    if missing := missing_packages():
        remedy = f"{REMEDY}, {alternative}" if alternative else REMEDY
        raise CommandError(f"the engine is not installed ({', '.join(missing)} missing)", remedy)


def require_free_ports(host: str, ports: Ports, metrics_host: str = "127.0.0.1") -> None:
    """Raises for the first port that cannot be bound, with the option that changes it."""
    wanted = [
        (host, ports.gateway, "--port"),
        (metrics_host, ports.metrics, "--metrics-port"),
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
