"""The pages of the cache: which are free, which are held by requests, and which contain a prefix that can be reused."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count


class PagePool:
    """The pages of one shard of the cache, numbered from 0.

    A page is held by one or more requests, or it is available. An available page may still contain a prefix: a request
    that begins with the same tokens can hold it again, until another request overwrites it. Pages without a prefix are
    reserved first, then those with one, in the order in which they were released.

    Args:
      num_pages: the number of pages.

    >>> pool = PagePool(3)
    >>> pages = pool.reserve([], 2)
    >>> pool.register(pages[0], b"digest of a page")
    >>> pool.release(pages)
    >>> pool.reserve([b"digest of a page"], 2), pool.num_available
    ([0, 2], 1)
    >>> pool.reserve([], 2) is None
    True
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._holders = dict.fromkeys(range(num_pages), 0)
        # The available pages without and with a prefix, in the order in which they will be reserved.
        self._empty = dict.fromkeys(self._holders)
        self._released: dict[int, None] = {}
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """The number of pages that can be reserved."""
        return len(self._empty) + len(self._released)

    @property
    def num_held(self) -> int:
        """The number of pages that requests hold."""
        return self.num_pages - self.num_available

    @property
    def num_reusable(self) -> int:
        """The number of available pages that contain a prefix."""
        return len(self._released)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest stored prefix.

        Args:
          digests: of the pages of a prompt, see `digests_of`.
        """
        found: list[int] = []
        for digest in digests:
            if digest not in self._page_of:
                break
            found.append(self._page_of[digest])
        return found

    def reserve(self, digests: Sequence[bytes], num_pages: int) -> list[int] | None:
        """The pages of a request, first those of its prefix; None if there are not enough.

        Args:
          digests: of the pages of the prompt that may be reused.
        """
        reused = self.match(digests)
        num_new = num_pages - len(reused)
        if num_new > self.num_available - sum(page in self._released for page in reused):
            return None
        for page in reused:
            self._hold(page)
        return reused + [self._hold(self._next()) for _ in range(num_new)]

    def register(self, page: int, digest: bytes) -> None:
        """Makes a full page reusable, unless there is a page with the same tokens already."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Ends the hold of a request.

        Pages are released from the last to the first: the end of a prefix is useless without its beginning, so it
        should be overwritten first.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                available = self._released if page in self._digest_of else self._empty
                available[page] = None

    def _next(self) -> int:
        if self._empty:
            return next(iter(self._empty))
        page = next(iter(self._released))
        del self._page_of[self._digest_of.pop(page)]
        return page

    def _hold(self, page: int) -> int:
        self._empty.pop(page, None)
        self._released.pop(page, None)
        self._holders[page] += 1
        return page


def digests_of(tokens: Sequence[int], page_size: int, adapter: int = 0) -> Iterator[bytes]:
    """Yields a digest of each page, which depends on all tokens up to the page's last one, and on the adapter.

    Tokens may be added between two digests. A page must be full when its digest is computed.

    >>> a = digests_of([1, 2, 3, 4], 2)
    >>> b = digests_of([1, 2, 9, 4], 2)
    >>> next(a) == next(b), next(a) == next(b)
    (True, False)
    """
    hashed = sha256(array("q", [adapter]).tobytes())
    for begin in count(0, page_size):
        hashed.update(array("q", tokens[begin : begin + page_size]).tobytes())
        yield hashed.digest()
