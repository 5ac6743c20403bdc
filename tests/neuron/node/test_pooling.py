"""Embedding and rerank models on a node with the real engine: routes, limits, sleep, and what they reject."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from cortex.neuron.config import HarnessSettings, Limits, ModelEntry, NeuronConfig, TorchHarness
from cortex.neuron.node.dependencies import NodeDependencies
from cortex.neuron.node.node import Node
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.node.headers import AS_BASE64, PRINCIPAL, TOKEN_LIMIT, VECTORS
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import ModelState

from ..api.served import served
from ..pooled_sources import write_embedder, write_reranker
from .node_calls import write_source

TEXTS = ["a red cat sleeps", "the bird", "a blue fish swims in the river of stone", "dog"]


class Served:
    def __init__(self, node: Node, url: str, http: aiohttp.ClientSession, directory: Path) -> None:
        self.node = node
        self.url = url
        self.directory = directory
        self.sdk = openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0)
        self._http = http

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        async with self._http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(tmp_path: Path, workers: WorkerFactory) -> AsyncIterator[Served]:
    chat = Path(write_source(tmp_path / "chat", seed=1))
    (chat / "tokenizer.json").write_text("{}")  # it generates no text here
    models = (
        ModelEntry(id="embedder", source=write_embedder(tmp_path / "embedder")),
        ModelEntry(id="reranker", source=write_reranker(tmp_path / "reranker")),
        ModelEntry(id="chat", source=str(chat), context_tokens=512),
    )
    config = NeuronConfig(
        models=models,
        limits=Limits(max_num_seqs=8, sleep_mb=64),
        harness=HarnessSettings(torch=TorchHarness(dtype="float32")),  # as the reference
        drain_s=1.0,
    )
    node = await Node.start(config, NodeDependencies(make_workers=lambda: workers))
    try:
        async with served(node) as (host, port), aiohttp.ClientSession() as http:
            yield Served(node, f"http://{host}:{port}", http, tmp_path)
    finally:
        await node.close()


def reference_vectors(directory: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = transformers.BertModel.from_pretrained(directory).eval()
    vectors = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, 0] for text in texts]
    stacked = torch.stack(vectors).detach()
    return torch.nn.functional.normalize(stacked, dim=-1).numpy()


async def test_openai_client_embeds_texts_in_order_with_the_model_s_tokens_and_prompts(
    tmp_path: Path, workers: WorkerFactory
) -> None:
    async with serving(tmp_path, workers) as api:
        expected = reference_vectors(api.directory / "embedder", TEXTS)
        found = await api.sdk.embeddings.create(model="embedder", input=TEXTS)  # base64
        vectors = np.array([each.embedding for each in found.data])
        assert [each.index for each in found.data] == [0, 1, 2, 3]
        assert (vectors * expected).sum(-1).min() > 0.9999
        assert found.usage.prompt_tokens == sum(len(text.split()) + 2 for text in TEXTS)
        as_floats = await api.sdk.embeddings.create(model="embedder", input=TEXTS[2], encoding_format="float")
        assert np.allclose(as_floats.data[0].embedding, vectors[2], atol=1e-6)
        tokens = await api.sdk.embeddings.create(model="embedder", input=[[2, 5, 8, 3], [2, 3]])
        assert tokens.usage.prompt_tokens == 6

        cut = await api.sdk.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8)
        assert np.allclose(cut.data[0].embedding, vectors[0][:8] / np.linalg.norm(vectors[0][:8]), atol=1e-5)
        extra = {"input_type": "query"}
        query = await api.sdk.embeddings.create(model="embedder", input=TEXTS[0], extra_body=extra)
        prompted = reference_vectors(api.directory / "embedder", ["query : " + TEXTS[0]])
        assert (np.array(query.data[0].embedding) * prompted[0]).sum() > 0.9999

        status, tei = await api.post("/embed", {"model": "embedder", "inputs": TEXTS})
        assert status == 200
        assert np.allclose(tei, vectors, atol=1e-5)
        for path in ("/embed", "/embed?model=embedder"):
            status, unnamed = await api.post(path, {"inputs": TEXTS})
            assert (status, unnamed) == (200, tei), "clients of TEI name no model"
        status, body = await api.post("/embed?model=other", {"inputs": TEXTS})
        assert (status, body["error"]["code"]) == (404, "model_not_found")

        status, ollama = await api.post("/api/embed", {"model": "embedder", "input": ["cat " * 200]})
        assert (status, ollama["prompt_eval_count"]) == (200, 128), "it is truncated"
        assert (await api.post("/api/embed", {"model": "embedder", "input": ""}))[1]["embeddings"] == []
        assert (await api.post("/api/embeddings", {"model": "embedder", "prompt": ""}))[1] == {"embedding": []}
        of_gateway = {PRINCIPAL: "alice", VECTORS: AS_BASE64}
        status, encoded = await api.post("/embed", {"model": "embedder", "inputs": TEXTS}, **of_gateway)
        assert np.allclose([np.frombuffer(b64decode(each), "<f4") for each in encoded], vectors, atol=1e-5)

        pairs = {"model": "embedder", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
        status, scored = await api.post("/score", pairs)
        assert np.allclose([each["score"] for each in scored["data"]], expected[1:] @ expected[0], atol=1e-5)
        status, scored = await api.post("/score", {**pairs, "text_1": TEXTS[::-1][:3]})
        cosines = (expected[1:] * expected[::-1][:3]).sum(-1)
        assert np.allclose([each["score"] for each in scored["data"]], cosines, atol=1e-5)
        asked = {"model": "embedder", "query": TEXTS[0], "documents": TEXTS[1:]}
        status, ranked = await api.post("/v1/rerank", asked)
        scores = {each["index"]: each["relevance_score"] for each in ranked["results"]}
        assert np.allclose([scores[index] for index in range(3)], expected[1:] @ prompted[0], atol=1e-5)

        with pytest.raises(openai.BadRequestError, match="maximum context length is 128"):
            await api.sdk.embeddings.create(model="embedder", input="cat " * 200)
        longest = {"truncate_prompt_tokens": -1}
        short = await api.sdk.embeddings.create(model="embedder", input="cat " * 200, extra_body=longest)
        assert short.usage.prompt_tokens == 128
        for problem, changes in (
            ("dimensions", {"dimensions": 4096}),
            ("prompt_name", {"extra_body": {"prompt_name": "no"}}),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await api.sdk.embeddings.create(**{"model": "embedder", "input": "cat", **changes})
            assert caught.value.param == problem
        limited = {PRINCIPAL: "somebody", TOKEN_LIMIT: "5"}
        status, body = await api.post("/v1/embeddings", {"model": "embedder", "input": TEXTS}, **limited)
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")

        # What it cannot do, and who can.
        with pytest.raises(
            openai.BadRequestError, match="embedder is an embedding model and generates no text; use c"
        ) as caught:
            await api.sdk.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "x"}])
        assert caught.value.param == "model"
        with pytest.raises(openai.BadRequestError, match="chat is a chat model and makes no embeddings; use embedder"):
            await api.sdk.embeddings.create(model="chat", input="x")
        status, body = await api.post("/v1/embeddings", {"model": "chat", "input": "x"}, **{PRINCIPAL: "somebody"})
        assert (status, body["error"]["code"]) == (400, "unsupported_modality")
        assert "embedder" not in str(body), "a gateway's client may not know the other models"
        assert api.node.model("chat").state is ModelState.COLD

        status_of = api.node.model("embedder")
        assert status_of.kv_bytes == 0
        assert status_of.capabilities.embeddings
        assert not status_of.capabilities.chat

        await api.node.unload(UnloadRequest(model_id="embedder", sleep=True))
        assert api.node.model("embedder").state is ModelState.ASLEEP
        again = await api.sdk.embeddings.create(model="embedder", input=TEXTS)
        assert np.array_equal(np.array([each.embedding for each in again.data]), vectors)


async def test_rerank_in_the_shapes_of_jina_cohere_tei_and_vllm(tmp_path: Path, workers: WorkerFactory) -> None:
    async with serving(tmp_path, workers) as api:
        directory = api.directory / "reranker"
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        model = transformers.BertForSequenceClassification.from_pretrained(directory).eval()
        expected = []
        for text in TEXTS:
            pair = tokenizer.encode("red fish", text)
            logits = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
            expected.append(torch.sigmoid(logits).item())
        best = sorted(range(len(TEXTS)), key=lambda index: -expected[index])

        documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
        body = {"model": "reranker", "query": "red fish", "documents": documents, "return_documents": True}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            status, found = await api.post(path, body)
            assert status == 200, found
            assert [each["index"] for each in found["results"]] == best
            scores = {each["index"]: each["relevance_score"] for each in found["results"]}
            assert all(abs(scores[index] - expected[index]) < 1e-3 for index in scores)
            assert found["results"][0]["document"]["text"] == TEXTS[best[0]]
        _, top = await api.post("/v1/rerank", {**body, "top_n": 2, "return_documents": False})
        assert [each["index"] for each in top["results"]] == best[:2]
        assert "document" not in top["results"][0]

        _, tei = await api.post("/rerank", {"model": "reranker", "query": "red fish", "texts": TEXTS})
        assert [each["index"] for each in tei] == best
        _, scored = await api.post("/score", {"model": "reranker", "text_1": "red fish", "text_2": TEXTS})
        assert np.allclose([each["score"] for each in scored["data"]], expected, atol=1e-3)
        raw = {"model": "reranker", "text_1": "red fish", "text_2": TEXTS, "raw_scores": True}
        _, logits = await api.post("/v1/score", raw)
        assert np.allclose([1 / (1 + np.exp(-each["score"])) for each in logits["data"]], expected, atol=1e-3)

        status, body = await api.post("/v1/embeddings", {"model": "reranker", "input": "x"})
        assert (status, body["error"]["code"]) == (400, "unsupported_modality")
        assert "use embedder" in body["error"]["message"]
