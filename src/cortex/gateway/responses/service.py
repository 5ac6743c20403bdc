"""The Responses API of a gateway, put together."""

from __future__ import annotations

from cortex.gateway.config import Config, ResponsesSection
from cortex.gateway.database import Database
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.routes import HttpRoute
from cortex.gateway.responses.api import StoredResponses
from cortex.gateway.responses.background import BackgroundRuns
from cortex.gateway.responses.conversations import StoredConversations
from cortex.gateway.responses.sockets import ResponseSockets
from cortex.gateway.responses.stateful import StatefulInference
from cortex.gateway.responses.store import ResponseStore
from cortex.http.limits import ClientLimits
from cortex.system.tasks import Supervisor


class ResponsesService:
    """Stored responses, requests with state, and background runs. One per gateway."""

    def __init__(
        self,
        config: Config,
        database: Database,
        inference: Inference,
        tasks: Supervisor,
        limits: ClientLimits,
        deferred: DeferredResponses,
    ) -> None:
        services = inference.services
        self._store = ResponseStore(
            database,
            config.responses,
            tasks,
            lambda result: services.metrics.stored_responses.labels(result).inc(),
        )
        self._background = BackgroundRuns(inference, self._store, tasks)
        self._conversations = StoredConversations(self._store, services.admission, services.parser, deferred)
        self.stateful = StatefulInference(inference, self._store, self._background, self._conversations)
        """Serves `POST /v1/responses` and its token counts."""
        self.sockets = ResponseSockets(services, self.stateful, limits)
        """Serves `GET /v1/responses` over WebSockets."""
        self._stored = StoredResponses(self._store, self._background, services.admission, services.parser, deferred)

    def routes(self) -> list[HttpRoute]:
        """Those of stored responses and conversations."""
        return [*self._stored.routes(), *self._conversations.routes()]

    def start(self) -> None:
        self._store.start()
        self._background.start()

    def use(self, section: ResponsesSection) -> None:
        """Use a new configuration. The database needs a restart."""
        self._store.section = section

    async def drain(self, grace_s: float) -> None:
        """Wait for background responses for up to `grace_s`; the others end as failed."""
        await self._background.close(grace_s)

    async def close(self) -> None:
        """Call when nothing is sent to nodes any more. The rest is written before the database closes."""
        await self.stateful.close()
        await self._store.close()
