"""Fetches the browser libraries of the page into `src/cortex/gateway/page/files/vendor`.

Run it to update a library: change its version and integrity below, run it, and commit what it wrote. Each archive comes
from the npm registry and is checked against its integrity. Two things are changed: imports of other libraries become
relative paths, because a page without a build step has no resolver, and references to source maps are removed.
`vendor.json` records version, licence and SHA-256 of every file; a test compares it with the files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

REGISTRY = "https://registry.npmjs.org"
TARGET = Path(__file__).parents[1] / "src/cortex/gateway/page/files/vendor"
LANGUAGES = ("bash", "css", "go", "javascript", "json", "python", "rust", "sql", "typescript", "xml", "yaml")

_source_map = re.compile(rb"\n?(//# sourceMappingURL=\S+|/\*# sourceMappingURL=\S+ \*/)\s*$")
_bare_import = re.compile(rb'(from\s*)"(preact|preact/hooks|@preact/signals-core)"')
_PATHS = {b"preact": b"./preact.js", b"preact/hooks": b"./hooks.js", b"@preact/signals-core": b"./signals-core.js"}


@dataclass(frozen=True, slots=True)
class Library:
    """One package of the registry, and the files taken from it: path in the archive → name here."""

    package: str
    version: str
    licence: str
    integrity: str
    files: dict[str, str]

    @property
    def url(self) -> str:
        return f"{REGISTRY}/{self.package}/-/{self.package.rpartition('/')[2]}-{self.version}.tgz"


LIBRARIES = (
    Library(
        "preact",
        "11.2.0",
        "MIT",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    ),
    Library(
        "@preact/signals-core",
        "1.14.5",
        "MIT",
        "sha512-vcRv7Ityz5JVmeiVqIluLFzT/PDS/AlhHUpw3/aUWqcVUs6bDGIPXE/6RSC4evBNWYvnniozg5Syfj33al3gkg==",
        {"dist/signals-core.mjs": "signals-core.js"},
    ),
    Library(
        "@preact/signals",
        "2.11.4",
        "MIT",
        "sha512-Rb+5RPo9gWSaHtzJeauhHxiC8KP/IF2DEPkHPEOGOnuy2wnJzRqyeLRankUCYd6ADqtxS6GnWGv6Ie343d8aYw==",
        {"dist/signals.mjs": "signals.js"},
    ),
    Library(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.js"},
    ),
    Library(
        "uplot",
        "1.6.32",
        "MIT",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
    ),
    Library(
        "marked",
        "18.2.0",
        "MIT",
        "sha512-KaeL+tAbtvI930q7HE2PN5lYXYdT8EiSmxHlN6F3rsfb57wd5mp5W5TLazpdj4inTQBJdgjYwbs40W/0VUGU+Q==",
        {"lib/marked.esm.js": "marked.js"},
    ),
    Library(
        "dompurify",
        "3.4.17",
        "MPL-2.0 OR Apache-2.0",
        "sha512-B/pSlYVHQ58kqISD/yDjuJ1yfzI34m1gF4lAod2bwSRhiN4K5Cl3H8Af7hqB2PmTL911tdEudnnXn5FnhRoz0w==",
        {"dist/purify.es.mjs": "dompurify.js"},
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "BSD-3-Clause",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {
            "es/core.min.js": "highlight.js",
            **{f"es/languages/{name}.min.js": f"languages/{name}.js" for name in LANGUAGES},
        },
    ),
)


def fetch(library: Library) -> tarfile.TarFile:
    """The archive of a library. Raises SystemExit when its bytes are not those that `integrity` promises."""
    with urllib.request.urlopen(library.url, timeout=60) as response:
        data = response.read()
    digest = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if digest != library.integrity:
        raise SystemExit(f"{library.url} has integrity {digest}, not the {library.integrity} of this script")
    return tarfile.open(fileobj=io.BytesIO(data))


def adapted(name: str, source: bytes) -> bytes:
    """The file as the page can import it."""
    source = _source_map.sub(b"", source.rstrip()) + b"\n"
    if name == "uplot.js":  # a script that sets a global variable; only the module form is unminified
        source += b"export default uPlot;\n"
    return _bare_import.sub(lambda found: found[1] + b'"' + _PATHS[found[2]] + b'"', source)


def main() -> None:
    """Fetch every library and write its files, licences and `vendor.json`."""
    (TARGET / "languages").mkdir(parents=True, exist_ok=True)
    records, licences = [], []
    for library in LIBRARIES:
        archive = fetch(library)

        def read(path: str, archive: tarfile.TarFile = archive) -> bytes:
            member = archive.extractfile(f"package/{path}")
            assert member is not None
            return member.read()

        hashes = {}
        for path, name in library.files.items():
            data = adapted(name, read(path))
            (TARGET / name).write_bytes(data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        licences.append(f"{library.package} {library.version}\n\n{read('LICENSE').decode().strip()}\n")
        records.append(
            {
                "package": library.package,
                "version": library.version,
                "licence": library.licence,
                "archive": library.url,
                "integrity": library.integrity,
                "sha256": hashes,
            }
        )
        print(f"{library.package} {library.version}: {len(hashes)} files")
    (TARGET / "LICENSES.txt").write_text(("\n" + "-" * 80 + "\n\n").join(licences))
    (TARGET / "vendor.json").write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
