"""The world of one episode. The type hints and docstrings of its methods become the tools' JSON schemas."""

from __future__ import annotations

from typing import Any


class Library:
    """books: id -> {"shelf": str, "status": "in", "out" or "reserved"}."""

    def __init__(self, books: dict[str, dict[str, Any]]):
        self.books = books

    def get_book(self, book_id: str) -> dict[str, Any]:
        """Look a book up.

        Args:
            book_id: Which book, such as B3.
        """
        if book_id not in self.books:
            return {"error": "unknown_id"}
        return {"book_id": book_id, **self.books[book_id]}

    def lend_book(self, book_id: str) -> dict[str, Any]:
        """Lend a book that is in.

        Args:
            book_id: Which book.
        """
        return self._change(book_id, "in", "out")

    def reserve_book(self, book_id: str) -> dict[str, Any]:
        """Reserve a book that is out.

        Args:
            book_id: Which book.
        """
        return self._change(book_id, "out", "reserved")

    def _change(self, book_id: str, before: str, after: str) -> dict[str, Any]:
        if book_id not in self.books:
            return {"error": "unknown_id"}
        if self.books[book_id]["status"] != before:
            return {"error": "forbidden_state"}
        self.books[book_id]["status"] = after
        return {"book_id": book_id, "status": after}
