"""What can go wrong on one machine. The message is for the user, and says what to do.

LocalError
|- PortTaken           something else listens where the API is to be
|- RayExited           the Ray process ended, or could not be started
|- StartTimeout        a phase of the start took longer than it ever should
|- DashboardError      Ray's dashboard cannot be spoken to
|  `- ConfigRefused    it does not take the Serve config
|- ForeignApplications the cluster that was to be joined serves something else
|- GatewayError        the gateway cannot be reached, or answers with an error
`- NoInstance          no running instance, or more than one to choose from
"""

from __future__ import annotations

from collections.abc import Sequence


class LocalError(Exception):
    """Base of this room's errors."""


class PortTaken(LocalError):
    """The address of the API is in use."""

    def __init__(self, host: str, port: int, reason: str = "already in use") -> None:
        super().__init__(f"port {port} of {host} is {reason}: choose another one with --port")
        self.host = host
        self.port = port


class RayExited(LocalError):
    """Ray's process has ended. `log_tail` holds the last lines of its output, oldest first."""

    def __init__(self, reason: str, log_tail: Sequence[str] = ()) -> None:
        super().__init__("\n".join([reason, *(f"    {line}" for line in log_tail)]))
        self.reason = reason
        self.log_tail = tuple(log_tail)


class StartTimeout(LocalError):
    """A phase of the start has not come to its end."""


class DashboardError(LocalError):
    """Ray's dashboard does not answer, or not as expected."""


class ConfigRefused(DashboardError):
    """Ray does not take the Serve config; the message is Ray's."""


class ForeignApplications(LocalError):
    """Applications of somebody else run on the cluster, and would be removed."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the cluster already serves {', '.join(names)}, which a deployment of these manifests "
            "would replace: remove them first, or use a cluster of its own"
        )
        self.names = tuple(names)


class GatewayError(LocalError):
    """The gateway does not answer, or with an error."""


class NoInstance(LocalError):
    """There is no instance to speak to, or no telling which."""
