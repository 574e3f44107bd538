"""As much of S3 as the object benchmark needs: signed targets for the driver, listing, deleting.

The driver (`headraced workload store-get` and others) speaks plain HTTP and knows nothing of credentials:
requests are signed here beforehand, in the query (AWS Signature Version 4), so that signing costs nothing
while the clock runs. A signature covers Host, hence the address: one made for a proxy is not valid at the
store.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import http.client
import os
import re
import urllib.parse
import xml.etree.ElementTree
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple
from xml.sax.saxutils import escape

from headrace.errors import Conflict, Invalid, Unavailable
from headrace.model.clock import wall_ns

_SIGNED_SECONDS = 12 * 3600
_ANSWER_SECONDS_MAX = 120
# The most that one DeleteObjects takes.
_DELETED_AT_ONCE = 1000


@dataclass(frozen=True)
class Credentials:
    access_key: str
    secret_key: str
    region: str = "us-east-1"
    session_token: str = ""

    @staticmethod
    def of_environment() -> Credentials:
        """Raises Invalid if the standard variables are not set."""
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            raise Invalid(f"--endpoint needs {' and '.join(missing)} in the environment")
        region = os.environ.get("AWS_REGION") or "us-east-1"
        token = os.environ.get("AWS_SESSION_TOKEN", "")
        return Credentials(os.environ[names[0]], os.environ[names[1]], region, token)

    def environment(self) -> dict[str, str]:
        """The standard variables, for a program that uses the store. An empty one counts as not set."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": self.session_token,
            "AWS_REGION": self.region,
        }


class Object(NamedTuple):
    key: str
    size_bytes: int


@dataclass(frozen=True)
class Bucket:
    """One bucket at one address, path style, plain HTTP. Each call makes its own connection."""

    address: str  # host:port
    name: str
    credentials: Credentials

    def at(self, address: str) -> Bucket:
        """The same bucket behind a proxy."""
        return replace(self, address=address)

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    def target(self, method: str, key: str = "", query: Mapping[str, str] | None = None) -> str:
        """Path and signed query of a request; valid for 12 hours, at this address."""
        path = urllib.parse.quote(f"/{self.name}/{key}" if key else f"/{self.name}")
        return _signed(method, self.address, path, dict(query or {}), self.credentials)

    def create(self) -> None:
        """Makes the bucket; one that exists and is ours is as good."""
        status, body = self._request("PUT", self.target("PUT"))
        if status != 200 and b"BucketAlreadyOwnedByYou" not in body:
            raise _refused("make the bucket", self, status, body)

    def put(self, key: str, data: bytes, content_type: str = "application/octet-stream") -> None:
        status, body = self._request("PUT", self.target("PUT", key), data, {"Content-Type": content_type})
        if status != 200:
            raise _refused(f"put {key}", self, status, body)

    def objects(self, prefix: str) -> Iterator[Object]:
        """Keys and lengths below `prefix`; one request a thousand."""
        token = ""
        while True:
            query = {"list-type": "2", "prefix": prefix}
            if token:
                query["continuation-token"] = token
            status, body = self._request("GET", self.target("GET", "", query))
            if status != 200:
                raise _refused(f"list {prefix}", self, status, body)
            # Elements without their namespace: servers differ in it.
            root = xml.etree.ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", body))
            for entry in root.iter("Contents"):
                yield Object(entry.findtext("Key", ""), int(entry.findtext("Size", "0")))
            token = root.findtext("NextContinuationToken", "")
            if root.findtext("IsTruncated") != "true" or not token:
                return

    def delete(self, prefix: str) -> None:
        """Deletes all objects below `prefix`."""
        keys = [found.key for found in self.objects(prefix)]
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            self._delete(keys[start : start + _DELETED_AT_ONCE])

    def _delete(self, keys: Iterable[str]) -> None:
        entries = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f"<Delete><Quiet>true</Quiet>{entries}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        target = self.target("POST", "", {"delete": ""})
        status, answer = self._request("POST", target, body, {"Content-MD5": digest})
        if status != 200 or b"<Error>" in answer:
            raise _refused("delete objects", self, status, answer)

    def _request(
        self, method: str, target: str, data: bytes = b"", fields: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=_ANSWER_SECONDS_MAX)
        try:
            connection.request(method, target, body=data or None, headers=dict(fields or {}))
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the store at {self.address} does not answer: {error}") from error
        finally:
            connection.close()


def _refused(doing: str, bucket: Bucket, status: int, body: bytes) -> Conflict:
    said = body[:300].decode(errors="replace")
    return Conflict(f"{doing}: {bucket.endpoint}/{bucket.name} answers {status}: {said}")


def _signed(method: str, host: str, path: str, query: dict[str, str], credentials: Credentials) -> str:
    stamp = datetime.datetime.fromtimestamp(wall_ns() / 1e9, datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{credentials.region}/s3/aws4_request"
    query |= {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(_SIGNED_SECONDS),
        "X-Amz-SignedHeaders": "host",
    }
    if credentials.session_token:
        query["X-Amz-Security-Token"] = credentials.session_token
    parts = sorted((_quoted(name), _quoted(value)) for name, value in query.items())
    text = "&".join(f"{name}={value}" for name, value in parts)
    canonical = f"{method}\n{path}\n{text}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = b"AWS4" + credentials.secret_key.encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return f"{path}?{text}&X-Amz-Signature={key.hex()}"


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")
