"""The world of one episode. The type hints and docstrings of its methods become the tools' JSON schemas."""

from __future__ import annotations

from typing import Any


class Library:
    """books: id -> {"shelf": str, "status": "in" or "out"}. reader: who speaks, so nobody borrows for another."""

    def __init__(self, reader: str, books: dict[str, dict[str, Any]]):
        self.reader = reader
        self.books = books

    def get_book(self, book_id: str) -> dict[str, Any]:
        """Look a book up.

        Args:
            book_id: Which book, such as B3.
        """
        if book_id not in self.books:
            return {"error": "unknown_id"}
        return {"book_id": book_id, "shelf": self.books[book_id]["shelf"], "status": self.books[book_id]["status"]}

    def lend_book(self, book_id: str, reader_id: str) -> dict[str, Any]:
        """Lend a book that is in.

        Args:
            book_id: Which book.
            reader_id: Who takes it, such as S4.
        """
        if refused := self._refused(book_id, reader_id, wanted="in"):
            return refused
        self.books[book_id]["status"] = "out"
        return {"book_id": book_id, "lent_to": reader_id}

    def reserve_book(self, book_id: str, reader_id: str) -> dict[str, Any]:
        """Reserve a book that is out.

        Args:
            book_id: Which book.
            reader_id: Who wants it.
        """
        if refused := self._refused(book_id, reader_id, wanted="out"):
            return refused
        self.books[book_id]["reserved_for"] = reader_id
        return {"book_id": book_id, "reserved_for": reader_id}

    def _refused(self, book_id: str, reader_id: str, wanted: str) -> dict[str, Any] | None:
        """The error of a write; None if there is nothing against it."""
        if book_id not in self.books:
            return {"error": "unknown_id"}
        if reader_id != self.reader:
            return {"error": "not_permitted"}
        return None if self.books[book_id]["status"] == wanted else {"error": "forbidden_state"}
