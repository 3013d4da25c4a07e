"""A Hub on loopback, as far as `huggingface_hub` needs one to create, commit to, read and refuse model repositories.

Repositories live in memory. A commit becomes visible as a whole or not at all. Large files come over the LFS protocol.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

Files = dict[str, bytes]
REPO_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
IS_LFS = re.compile(r"\.(safetensors|bin|gguf)$")


@dataclass
class Repo:
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def resolve(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None

    def commit(self, branch: str, files: Files) -> str:
        parent = self.branches[branch]
        content = repr([parent, sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items())])
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


@dataclass
class Hub:
    """The state of the server.

    Attributes:
        tokens: token -> user. A user reads and writes everything in the namespace of their name.
        requests: method, path, headers and body of every request.
        broken: parts that fail: "upload" of large files, "commit".
    """

    tokens: dict[str, str]
    repos: dict[str, Repo] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    url: str = ""

    def create(self, repo_id: str, private: bool = False) -> Repo:
        repo = self.repos[repo_id] = Repo(private)
        repo.branches["main"] = "0" * 40
        repo.commits["0" * 40] = {}
        return repo


def metadata_errors(card: str) -> list[str]:
    """What the Hub says of the metadata of a model card: the types of the entries that it knows."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if match is None:
        return ["no metadata"]
    data = yaml.safe_load(match[1])
    errors = []
    for key in ("tags", "datasets", "language"):
        values = data.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            errors.append(f'"{key}" must be an array of strings')
    names = data.get("datasets", []) + ([data["base_model"]] if "base_model" in data else [])
    errors += [f"{name!r} is no repository" for name in names if not REPO_NAME.fullmatch(str(name))]
    for key in ("library_name", "pipeline_tag", "license"):
        if not isinstance(data.get(key, ""), str):
            errors.append(f'"{key}" must be a string')
    for model in data.get("model-index", []):
        if not isinstance(model.get("name"), str):
            errors.append('"model-index[0].name" is required')
        for result in model.get("results", []):
            known = ("type" in result.get("task", {}), {"type", "name"} <= set(result.get("dataset", {})))
            if not all(known) or not all({"type", "value"} <= set(metric) for metric in result.get("metrics", [{}])):
                errors.append('"model-index[0].results" is malformed')
    return errors


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self.chunks())
        self.hub.requests.append((self.command, path, dict(self.headers), body))
        for method, pattern, handler in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                handler(self, body, **match.groupdict())
                return
        self.answer(404, {"error": f"no such route: {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    @property
    def user(self) -> str | None:
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def find(self, repo_id: str, write: bool = False) -> Repo | None:
        """The repository, or None after an answer that does not tell a private one from none."""
        repo = self.hub.repos.get(repo_id)
        is_owner = repo_id.split("/")[0] == self.user
        if repo is None or (repo.private and not is_owner):
            self.answer(
                401 if self.user is None else 404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound"
            )
            return None
        if write and not is_owner:
            self.answer(403, {"error": "Forbidden"}, X_Error_Message="no write access")
            return None
        return repo

    def whoami(self, body: bytes) -> None:
        if self.user is None:
            self.answer(401, {"error": "Invalid user token"})
        else:
            self.answer(200, {"type": "user", "name": self.user, "orgs": [], "auth": {"type": "access_token"}})

    def create(self, body: bytes) -> None:
        request = json.loads(body)
        if self.user is None:
            self.answer(401, {"error": "Invalid user token"})
            return
        repo_id = f"{request.get('organization') or self.user}/{request['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            self.answer(409, {**answer, "error": "You already created this model repo"})
        else:
            self.hub.create(repo_id, private=request.get("visibility") == "private" or request.get("private", False))
            self.answer(200, answer)

    def validate(self, body: bytes) -> None:
        errors = metadata_errors(json.loads(body)["content"])
        answer = {"errors": [{"message": error} for error in errors], "warnings": []}
        self.answer(400 if errors else 200, answer)

    def info(self, body: bytes, repo: str, revision: str | None = None) -> None:
        if (found := self.find(repo)) is None:
            return
        commit = found.resolve(revision or "main")
        if commit is None:
            self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        siblings = [{"rfilename": path} for path in found.commits[commit]]
        known = {
            "_id": repo,
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "private": found.private,
            "siblings": siblings,
        }
        self.answer(200, {**known, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, repo: str, revision: str, path: str | None = None) -> None:
        if (found := self.find(repo)) is None:
            return
        commit = found.resolve(revision)
        if commit is None:
            self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        recursive = "recursive=true" in self.path.lower()
        prefix = f"{path}/" if path else ""
        files, folders = [], set()
        for name, data in found.commits[commit].items():
            if not name.startswith(prefix):
                continue
            if "/" in name[len(prefix) :] and not recursive:
                folders.add(prefix + name[len(prefix) :].split("/")[0])
                continue
            files.append({"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name})
        self.answer(200, files + [{"type": "directory", "oid": "0" * 40, "path": name} for name in sorted(folders)])

    def branch(self, body: bytes, repo: str, branch: str) -> None:
        if (found := self.find(repo, write=True)) is None:
            return
        if branch in found.branches:
            self.answer(409, {"error": "Reference already exists"})
        else:
            start = json.loads(body or b"{}").get("startingPoint", "main")
            found.branches[branch] = found.resolve(start) or found.branches["main"]
            self.answer(200, {})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        if self.find(repo, write=True) is None:
            return
        modes = {
            file["path"]: "lfs" if IS_LFS.search(file["path"]) else "regular" for file in json.loads(body)["files"]
        }
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self.answer(200, {"files": files})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        if self.find(repo, write=True) is None:
            return
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.lfs:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if "upload" in self.hub.broken:
            self.answer(403, {"error": "no storage left"})
            return
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.lfs[oid] = body
        self.answer(200)

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        if (found := self.find(repo, write=True)) is None:
            return
        if "commit" in self.hub.broken:
            self.answer(403, {"error": "no commits today"})
            return
        files = dict(found.commits[found.branches[revision]])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.commit(revision, files)
        url = f"{self.hub.url}/{repo}/commit/{commit}"
        self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        if (found := self.find(repo)) is None:
            return
        commit = found.resolve(revision)
        if commit is None:
            self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        data = found.commits[commit].get(path)
        if data is None:
            self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        self.answer(200, data, X_Repo_Commit=commit, ETag=f'"{hashlib.sha256(data).hexdigest()}"')

    def telemetry(self, body: bytes) -> None:
        self.answer(200)

    def break_parts(self, body: bytes, parts: str) -> None:
        self.hub.broken = {part for part in parts.split(",") if part}
        self.answer(200)


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("GET HEAD", r"/api/telemetry/.*", Handler.telemetry),
    ("GET", rf"/api/models/{REPO}(?:/revision/{REVISION})?", Handler.info),
    ("GET", rf"/api/models/{REPO}/tree/{REVISION}(?:/(?P<path>.+))?", Handler.tree),
    ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)", Handler.branch),
    ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", Handler.preupload),
    ("POST", rf"/api/models/{REPO}/commit/{REVISION}", Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>\w+)", Handler.lfs_put),
    ("GET HEAD", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
    ("POST", r"/break/(?P<parts>.*)", Handler.break_parts),
]


@contextmanager
def serve_hub(tokens: dict[str, str]) -> Iterator[Hub]:
    """A Hub at `hub.url` while the context lasts."""
    hub = Hub(tokens)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
