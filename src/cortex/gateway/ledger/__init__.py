"""Keys, budgets and spend: who may ask, how much, and what it came to.

Deciding happens in memory, in microseconds (`keyed_meter`, `limits`); what was used reaches the database in
batches, off the event loop (`ledger`, `store`).
"""

from cortex.gateway.ledger.keyed_meter import KeyedMeter
from cortex.gateway.ledger.keys import Keyring, KeySection, NewKey, generate
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.store import LedgerSection, Store, open_store

__all__ = [
    "KeySection",
    "KeyedMeter",
    "Keyring",
    "Ledger",
    "LedgerSection",
    "NewKey",
    "Store",
    "generate",
    "open_store",
]
