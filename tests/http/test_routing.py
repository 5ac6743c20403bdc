import pytest

from cortex.http.request import Request
from cortex.http.routing import Route, Router, query
from cortex.wire.errors import InvalidValue, MethodNotAllowed, RouteNotFound

ROUTER = Router(
    [
        Route("GET", "/models", "list"),
        Route("POST", "/models", "add"),
        Route("GET DELETE", "/models/{name:.+}", "one"),
        Route("GET", "/devices/{index:[0-9]{1,2}}/{part}", "part"),
        Route("GET", "/events", "stream", has_head=False),
        Route("", "/gone", "reject"),
    ]
)


def request(method: str, path: str, search: bytes = b"") -> Request:
    return Request(method.encode(), path.encode(), search, (), b"", "127.0.0.1", True)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/models", ("list", {})),
        ("HEAD", "/models/", ("list", {})),
        ("POST", "/models", ("add", {})),
        ("DELETE", "/models/owner%2Fname", ("one", {"name": "owner/name"})),
        ("HEAD", "/models/a/b", ("one", {"name": "a/b"})),
        ("GET", "/devices/12/a%20b", ("part", {"index": "12", "part": "a b"})),
        ("PATCH", "/gone", ("reject", {})),
    ],
)
def test_finds_the_handler_and_what_the_path_matched(method: str, path: str, expected: object) -> None:
    match = ROUTER.find(request(method, path))
    assert (match.route.handler, match.values) == expected


def test_method_without_a_route_is_rejected_with_those_that_have_one() -> None:
    with pytest.raises(MethodNotAllowed, match="PUT is not allowed on /models; use GET or HEAD or POST"):
        ROUTER.find(request("PUT", "/models"))
    with pytest.raises(MethodNotAllowed, match=r"HEAD is not allowed on /events; use GET\.$"):
        ROUTER.find(request("HEAD", "/events"))


@pytest.mark.parametrize("path", ["/other", "/devices/123/part", "/devices/1/a/b", "/devicesx1/a"])
def test_unknown_path_is_rejected(path: str) -> None:
    assert ROUTER.match(request("GET", path)) is None
    with pytest.raises(RouteNotFound, match=path):
        ROUTER.find(request("GET", path))


def test_error_for_an_unknown_path_says_where_the_routes_are() -> None:
    with pytest.raises(RouteNotFound, match="There is no /other; GET / lists the routes"):
        ROUTER.find(request("GET", "/other"))


def test_empty_query_parameter_counts_as_absent() -> None:
    assert query(request("GET", "/", b"a=1&a=2&b="), "a") == "1"
    assert query(request("GET", "/", b"b="), "b") is None


def test_query_parameter_with_nul_is_rejected() -> None:
    with pytest.raises(InvalidValue, match="Invalid value for 'key': it contains a NUL character"):
        query(request("GET", "/", b"since=1&key=a%00b"), "key")
