"""Keys, budgets and spend: who may ask, how much, and what it came to.

Deciding happens in memory, in microseconds (`meter`, `limits`); what was used reaches the database in
batches, off the event loop (`book`, `store`).
"""

from .book import Book
from .keys import Keyring, KeySection, NewKey, generate
from .meter import KeyedMeter
from .store import LedgerSection, Store, open_store

__all__ = [
    "Book",
    "KeySection",
    "KeyedMeter",
    "Keyring",
    "LedgerSection",
    "NewKey",
    "Store",
    "generate",
    "open_store",
]
