"""Names of quantisations and sizes, as people write them."""
