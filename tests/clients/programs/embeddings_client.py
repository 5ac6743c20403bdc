"""Clients of embeddings and rerank: the SDKs of OpenAI and Ollama, LangChain, LlamaIndex and LiteLLM."""

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

import litellm
import ollama
import openai
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from report import KEY, URL, equal, report

litellm.suppress_debug_info = True
EMBEDDER, RERANKER = "embedder", "reranker"
TEXTS = ["a red cat sleeps", "the bird", "a blue fish swims in the river of stone"]
QUERY = "red fish"


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def vectors_of(texts: Sequence[str]) -> list[list[float]]:
    found = post("/v1/embeddings", {"model": EMBEDDER, "input": texts, "encoding_format": "float"})
    return [item["embedding"] for item in found["data"]]


def near(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    equal([len(vector) for vector in found], [len(vector) for vector in expected])
    for vector, other in zip(found, expected, strict=True):
        difference = max(abs(one - two) for one, two in zip(vector, other, strict=True))
        if difference > 1e-5:
            raise AssertionError(f"a vector differs by {difference}")


def openai_sdk() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    found = client.embeddings.create(model=EMBEDDER, input=TEXTS)
    near([item.embedding for item in found.data], vectors_of(TEXTS))
    equal(found.usage.total_tokens, sum(len(text.split()) + 2 for text in TEXTS))
    equal(len(client.embeddings.create(model=EMBEDDER, input=TEXTS[0], dimensions=8).data[0].embedding), 8)
    try:
        client.embeddings.create(model="scripted", input="x")
    except openai.BadRequestError as error:
        equal(EMBEDDER in error.message, True)
    else:
        raise AssertionError("a chat model made embeddings")


def langchain() -> None:
    """LangChain tokenises by itself unless it is told not to."""
    client = OpenAIEmbeddings(
        model=EMBEDDER, base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False, max_retries=0
    )
    near(client.embed_documents(TEXTS), vectors_of(TEXTS))
    near([client.embed_query(QUERY)], vectors_of([QUERY]))


def langchain_ollama() -> None:
    near(OllamaEmbeddings(model=EMBEDDER, base_url=URL).embed_documents(TEXTS), vectors_of(TEXTS))


def llama_index() -> None:
    client = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=f"{URL}/v1", api_key=KEY, max_retries=0)
    near(client.get_text_embedding_batch(TEXTS), vectors_of(TEXTS))
    near([client.get_query_embedding(QUERY)], vectors_of([QUERY]))


def lite_llm() -> None:
    route = {"model": f"openai/{EMBEDDER}", "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
    for encoding in ("float", "base64"):
        found = litellm.embedding(input=TEXTS, encoding_format=encoding, **route)
        equal([item["index"] for item in found.data], list(range(len(TEXTS))))
        if encoding == "float":
            near([item["embedding"] for item in found.data], vectors_of(TEXTS))


def lite_llm_rerank() -> None:
    expected = post("/v1/rerank", {"model": RERANKER, "query": QUERY, "documents": TEXTS})["results"]
    for provider, base in (("hosted_vllm", URL), ("jina_ai", f"{URL}/v1/rerank"), ("cohere", f"{URL}/v2/rerank")):
        route = {"model": f"{provider}/{RERANKER}", "api_base": base, "api_key": KEY}
        found = litellm.rerank(query=QUERY, documents=TEXTS, top_n=2, **route).results
        equal([item["index"] for item in found], [item["index"] for item in expected[:2]])
        near([[item["relevance_score"] for item in found]], [[item["relevance_score"] for item in expected[:2]]])


def ollama_sdk() -> None:
    found = ollama.Client(host=URL).embed(model=EMBEDDER, input=TEXTS)
    near(found.embeddings, vectors_of(TEXTS))


report(
    {
        "openai": openai_sdk,
        "langchain": langchain,
        "langchain: ollama": langchain_ollama,
        "llamaindex": llama_index,
        "litellm": lite_llm,
        "litellm: rerank": lite_llm_rerank,
        "ollama": ollama_sdk,
    }
)
